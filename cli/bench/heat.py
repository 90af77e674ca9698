"""Terminal tables whose background colours show which figures are high."""

from __future__ import annotations

from collections.abc import Sequence

from ..text import is_terminal, paint

__all__ = ["print_heat"]

_GROUNDS = (17, 18, 24, 30, 36, 71, 107, 143, 179, 208)
"""Colours of the 256-colour palette, from cold to hot."""


def print_heat(
    title: str, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> None:
    """Print a row of values for each name in ``rows``, below the column names. The highest value
    gets the hottest background."""
    greatest = max((value for _, values in rows for value in values), default=0.0)
    names = max(len(corner), *(len(name) for name, _ in rows))
    widths = [max(len(name), 7) for name in columns]
    print(paint(title, "bold"))
    head = "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))
    print("  " + paint(f"{corner.ljust(names)}  {head}", "dim"))
    for name, values in rows:
        cells = [
            _shaded(f"{value:.3g}".rjust(width), value / greatest if greatest else 0.0)
            for value, width in zip(values, widths, strict=True)
        ]
        print(f"  {name.ljust(names)}  " + "  ".join(cells))
    print()


def _shaded(text: str, heat: float) -> str:
    if not is_terminal():
        return text
    ground = _GROUNDS[min(len(_GROUNDS) - 1, int(heat * len(_GROUNDS)))]
    ink = 15 if heat < 0.5 else 0
    return f"\x1b[48;5;{ground}m\x1b[38;5;{ink}m{text}\x1b[0m"
