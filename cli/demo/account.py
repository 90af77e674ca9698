"""Terminal output of the demos: short paragraphs, a progress bar and some colour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ...core.units import size_text
from ..text import printable
from .journal import Event
from .record import Record, Saved
from .torn import Found

__all__ = ["Account", "Bar"]


class Account:
    """Writes to ``file``. rich omits colours and the bar if that is no terminal, or if NO_COLOR is
    set."""

    def __init__(self, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._chapter = 0

    def title(self, text: str) -> None:
        """Print the title."""
        self._console.print(Text(text, "bold"))

    def chapter(self, text: str) -> None:
        """Start a numbered chapter."""
        self._chapter += 1
        self._console.print()
        self._console.print(Text(f"{self._chapter}. {text}", "bold cyan"))

    def say(self, text: str, style: str = "") -> None:
        """Print one line."""
        self._console.print(Text(f"   {printable(text)}", style))

    def saved(self, saved: Saved, record: Record) -> None:
        """Report a committed checkpoint."""
        learning = (
            f"loss {record.losses[saved.step]:.3f}  {record.tokens_per_s():,.0f} bytes of text/s"
        )
        rate = f"{size_text(int(saved.nbytes / saved.durable_s))}/s"
        saving = f"saved {size_text(saved.nbytes)} in {saved.durable_s:.2f} s ({rate})"
        self.say(
            f"step {saved.step:2}  {learning}  {saving}, training waited {saved.captured_s:.2f} s"
        )

    def files(self, files: Sequence[Found]) -> None:
        """List the files that a torn save left."""
        width = max((len(f.key) for f in files), default=0)
        for f in files:
            line = f"  {f.key:<{width}} {f.nbytes:>12,} bytes"
            if f.finished:
                self.say(f"{line}  whole")
            else:
                self.say(f"{line}  unfinished, {f.stored_nbytes:,} stored", "yellow")

    def failures(self, failures: Sequence[Event]) -> None:
        """Print the first error of torch, and the first of ours, from the surviving ranks."""
        for whose, ours in (("torch", False), ("holdfast", True)):
            said = [e for e in failures if e.told["ours"] == ours]
            if said:
                first = min(said, key=lambda e: e.time_s)
                message = " ".join(first.told["message"].split())
                if not ours:  # drop the C++ source line and the guesses
                    message = re.sub(r"^\[\S+\] ", "", message).partition(". ")[0]
                self.say(f"{whose}, on rank {first.rank}: {message}", "yellow")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show ``text`` with a spinner during a ``with`` block, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(Text(text)):
            yield

    @contextmanager
    def bar(self, record: Record, steps: int) -> Iterator[Bar]:
        """Yield a bar that follows ``record`` during a ``with`` block."""
        columns = (TextColumn("  "), BarColumn(40), TextColumn("{task.description}"))
        moves = self._console.is_terminal
        with Progress(
            *columns, console=self._console, transient=True, disable=not moves
        ) as progress:
            yield Bar(progress, record, steps)


class Bar:
    """Progress bar of a job, made by :meth:`Account.bar`."""

    def __init__(self, progress: Progress, record: Record, steps: int) -> None:
        self._progress = progress
        self._record = record
        self._steps = steps
        self._task = progress.add_task("torchrun starts the ranks", total=steps)

    def look(self) -> None:
        """Update the bar from the record."""
        if self._record.losses:
            step, loss = max(self._record.losses.items())
            said = (
                f"step {step}/{self._steps}  loss {loss:.3f}  "
                f"{self._record.tokens_per_s():,.0f} bytes of text/s"
            )
            self._progress.update(self._task, completed=step, description=said)
