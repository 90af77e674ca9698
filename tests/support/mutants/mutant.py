"""One small change of the engine that its tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """In ``file``, relative to the root of the repository, ``old`` becomes ``new``; ``tests`` notice it.

    ``says`` is what the changed engine does wrong. ``old`` occurs exactly once in the file. ``tests`` are arguments of
    pytest, the narrowest that fail.
    """

    says: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, source: str) -> str:
        """``source`` with the change. Raises ValueError where ``old`` does not occur exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} has the text of the mutant {self.says!r} {count} times: bring it up to date")
        return source.replace(self.old, self.new)
