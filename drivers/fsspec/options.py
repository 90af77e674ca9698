"""Options of fsspec's file systems: the arguments of their constructors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...errors import UriError
from ..options import Option, integer, switch
from ..uri import is_secret

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
