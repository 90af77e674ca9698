"""Tables as aligned columns, with a dimmed header on a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .text import paint, printable

NONE = "-"
"""Placeholder for a missing figure."""
_COLOUR = re.compile("\x1b\\[[0-9]*m")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below titles, for terminals and pages. The columns in ``left`` are aligned to the
    left."""

    title: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def print(self) -> None:
        """Print the table below its title on the terminal. Cells are escaped here."""
        print(paint(self.title, "bold"))
        rows = [list(map(printable, row)) for row in self.rows]
        for line in columns(self.titles, rows, self.left):
            print(f"  {line}")
        print()


def columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] | None = None
) -> list[str]:
    """Return ``rows`` below ``titles`` as lines. The columns in ``left``, by default all, are
    aligned to the left, the others to the right. Cells may hold colours of :func:`.text.paint`."""
    kept = titles if left is None else left
    table = [titles, *rows]
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        line = []
        for title, cell, width in zip(titles, cells, widths, strict=True):
            gap = " " * (width - _width(cell))
            line.append(cell + gap if title in kept else gap + cell)
        lines.append("  ".join(line).rstrip())
    return [paint(lines[0], "dim"), *lines[1:]]


def _width(cell: str) -> int:
    return len(_COLOUR.sub("", cell))
