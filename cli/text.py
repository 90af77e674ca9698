"""Words for figures: times, ranks, shapes; and text that is safe to print. No rich, no
numpy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence

__all__ = [
    "age_text",
    "is_terminal",
    "one_of",
    "paint",
    "printable",
    "ranks_text",
    "runs_text",
    "shape_text",
    "time_text",
]

RUNS_SHOWN = 4
_AGES = ((86400.0, "day"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32"}


def is_terminal() -> bool:
    """Whether stdout is a terminal that wants colours; a pipe, a file, NO_COLOR and TERM=dumb are
    none."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint(text: str, colour: str) -> str:
    """``text`` in a colour where stdout is a terminal, else as it is."""
    if not is_terminal():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def printable(text: str) -> str:
    """``text`` with everything escaped that a terminal would obey rather than show. Names come from
    files."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def time_text(seconds: float) -> str:
    """Seconds since the epoch as ``2031-02-03 04:05:06Z``; ``?`` beyond what a calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def age_text(seconds: float) -> str:
    """How long ago: ``3 h ago``."""
    for unit_s, name in _AGES:
        if seconds >= unit_s:
            count = int(seconds // unit_s)
            if name == "day":
                return f"{one_of(count, name)} ago"
            return f"{count:,} {name} ago"
    return "now"


def one_of(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def shape_text(shape: Sequence[int]) -> str:
    """``[4096×128]``."""
    return f"[{'×'.join(map(str, shape))}]"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 0``, ``ranks 0–3, 8``; of many runs the first few, and how many ranks there are in
    all."""
    known = set(ranks)
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known.pop()}"
    return f"ranks {runs_text(known)}"


def runs_text(numbers: Iterable[int]) -> str:
    """``0–3, 8``; of many runs the first few, and how many numbers there are in all."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs[:RUNS_SHOWN])
    if len(runs) > RUNS_SHOWN:
        total = sum(b - a + 1 for a, b in runs)
        shown += f", … ({total:,} in all)"
    return shown
