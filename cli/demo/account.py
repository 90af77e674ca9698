"""Terminal output of the demos: a title, numbered chapters, and lines."""

from __future__ import annotations

from typing import IO

from ..text import paint, printable


class Account:
    """Writes to ``file``."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._chapter = 0

    def title(self, text: str) -> None:
        """Print the title."""
        print(paint(text, "bold", self._file), file=self._file, flush=True)

    def chapter(self, text: str) -> None:
        """Start a numbered chapter."""
        self._chapter += 1
        self.title(f"\n{self._chapter}. {text}")

    def say(self, text: str, colour: str = "") -> None:
        """Print one line."""
        line = f"   {printable(text)}"
        if colour:
            line = paint(line, colour, self._file)
        print(line, file=self._file, flush=True)
