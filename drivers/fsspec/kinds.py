"""What is known of fsspec's file systems, and fsspec does not tell: how a file appears, and which
options there are.

Scope: knowledge, as tables and pure functions. ``fsspec.py`` does the I/O.
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

__all__ = ["Kind", "check_no_secrets", "kind_of", "modified_s", "options_of"]


@dataclass(frozen=True, slots=True)
class Kind:
    """``appears``: how a new file comes to be seen.

    ``renamed``  it is written under a temporary name, and the file system renames it, in one step
    ``copied``   likewise; and put in place by one copy in memory
    ``closed``   the store shows nothing before a file is closed, and then all of it
    ``unknown``  nobody promises anything: a temporary name, and a rename that is looked at afterwards

    ``folders``: they exist by themselves, and must be made. ``threads``: calls may be made at the
    same time. ``listings``: it takes the argument that keeps it from caching listings; one that
    takes it for an argument of its library's does not.
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
    "sftp": Kind(
        "renamed", folders=True, threads=False, listings=False
    ),  # paramiko mixes up the answers
    "ssh": Kind("renamed", folders=True, threads=False, listings=False),
    "hdfs": Kind("unknown", folders=True),
    **dict.fromkeys(("abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"), _OBJECTS),
}

# What a file system takes and its signature does not show.
_SSH: dict[str, Option] = {
    "port": Option(integer(1, 65535), 22, "the server's port"),
    "username": Option(str, None, "whose account; default: yours"),
    "key_filename": Option(
        str, None, "a file with a private key, besides the agent's and the usual ones"
    ),
    "timeout": Option(integer(1, 3600), 30, "seconds to wait for a connection"),
    "compress": Option(switch, False, "compress what is sent"),
}
_MORE = {"sftp": _SSH, "ssh": _SSH}

# Arguments of every file system that are ours to set, or mean nothing here.
_OURS = {
    "self", "args", "kwargs", "storage_options", "asynchronous", "loop", "batch_size", "auto_mkdir", "host", "session",
    "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "fs", "fo", "target_protocol",
    "default_cache_type", "default_fill_cache", "cache_regions", "version_aware", "ssh_kwargs",
}  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def kind_of(protocol: str, cls: type) -> Kind:
    """What is known of ``protocol``, which ``cls`` serves. Of one that is not known, the worst is
    taken to be true."""
    known = _KINDS.get(protocol)
    return known or Kind("unknown", folders=True, threads=bool(getattr(cls, "async_impl", False)))


def options_of(protocol: str, cls: type) -> dict[str, Option]:
    """The options of a file system: the named arguments of its constructor, typed by their
    defaults."""
    found = dict(_MORE.get(protocol, {}))
    for parameter in inspect.signature(cls.__init__).parameters.values():  # type: ignore[misc]
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.name not in _OURS:
            default = None if parameter.default is parameter.empty else parameter.default
            found[parameter.name] = Option(
                _parser(default), default, f"of fsspec's {protocol} file system"
            )
    return found


def _parser(default: Any) -> Callable[[str], Any]:
    if isinstance(default, bool):
        return switch
    if isinstance(default, int):
        return integer(0, 1 << 62)
    return str if isinstance(default, str) else _guessed


def _guessed(text: str) -> Any:
    """A value whose type is not known: true, false, and JSON objects and lists are what they look
    like; all else is text."""
    if text in ("true", "false"):
        return text == "true"
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is no proper JSON: {error}") from error
    return text


def check_no_secrets(where: str, located: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UriError for a secret before the host, and for one inside of an option's value, where
    nothing would hide it when it is printed. ``where`` is fit to be printed."""
    for options in (located, *_inner(list(given.values()))):
        for name in filter(is_secret, options):
            raise UriError(
                f"{name!r} is a secret, and this is no place for one",
                uri=where,
                advice=(
                    "Put it where the library looks for it: its own environment variables or files."
                ),
            )


def _inner(values: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Every mapping in ``values``, however deep."""
    for value in values:
        if isinstance(value, Mapping):
            yield value
            yield from _inner(list(value.values()))
        elif isinstance(value, list):
            yield from _inner(value)


def modified_s(info: Mapping[str, Any]) -> float:
    """When a file was written, in seconds since the epoch; 0 where the file system does not say."""
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
