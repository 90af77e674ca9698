"""Early check whether this process can authenticate to a name node.

When a name node rejects a client, hdfs-native only sees a closed connection and retries until its
deadline.

Scope: compares the offered methods with the available ones. Does not validate tickets; the library
reports those errors at once.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence

from .spnego import LIBRARY

CHECK_S = 2.0
"""Seconds to wait for a name node's list of accepted methods."""

_ANSWER_NBYTES_MAX = 64 << 10

# Handshake of Hadoop's RPC, version 9, with SASL; then a message without a call, in state
# NEGOTIATE.
_PREAMBLE = b"hrpc" + bytes([9, 0, 0xDF])
_HEADER = bytes([0x08, 2, 0x10, 0, 0x18, 65, 0x22, 0, 0x28, 1])
_NEGOTIATE = bytes([0x10, 1])
_METHODS = ("SIMPLE", "KERBEROS", "TOKEN")


def unauthenticated(addresses: Sequence[str], authentication: str) -> tuple[str, str] | None:
    """Return the reason why this process cannot authenticate, and advice; None if it can, or if
    unknown.

    ``addresses`` are ``host:port`` of each name node. ``authentication`` is ``simple``,
    ``kerberos`` or ``token``. Blocks.
    """
    if authentication == "token":
        return None
    if authentication == "kerberos":
        return _without_library()
    for address in addresses:
        methods = offered(address)
        if methods and "SIMPLE" not in methods:
            return (
                f"the name node {address} requires {' or '.join(methods)}, but this client is "
                f"configured without",
                "Set HADOOP_CONF_DIR, or ?conf=, to a folder whose core-site.xml says "
                "hadoop.security.authentication=kerberos, and run kinit.",
            )
        if methods:
            return None
    return None


def _without_library() -> tuple[str, str] | None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return (
            f"Kerberos needs {LIBRARY}, which cannot be loaded: {error}",
            "apt-get install libgssapi-krb5-2, or yum install krb5-libs.",
        )
    return None


def offered(address: str) -> list[str]:
    """Return the authentication methods that a name node accepts; empty if it does not say."""
    host, _, port = address.rpartition(":")
    message = bytes([len(_HEADER)]) + _HEADER + bytes([len(_NEGOTIATE)]) + _NEGOTIATE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CHECK_S) as connection:
            connection.sendall(_PREAMBLE + len(message).to_bytes(4, "big") + message)
            with connection.makefile("rb") as stream:
                nbytes = int.from_bytes(stream.read(4), "big")
                answer = stream.read(min(nbytes, _ANSWER_NBYTES_MAX))
    except (OSError, ValueError):
        return []
    return [method for method in _METHODS if bytes([0x0A, len(method)]) + method.encode() in answer]
