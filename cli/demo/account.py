"""Terminal output of the demos: a title, numbered chapters, and lines."""

from __future__ import annotations

from ..text import paint, printable


class Account:
    """Writes to stdout."""

    def __init__(self) -> None:
        self._chapter = 0

    def title(self, text: str) -> None:
        """Print the title."""
        print(paint(text, "bold"), flush=True)

    def chapter(self, text: str) -> None:
        """Start a numbered chapter."""
        self._chapter += 1
        self.title(f"\n{self._chapter}. {text}")

    def say(self, text: str, colour: str = "") -> None:
        """Print one line."""
        line = f"   {printable(text)}"
        if colour:
            line = paint(line, colour)
        print(line, flush=True)
