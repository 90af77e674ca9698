"""Text for figures (times, ranks, shapes), and escaping for terminals. No rich, no numpy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence

RUNS_SHOWN = 4
_AGES = ((86400.0, "day"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32"}


def is_terminal() -> bool:
    """Return whether stdout is a terminal that accepts colours. NO_COLOR and TERM=dumb refuse
    them."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()


def paint(text: str, colour: str) -> str:
    """Return ``text`` in a colour if stdout is a terminal, else unchanged."""
    if not is_terminal():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped. Names come from files, and a terminal would
    obey them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def time_text(seconds: float) -> str:
    """Return seconds since the epoch as ``2031-02-03 04:05:06Z``; ``?`` outside the calendar's
    range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def age_text(seconds: float) -> str:
    """Return an age as text: ``3 h ago``."""
    for unit_s, name in _AGES:
        if seconds >= unit_s:
            count = int(seconds // unit_s)
            if name == "day":
                return f"{one_of(count, name)} ago"
            return f"{count:,} {name} ago"
    return "now"


def one_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 file``, ``2 files``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def some(names: Sequence[str], most: int = RUNS_SHOWN) -> str:
    """Return names as text: ``a, b``; of more than ``most``, the first ones and the count of the
    others."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most:,} more"
    return shown


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text: ``[4096×128]``."""
    return f"[{'×'.join(map(str, shape))}]"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 0``, ``ranks 0–3, 8``, or ``no rank``. Long lists are cut as by
    :func:`runs_text`."""
    known = set(ranks)
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known.pop()}"
    return f"ranks {runs_text(known)}"


def runs_text(numbers: Iterable[int]) -> str:
    """Return numbers as runs of consecutive ones: ``0–3, 8``.

    Of more than ``RUNS_SHOWN`` runs, shows the first ones and the count of all numbers.
    """
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
