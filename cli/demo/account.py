"""The account that the demo gives: short paragraphs, and on a terminal a bar that moves and some
colour."""

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
    """Writes to ``file``. rich leaves colours and the bar out where that is no terminal, or
    NO_COLOR is set."""

    def __init__(self, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._chapter = 0

    def title(self, text: str) -> None:
        """Once, at the top."""
        self._console.print(Text(text, "bold"))

    def chapter(self, text: str) -> None:
        """What comes next."""
        self._chapter += 1
        self._console.print()
        self._console.print(Text(f"{self._chapter}. {text}", "bold cyan"))

    def say(self, text: str, style: str = "") -> None:
        """One line."""
        self._console.print(Text(f"   {printable(text)}", style))

    def saved(self, saved: Saved, record: Record) -> None:
        """A checkpoint is committed."""
        learning = (
            f"loss {record.losses[saved.step]:.3f}  {record.tokens_per_s():,.0f} bytes of text/s"
        )
        rate = f"{size_text(int(saved.nbytes / saved.durable_s))}/s"
        saving = f"saved {size_text(saved.nbytes)} in {saved.durable_s:.2f} s ({rate})"
        self.say(
            f"step {saved.step:2}  {learning}  {saving}, training waited {saved.captured_s:.2f} s"
        )

    def files(self, files: Sequence[Found]) -> None:
        """What a torn save left."""
        width = max((len(f.key) for f in files), default=0)
        for f in files:
            line = f"  {f.key:<{width}} {f.nbytes:>12,} bytes"
            if f.finished:
                self.say(f"{line}  whole")
            else:
                self.say(f"{line}  unfinished, {f.stored_nbytes:,} stored", "yellow")

    def failures(self, failures: Sequence[Event]) -> None:
        """What the other ranks had to say: the first word of torch, and the first of ours."""
        for whose, ours in (("torch", False), ("holdfast", True)):
            said = [e for e in failures if e.told["ours"] == ours]
            if said:
                first = min(said, key=lambda e: e.time_s)
                message = " ".join(first.told["message"].split())
                if not ours:  # without the line of C++, and without the guesses
                    message = re.sub(r"^\[\S+\] ", "", message).partition(". ")[0]
                self.say(f"{whose}, on rank {first.rank}: {message}", "yellow")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """That something takes time, on a terminal, for the length of a ``with`` block."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(Text(text)):
            yield

    @contextmanager
    def bar(self, record: Record, steps: int) -> Iterator[Bar]:
        """A bar that follows ``record``, for the length of a ``with`` block."""
        columns = (TextColumn("  "), BarColumn(40), TextColumn("{task.description}"))
        moves = self._console.is_terminal
        with Progress(
            *columns, console=self._console, transient=True, disable=not moves
        ) as progress:
            yield Bar(progress, record, steps)


class Bar:
    """Made by :meth:`Account.bar`."""

    def __init__(self, progress: Progress, record: Record, steps: int) -> None:
        self._progress = progress
        self._record = record
        self._steps = steps
        self._task = progress.add_task("torchrun starts the ranks", total=steps)

    def look(self) -> None:
        """Show how far the record is."""
        if self._record.losses:
            step, loss = max(self._record.losses.items())
            said = (
                f"step {step}/{self._steps}  loss {loss:.3f}  "
                f"{self._record.tokens_per_s():,.0f} bytes of text/s"
            )
            self._progress.update(self._task, completed=step, description=said)
