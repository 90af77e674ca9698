"""Progress of long commands on stderr: a bar on a terminal, or a line from time to time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from ..core.units import size_text
from .text import printable

LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress_bar(
    title: str, *, lines: bool = False, line_every_s: float = LINE_EVERY_S
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the bytes done and the total bytes.

    On a terminal with rich it moves a bar. Elsewhere it prints a line every ``line_every_s`` if
    ``lines`` is set, and otherwise nothing.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        if lines:
            yield _lines(title, line_every_s)
        else:
            yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def last_line(*, lines: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line of progress. On a terminal each line replaces the
    previous one; elsewhere they are printed only if ``lines`` is set."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        if lines:
            yield lambda line: print(printable(line), file=sys.stderr, flush=True)
        else:
            yield lambda line: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("") as status:
        yield lambda line: status.update(escape(printable(line)))


def _lines(title: str, every_s: float) -> Callable[[int, int], None]:
    began_s = time.monotonic()
    said_s = began_s
    first: int | None = None

    def say(done: int, total: int) -> None:
        nonlocal said_s, first
        now_s = time.monotonic()
        if first is None:  # bytes done earlier do not count towards the rate
            first = done
        if now_s - said_s >= every_s:
            said_s = now_s
            rate = (done - first) / (now_s - began_s) / 1e9
            print(
                f"{title}: {size_text(done)} of {size_text(total)}, {rate:.2f} GB/s",
                file=sys.stderr,
                flush=True,
            )

    return say
