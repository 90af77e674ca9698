"""Driver options: declared in a table on the driver class, read from the URI, listed in errors and
help.

A table looks like ``OPTIONS = {"threads": Option(integer(1, 64), 8, "operations in flight")}``.
Options common to all schemes (retries, limits, …) are in ``layers/stack.py``; drivers must not
redeclare their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from ..core.units import duration_text, exact_size_text, parse_duration, parse_size
from ..errors import UriError
from .uri import Uri

__all__ = [
    "Option",
    "choice",
    "duration",
    "integer",
    "option_values",
    "or_off",
    "size",
    "switch",
    "url",
]

_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``parse`` converts text to a value, or raises a ValueError that says which values
    are allowed."""

    parse: Callable[[str], Any]
    default: Any
    help: str

    def takes(self, text: str) -> bool:
        """Return whether ``text`` is a valid value."""
        try:
            self.parse(text)
        except ValueError:
            return False
        return True

    def text(self, value: Any) -> str:
        """Return text that ``parse`` converts back to ``value``, with its unit if it has one."""
        if isinstance(value, bool):
            if value:
                return "on"
            return "off"
        parse = self.parse
        if isinstance(parse, or_off):
            parse = parse.parse
        if isinstance(parse, _Quantity):
            return parse.text(value)
        return str(value)


def option_values(known: Mapping[str, Option], uri: Uri) -> dict[str, Any]:
    """Return the value of every option in ``known``: from ``uri``, else its default.

    Raises UriError for an unknown option, listing the known ones, and for an invalid value.
    """
    for name in uri.options:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UriError(
                f"{uri.scheme}:// has no option {name!r}",
                uri=uri.redacted,
                advice=f"Known options: {names}.",
            )
    return {name: _value(name, option, uri) for name, option in known.items()}


def choice(*allowed: str) -> Callable[[str], str]:
    """Return a parser that accepts one of these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of: {', '.join(allowed)}")
        return text

    return parse


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(text)

    return parse


@dataclass(frozen=True, slots=True)
class _Quantity:
    """Parser for a quantity from ``least`` to ``most``."""

    what: str
    example: str
    read: Callable[[str], Any]
    text: Callable[[Any], str]
    """Returns text that parses to a value."""
    least: float
    most: float

    def __call__(self, text: str) -> Any:
        try:
            value = self.read(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            raise ValueError(
                f"must be a {self.what} from {self.text(self.least)} to {self.text(self.most)}, "
                f"such as {self.example}"
            )
        return value


def size(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for a size in bytes: ``32MiB``, ``500 MB``, ``4096``."""
    return _Quantity("size", "32MiB", parse_size, exact_size_text, least, most)


def duration(least_s: float, most_s: float) -> Callable[[str], float]:
    """Return a parser for a duration in seconds: ``30``, ``1.5s``, ``2min``, ``1h``."""
    return _Quantity("duration", "30s", parse_duration, duration_text, least_s, most_s)


def switch(text: str) -> bool:
    """Parse ``on`` or ``off``. Also accepts true/false, yes/no and 1/0."""
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError("must be on or off")
    return text.lower() in _ON


def url(text: str) -> str:
    """Parse the URL of a server: http:// or https://, a host, optionally a path. Rejects queries,
    which may contain a signature."""
    parts = urlsplit(text)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or set("?#@") & set(unquote(text))
    ):
        raise ValueError(
            "must be a URL, http:// or https://, without user, password, query and fragment"
        )
    return text


@dataclass(frozen=True, slots=True)
class or_off:
    """Parser that also accepts ``off``, as None."""

    parse: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        if text == "off":
            return None
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{error}, or off") from error


def _value(name: str, option: Option, uri: Uri) -> Any:
    if name not in uri.options:
        return option.default
    try:
        return option.parse(uri.options[name])
    except ValueError as error:
        raise UriError(f"option {name!r} {error}", uri=uri.redacted) from error
