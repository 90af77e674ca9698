"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["cell", "table"]

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>|"})


def cell(text: str, *, code: bool = False) -> str:
    """A text as a cell has it: on one line, and with no character that means something."""
    line = " ".join(text.split())
    if code:
        return "`" + line.replace("|", "\\|") + "`" if line else ""
    return line.translate(_SPECIAL)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
