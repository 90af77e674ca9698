"""Chooses the dtypes of an object's state for a load with ``cast=True``.

Scope: decides only; the copy converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from .allocation import Entry
from .composite import is_made_of
from .flat_parts import FlatPart
from .shards import Shard
from .tensors import local_of

Held = torch.Tensor | FlatPart
"""An optimizer's parameter, or a part of one with its own name in the checkpoint."""

StoredDtypes = Mapping[int, torch.dtype]
"""Dtypes in the checkpoint of the tensors that a load fills, by address."""

_KINDS = (
    (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    (torch.complex32, torch.complex64, torch.complex128),
)
"""Dtypes that convert into each other. Narrower floats mean nothing without their scales."""


def kept_entry(
    entry: Entry, present: object, parameter: Held | None, stored: StoredDtypes | None
) -> Entry:
    """Return ``entry`` with the dtype in which the loading object keeps it.

    ``stored``: None without ``cast``, which leaves the entry as it is. An existing tensor
    ``present`` determines the dtype. A state that does not exist yet follows its ``parameter``, as
    in torch's ``Optimizer.load_state_dict``. Exempt are steps and other numbers, and tensors stored
    in another dtype than their parameter, such as fp32 moments of bf16 weights.
    """
    if stored is None:
        return entry
    if isinstance(present, Shard):
        present = present.tensor
    if isinstance(present, torch.Tensor):
        return _converted(entry, present.dtype)
    if parameter is None or entry.keys[-1] == "step":
        return entry
    if not entry.shape and parameter.shape:
        return entry
    if isinstance(parameter, FlatPart):
        held = parameter.shard().tensor
    elif is_made_of(parameter):
        return entry
    else:
        held = local_of(parameter)
    if stored.get(held.data_ptr(), entry.dtype) != entry.dtype:
        return entry
    return _converted(entry, held.dtype)


def _converted(entry: Entry, dtype: torch.dtype) -> Entry:
    if any(dtype in kind and entry.dtype in kind for kind in _KINDS):
        return replace(entry, dtype=dtype)
    return entry
