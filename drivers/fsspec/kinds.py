"""Properties of fsspec's file systems that fsspec does not expose: above all, how a new file
appears. And their options: the arguments of their constructors.

Scope: tables and pure functions. ``driver.py`` does the I/O.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ...errors import UriError
from ..options import Option, integer, switch
from ..uri import is_secret


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of one file system. ``appears`` says how a new file becomes visible:

        ``renamed``  written under a temporary name and renamed in one step
        ``copied``   written under a temporary name and put in place by one copy in memory
        ``closed``   invisible until it is closed, then whole
        ``unknown``  nothing is promised: temporary name, and a rename whose result is checked

    ``folders``: folders exist on their own and must be created. ``threads``: concurrent calls are
    allowed. ``listings``: accepts the argument that disables the listings cache; other file systems
    would pass it on to their library.
    """

    appears: Literal["renamed", "copied", "closed", "unknown"]
    folders: bool
    threads: bool = True
    shared: bool = True
    listings: bool = True


_OBJECTS = Kind("closed", folders=False)
_KINDS = {
    "file": Kind("renamed", folders=True, shared=False),
    "local": Kind("renamed", folders=True, shared=False),
    "memory": Kind("copied", folders=False, shared=False),
    # paramiko mixes up the replies to concurrent calls.
    "sftp": Kind("renamed", folders=True, threads=False, listings=False),
    "ssh": Kind("renamed", folders=True, threads=False, listings=False),
    "hdfs": Kind("unknown", folders=True),
    **dict.fromkeys(("abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"), _OBJECTS),
}

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def kind_of(protocol: str, cls: type) -> Kind:
    """Return the properties of ``protocol``, which is served by ``cls``. Assumes the worst for an
    unknown one."""
    known = _KINDS.get(protocol)
    return known or Kind("unknown", folders=True, threads=bool(getattr(cls, "async_impl", False)))


def modified_s(info: Mapping[str, Any]) -> float:
    """Return a file's modification time in seconds since the epoch; 0 if the file system does not
    report it."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


# Arguments that the signature does not show.
_SSH: dict[str, Option] = {
    "port": Option(integer(1, 65535), 22, "the server's port"),
    "username": Option(str, None, "user name; default: yours"),
    "key_filename": Option(
        str, None, "private key file, in addition to the agent's and the usual ones"
    ),
    "timeout": Option(integer(1, 3600), 30, "seconds to wait for a connection"),
    "compress": Option(switch, False, "compress what is sent"),
}
_MORE = {"sftp": _SSH, "ssh": _SSH}

# Arguments common to all file systems that the driver sets itself, or that have no meaning here.
_OURS = {
    "self", "args", "kwargs", "storage_options", "asynchronous", "loop", "batch_size", "auto_mkdir",
    "host", "session", "use_listings_cache", "listings_expiry_time", "max_paths",
    "skip_instance_cache", "fs", "fo", "target_protocol", "default_cache_type",
    "default_fill_cache", "cache_regions", "version_aware", "ssh_kwargs",
}  # fmt: skip


def options_of(protocol: str, cls: type) -> dict[str, Option]:
    """Return the options of a file system: the named arguments of its constructor, typed by their
    defaults."""
    found = dict(_MORE.get(protocol, {}))
    for parameter in inspect.signature(cls.__init__).parameters.values():  # type: ignore[misc]
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.name not in _OURS:
            default = parameter.default
            if default is parameter.empty:
                default = None
            found[parameter.name] = Option(
                _parser(default), default, f"see fsspec's {protocol} file system"
            )
    return found


def _parser(default: Any) -> Callable[[str], Any]:
    if isinstance(default, bool):
        return switch
    if isinstance(default, int):
        return integer(0, 1 << 62)
    if isinstance(default, str):
        return str
    return _guessed


def _guessed(text: str) -> Any:
    """Parse a value of unknown type: true, false, JSON objects and lists; anything else is text."""
    if text in ("true", "false"):
        return text == "true"
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from error
    return text


def check_no_secrets(where: str, located: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UriError for a secret before the host, and for one nested in an option's value, where
    printing would not hide it. ``where`` is safe to print."""
    for options in (located, *_inner(list(given.values()))):
        for name in filter(is_secret, options):
            raise UriError(
                f"{name!r} is a secret, which must not be in the URI",
                uri=where,
                advice=(
                    "Put it where the library looks for it: its own environment variables or files."
                ),
            )


def _inner(values: list[Any]) -> Iterator[Mapping[str, Any]]:
    for value in values:
        if isinstance(value, Mapping):
            yield value
            yield from _inner(list(value.values()))
        elif isinstance(value, list):
            yield from _inner(value)
