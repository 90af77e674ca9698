"""The options of a driver: declared once, in a table on its class; read from the URI; listed in errors and in help.

A table looks like ``OPTIONS = {"threads": Option(integer(1, 64), 8, "operations in flight")}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UriError
from .uri import Uri

__all__ = ["Option", "choice", "integer", "option_values"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``parse`` turns its text into a value, or raises a ValueError that says what is allowed."""

    parse: Callable[[str], Any]
    default: Any
    help: str


def option_values(known: Mapping[str, Option], uri: Uri) -> dict[str, Any]:
    """The value of every option in ``known``: from ``uri``, else its default.

    Raises UriError, which names the known options, for one that is not known, and for a value that its option refuses.
    """
    for name in uri.options:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UriError(
                f"{uri.scheme}:// has no option {name!r}", uri=uri.redacted, advice=f"Known options: {names}."
            )
    return {name: _value(name, option, uri) for name, option in known.items()}


def choice(*allowed: str) -> Callable[[str], str]:
    """A parser that takes one of these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"is one of: {', '.join(allowed)}")
        return text

    return parse


def integer(least: int, most: int) -> Callable[[str], int]:
    """A parser that takes a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"is a whole number from {least} to {most}")
        return int(text)

    return parse


def _value(name: str, option: Option, uri: Uri) -> Any:
    if name not in uri.options:
        return option.default
    try:
        return option.parse(uri.options[name])
    except ValueError as error:
        raise UriError(f"option {name!r} {error}", uri=uri.redacted) from error
