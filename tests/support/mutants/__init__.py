"""Small changes of the engine that its tests must notice, a table for each part of it.

A table is a text file. After a line about the table, each entry has these lines: "# " and the error
in the changed engine; the tests that notice it, the narrowest ones, as arguments of pytest; and for
each changed file its path in the repository and lines as in a diff. Lines that begin with " " or
"-" are the old code, lines with " " or "+" the new code. The code is as ``ast.unparse`` writes it,
so that neither the format nor a comment of the file matters. The old code occurs exactly once.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Change:
    """A change of one file from ``old`` to ``new``."""

    file: str
    old: str = ""
    new: str = ""

    def applied(self, source: str) -> str:
        """Change ``source``. Raises ValueError unless ``old`` occurs exactly once."""
        code = f"\n{ast.unparse(ast.parse(source))}\n"
        count = code.count(f"\n{self.old}")
        if count != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times: bring it up to date")
        return code.replace(f"\n{self.old}", f"\n{self.new}")[1:]


@dataclass
class Mutant:
    """An entry of a table. ``noticed_by``: tests, or how the simulator notices it."""

    says: str
    noticed_by: str
    changes: list[Change] = field(default_factory=list)


def mutants_in(table: Path) -> list[Mutant]:
    """Read a table."""
    found: list[Mutant] = []
    for entry in table.read_text().split("\n# ")[1:]:
        says, noticed_by, *lines = entry.splitlines()
        mutant = Mutant(says, noticed_by)
        for line in filter(None, lines):
            if line[0] not in " -+":
                mutant.changes.append(Change(line))
                continue
            if line[0] in " -":
                mutant.changes[-1].old += f"{line[1:]}\n"
            if line[0] in " +":
                mutant.changes[-1].new += f"{line[1:]}\n"
        found.append(mutant)
    return found


TABLES = [mutants_in(table) for table in sorted(Path(__file__).parent.glob("*.diff"))]
