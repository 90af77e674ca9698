"""One small change of the engine that its tests must notice."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of ``file`` from ``old`` to ``new`` that ``tests`` detect.

    ``file`` is relative to the root of the repository. ``says`` describes the error in the changed
    engine. ``old`` and ``new`` are code as ``ast.unparse`` writes it, whole lines, so that neither
    the format nor a comment of the file matters; ``old`` occurs exactly once. ``tests`` are
    arguments of pytest, the narrowest that fail.
    """

    says: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, source: str) -> str:
        """``source`` with the change. Raises ValueError where ``old`` does not occur exactly once."""
        code = ast.unparse(ast.parse(source)) + "\n"
        count = code.count(self.old)
        if count != 1:
            problem = f"{self.file} has the text of the mutant {self.says!r} {count} times"
            raise ValueError(f"{problem}: bring it up to date")
        return code.replace(self.old, self.new)
