"""Which process group of torch.distributed a forked child has from its parent: it is a rank of none
of that job's calls.

No import of torch: a group can only be there where torch.distributed is.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .renewal import in_child

__all__ = ["is_inherited"]

_inherited: weakref.ref[Any] | None = None


def is_inherited(group: object) -> bool:
    """Whether this process has ``group`` from the process that forked it, and is no rank of it."""
    return _inherited is not None and _inherited() is group


def _note() -> None:
    global _inherited  # noqa: PLW0603 - one for the process
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    member = getattr(distributed, "GroupMember", None)
    group = getattr(member, "WORLD", None)
    if group is not None:
        _inherited = weakref.ref(group)


in_child(_note)
