"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["cell", "table"]

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>|"})


def cell(text: str, *, code: bool = False) -> str:
    """Return a text as a table cell: on one line, with special characters escaped."""
    line = " ".join(text.split())
    if code:
        return "`" + line.replace("|", "\\|") + "`" if line else ""
    return line.translate(_SPECIAL)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
