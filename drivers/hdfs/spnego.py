"""SPNEGO tokens (RFC 4559), which authenticate HTTP requests with a Kerberos ticket.

Uses the system's ``libgssapi_krb5``, which hdfs-native loads as well; Python bindings have no Linux
wheels. Scope: the first token only, which is all that Kerberos needs. The server's reply is not
authenticated, just as the rest of the response is not over plain HTTP.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

LIBRARY = "libgssapi_krb5.so.2"

_HOST_BASED_SERVICE = bytes.fromhex("2a864886f71201020104")  # 1.2.840.113554.1.2.1.4
_SPNEGO = bytes.fromhex("2b0601050502")  # 1.3.6.1.5.5.2
_COMPLETE = 0
_CONTINUE_NEEDED = 1
_OF_GSSAPI = 1
_OF_MECHANISM = 2


class NoTicket(Exception):
    """No token is available: the library is missing, or there is no valid ticket. The message says
    which."""


class _Buffer(ctypes.Structure):
    _fields_ = (("length", ctypes.c_size_t), ("value", ctypes.c_void_p))


class _Oid(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint32), ("elements", ctypes.c_char_p))


def negotiate_token(host: str) -> bytes:
    """Return the token, before base64 encoding, for the ``Authorization: Negotiate`` header of a
    request to ``host``.

    Blocks: may ask the KDC for a ticket. Raises NoTicket.
    """
    gss = _library()
    name = _service_name(gss, f"HTTP@{host}")
    context = ctypes.c_void_p()
    token = _Buffer()
    minor = ctypes.c_uint32()
    mechanism = _Oid(len(_SPNEGO), _SPNEGO)
    try:
        major = gss.gss_init_sec_context(
            ctypes.byref(minor),
            None,
            ctypes.byref(context),
            name,
            ctypes.byref(mechanism),
            ctypes.c_uint32(0),
            ctypes.c_uint32(0),
            None,
            None,
            None,
            ctypes.byref(token),
            None,
            None,
        )
        if major not in (_COMPLETE, _CONTINUE_NEEDED):
            raise NoTicket(_message(gss, major, minor.value))
        return _taken(gss, token)
    finally:
        gss.gss_delete_sec_context(ctypes.byref(minor), ctypes.byref(context), None)
        gss.gss_release_name(ctypes.byref(minor), ctypes.byref(name))


@functools.cache
def _library() -> Any:
    try:
        gss = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoTicket(f"{LIBRARY} cannot be loaded: {error}") from error
    for function in ("gss_import_name", "gss_init_sec_context", "gss_display_status"):
        getattr(gss, function).restype = ctypes.c_uint32
    return gss


def _service_name(gss: Any, service: str) -> ctypes.c_void_p:
    encoded = service.encode()
    text = _Buffer(len(encoded), ctypes.cast(ctypes.c_char_p(encoded), ctypes.c_void_p))
    kind = _Oid(len(_HOST_BASED_SERVICE), _HOST_BASED_SERVICE)
    name = ctypes.c_void_p()
    minor = ctypes.c_uint32()
    major = gss.gss_import_name(
        ctypes.byref(minor), ctypes.byref(text), ctypes.byref(kind), ctypes.byref(name)
    )
    if major != _COMPLETE:
        raise NoTicket(_message(gss, major, minor.value))
    return name


def _message(gss: Any, major: int, minor: int) -> str:
    texts = []
    for code, kind in ((major, _OF_GSSAPI), (minor, _OF_MECHANISM)):
        more = ctypes.c_uint32()
        ignored = ctypes.c_uint32()
        text = _Buffer()
        found = gss.gss_display_status(
            ctypes.byref(ignored),
            ctypes.c_uint32(code),
            ctypes.c_int(kind),
            None,
            ctypes.byref(more),
            ctypes.byref(text),
        )
        if found == _COMPLETE:
            texts.append(_taken(gss, text).decode(errors="replace"))
    return ": ".join(texts) or f"GSSAPI says {major:#x}"


def _taken(gss: Any, buffer: _Buffer) -> bytes:
    content = b""
    if buffer.value:
        content = ctypes.string_at(buffer.value, buffer.length)
    gss.gss_release_buffer(ctypes.byref(ctypes.c_uint32()), ctypes.byref(buffer))
    return content
