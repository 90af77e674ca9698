"""The account that the demo gives: short paragraphs, and on a terminal a bar that moves and some colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..text import printable, size_text
from .journal import Event
from .record import Record, Saved
from .torn import Found

__all__ = ["Account", "Bar"]


class Account:
    """Writes to ``file``. rich leaves colours and the bar out where that is no terminal, or NO_COLOR is set."""

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

    def saved(self, saved: Saved) -> None:
        """A checkpoint is committed."""
        rate = size_text(int(saved.nbytes / saved.durable_s))
        self.say(
            f"step {saved.step:3}  saved {size_text(saved.nbytes)} in {saved.durable_s:.2f} s ({rate}/s); "
            f"training stood still for {saved.captured_s:.2f} s of it"
        )

    def files(self, files: Sequence[Found]) -> None:
        """What a torn save left."""
        for f in files:
            folder, _, name = f.key.rpartition("/")
            state = "whole" if f.finished else f"unfinished: {f.stored_nbytes:,} bytes stored, never given its name"
            self.say(f"  {folder}/{name:<40} {f.nbytes:>12,} bytes  {state}", "" if f.finished else "yellow")

    def failure(self, event: Event) -> None:
        """What a rank said as it gave up."""
        message = " ".join(event.told["message"].split())
        self.say(f"rank {event.rank}  {event.told['type']}: {message}", "yellow")

    @contextmanager
    def bar(self, record: Record, steps: int) -> Iterator[Bar]:
        """A bar that follows ``record``, for the length of a ``with`` block."""
        columns = (TextColumn("  "), BarColumn(40), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as progress:
            yield Bar(progress, record, steps)


class Bar:
    """Made by :meth:`Account.bar`."""

    def __init__(self, progress: Progress, record: Record, steps: int) -> None:
        self._progress, self._record, self._steps = progress, record, steps
        self._task = progress.add_task("torchrun starts the ranks", total=steps)

    def look(self) -> None:
        """Show how far the record is."""
        if self._record.losses:
            step, loss = max(self._record.losses.items())
            rate = f"{self._record.tokens_per_s:,.0f} bytes of text/s"
            self._progress.update(self._task, completed=step, description=f"step {step}/{self._steps}  loss {loss:.3f}  {rate}")
