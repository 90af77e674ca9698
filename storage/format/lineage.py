"""The lineage of a run: which of its checkpoints lead to where training is, after it went back to
an earlier one.

A run is a tree of *branches*. It begins on the root branch. Each time training goes back to a step,
a new branch leaves the one that it was on, at that step. A checkpoint's manifest records the branch
on which it was saved. The run's folder holds one small JSON object, ``lineage.json``: where each
branch left its parent, and which branch is current.

A checkpoint is *live* if it is on the current branch, or on one of its ancestors at or before the
step at which the next branch left. Every other checkpoint is *abandoned*.

Pure: no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.decoded_json import Json, int_in, object_in, str_in
from ...errors import DamagedError

__all__ = ["LINEAGE_KEY", "ROOT", "Lineage", "is_branch"]

LINEAGE_KEY = "lineage.json"
ROOT = ""
"""The branch on which a run begins; checkpoints that record no branch are on it."""

_VERSION = 1
_NBYTES_MAX = 4 << 20
_BRANCH = re.compile(r"[0-9a-f]{16}")


def is_branch(text: object) -> bool:
    """Whether ``text`` is the name of a branch."""
    return isinstance(text, str) and (text == ROOT or _BRANCH.fullmatch(text) is not None)


@dataclass(frozen=True)
class Lineage:
    """``parents`` maps each branch to the branch that it left, and the step at which it did; the
    root has no parent."""

    current: str = ROOT
    parents: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def is_live(self, branch: str, step: int | None) -> bool:
        """Whether a checkpoint of ``branch`` at ``step`` leads to where training is. One without a
        step always counts as live, and a branch that is not recorded counts as the root: such a
        checkpoint was copied from another run."""
        if step is None:
            return True
        if branch not in self.parents:
            branch = ROOT
        here = self.current
        limit = math.inf
        while here != branch:
            if here == ROOT:
                return False
            here, left_at = self.parents[here]
            limit = min(limit, left_at)
        return step <= limit

    def gone_back(self, branch: str, step: int, new: str) -> Lineage:
        """The lineage after training went back to the checkpoint of ``branch`` at ``step``; ``new``
        is then current."""
        if branch in self.parents:
            parent = branch
        else:
            parent = ROOT
        return Lineage(new, {**self.parents, new: (parent, step)})

    def encode(self) -> bytes:
        """The content of ``lineage.json``."""
        branches = {
            name: {"from": parent, "step": step} for name, (parent, step) in self.parents.items()
        }
        record = {"version": _VERSION, "current": self.current, "branches": branches}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> Lineage:
        """What :meth:`encode` returned. Raises DamagedError for anything else."""
        try:
            return cls._checked(json.loads(data) if len(data) <= _NBYTES_MAX else None)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"it is damaged: {error}", key=LINEAGE_KEY) from error

    @classmethod
    def _checked(cls, record: Json) -> Lineage:
        if not isinstance(record, dict) or record["version"] != _VERSION:
            raise ValueError("it is not a record of version 1")
        parents: dict[str, tuple[str, int]] = {}
        for name, content in object_in(record["branches"], "branches").items():
            if not is_branch(name) or name == ROOT:
                raise ValueError("a branch is malformed")
            left = object_in(content, f"branch {name}")
            parents[name] = (str_in(left["from"], "from"), int_in(left["step"], "step"))
        lineage = cls(str_in(record["current"], "current"), parents)
        lineage._check_ends_at_root()
        return lineage

    def _check_ends_at_root(self) -> None:
        """Raise KeyError or ValueError unless the current branch leads to the root."""
        here = self.current
        for _ in range(len(self.parents) + 1):
            if here == ROOT:
                return
            here = self.parents[here][0]
        raise ValueError("its branches go round in a circle")
