"""Remembers the torch.distributed process group inherited by a forked child.

The child is not a rank of its parent's job. This module does not import torch: a group exists only
if torch.distributed was imported.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .renewal import in_child

_inherited: weakref.ref[Any] | None = None


def is_inherited(group: object) -> bool:
    """Return whether this process inherited ``group`` from its parent, and is not a rank of it."""
    return _inherited is not None and _inherited() is group


def _note() -> None:
    global _inherited  # noqa: PLW0603 - one for the process
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    member = getattr(distributed, "GroupMember", None)
    group = getattr(member, "WORLD", None)
    if group is not None:
        _inherited = weakref.ref(group)


in_child(_note)
