"""Terminal output of the demos: short paragraphs, a line that moves, and some colour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.text import Text

from ..text import printable
from .journal import Event
from .torn import Found

__all__ = ["Account"]


class Account:
    """Writes to ``file``. rich omits colours and the moving line if that is no terminal, or if
    NO_COLOR is set."""

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
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """Show that a job runs during a ``with`` block, on a terminal. Yield a function that
        changes the text."""
        if not self._console.is_terminal:
            yield lambda text: None
            return
        with self._console.status(Text("torchrun starts the ranks")) as status:
            yield lambda text: status.update(Text(text))
