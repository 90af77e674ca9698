"""Tables: drawn by rich on a terminal if it is installed, else plain columns."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from .text import is_terminal, paint, printable

__all__ = ["print_table"]


def print_table(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]
) -> None:
    """Print ``rows`` below ``titles``. The columns in ``left`` are aligned to the left, the others
    to the right. Cells are escaped here."""
    escaped = [[printable(cell) for cell in row] for row in rows]
    if is_terminal() and find_spec("rich") is not None:
        _drawn(title, titles, escaped, left)
        return
    print(paint(title, "bold"))
    widths = [max(map(len, column)) for column in zip(titles, *escaped, strict=True)]
    for number, cells in enumerate([titles, *escaped]):
        line = "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(titles, cells, widths, strict=True)
        )
        print("  " + (paint(line.rstrip(), "dim") if number == 0 else line.rstrip()))
    print()


def _drawn(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in titles:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    # On a narrow terminal, wrapped lines are better than truncated figures.
    console.width = max(console.width, console.measure(table).maximum)
    console.print(table)
