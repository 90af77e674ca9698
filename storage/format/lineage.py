"""The lineage of a run: which checkpoints lead to the current state of training.

A run is a tree of *branches*. It begins on the root branch. Each time training goes back to a step,
a new branch forks from the current one at that step. A checkpoint's manifest records its branch.
The run's folder holds one small JSON object, ``lineage.json``: where each branch forked from its
parent, and which branch is current.

A checkpoint is *live* if it is on the current branch, or on an ancestor at or before the step of
the next fork. Every other checkpoint is *abandoned*.

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

LINEAGE_KEY = "lineage.json"
ROOT = ""
"""The branch on which a run begins, and that of checkpoints that record none."""

_VERSION = 1
_NBYTES_MAX = 4 << 20
_BRANCH = re.compile(r"[0-9a-f]{16}")


def is_branch(text: object) -> bool:
    """Return whether ``text`` is the name of a branch."""
    return isinstance(text, str) and (text == ROOT or _BRANCH.fullmatch(text) is not None)


@dataclass(frozen=True)
class Lineage:
    """The branches of a run. ``parents`` maps each branch to its parent and the step of the
    fork; the root has no parent."""

    current: str = ROOT
    parents: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def is_live(self, branch: str, step: int | None) -> bool:
        """Return whether a checkpoint of ``branch`` at ``step`` leads to the current state.

        A checkpoint without a step is always live. An unrecorded branch counts as the root: its
        checkpoint was copied from another run.
        """
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
        """Return the lineage after training went back to ``step`` of ``branch``; ``new`` becomes
        current."""
        if branch in self.parents:
            parent = branch
        else:
            parent = ROOT
        return Lineage(new, {**self.parents, new: (parent, step)})

    def encode(self) -> bytes:
        branches = {
            name: {"from": parent, "step": step} for name, (parent, step) in self.parents.items()
        }
        record = {"version": _VERSION, "current": self.current, "branches": branches}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> Lineage:
        """Decode the output of :meth:`encode`. Raises DamagedError for anything else."""
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
