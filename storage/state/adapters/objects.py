"""Objects with their own state_dict: chooses the tensors that a load fills for them.

Tensors already in the object's state are filled in place, as torch's distributed checkpoints do. A
tensor that is not there yet, such as a moment of an optimizer without a step, is allocated like the
parameter that it is named after. With ``cast=True``, this module also chooses the dtypes of the
state; the copy converts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch.distributed.tensor import DTensor

from .allocation import (
    Allocate,
    Entry,
    device_for,
    empty_dtensor,
    empty_for,
    fits,
    fitting,
    fitting_parts,
    value_at,
)
from .composite import is_made_of
from .flat_parts import FlatPart
from .module_names import Walked
from .multipart import InParts, is_in_parts
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


def object_allocator(
    owner: object, present: object, modules: Sequence[Walked], stored_dtypes: StoredDtypes | None
) -> Allocate:
    """Return a function that allocates tensors of the state of ``owner``, currently ``present``.

    ``stored_dtypes``: see :func:`kept_entry`.
    """
    reach = _Reach(owner, modules)

    def make(entry: Entry) -> torch.Tensor | Shard | InParts:
        here = value_at(present, entry.keys)
        if stored_dtypes is not None:
            parameter = reach.parameter_of(entry) if reach.has_optimizer else None
            entry = kept_entry(entry, here, parameter, stored_dtypes)
        if isinstance(here, Shard):
            return fitting(here, entry)
        if is_in_parts(here):
            return fitting_parts(here, entry)
        if fits(here, entry):
            return here.detach()
        if isinstance(here, torch.Tensor) and not here.is_meta:
            return empty_for(here, entry)
        reference = reach.parameter_of(entry)
        if reference is not None:
            return empty_for(reference, entry)
        if entry.placements is not None and reach.example is not None:
            return empty_dtensor(reach.example.device_mesh, device_for(reach.example), entry)
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")

    return make


_SEPARATORS = re.compile(r"[./:|]")


class _Reach:
    """The parameters that an object may have a state for.

    These come from its own modules and optimizers, and from the modules of the state.
    """

    def __init__(self, owner: object, modules: Sequence[Walked]) -> None:
        held = list(held_by(owner))
        self._optimizers = [o for o in held if isinstance(o, torch.optim.Optimizer)]
        self.has_optimizer = bool(self._optimizers)
        self._by_name: dict[str, torch.Tensor] = {}
        own = [Walked(m) for m in held if isinstance(m, torch.nn.Module)]
        for walked in chain(own, modules):
            for name, parameter in walked.parameters:
                self._by_name.setdefault(walked.names[name], parameter)
        every = chain(
            self._by_name.values(),
            *(group["params"] for o in self._optimizers for group in o.param_groups),
        )
        self.example = next((p for p in every if isinstance(p, DTensor)), None)
        """Any DTensor among them. Tensors without other information are placed on its mesh."""

    def parameter_of(self, entry: Entry) -> torch.Tensor | None:
        """Return the parameter with the longest name contained in the entry's path.

        If no name matches, a number in the state of the only optimizer identifies the parameter.
        """
        words = _SEPARATORS.split(".".join(map(str, entry.keys)))
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length + 1):
                parameter = self._by_name.get(".".join(words[start : start + length]))
                if parameter is not None:
                    return parameter
        keys = entry.keys
        if len(self._optimizers) != 1 or "state" not in keys[:-1]:
            return None
        number = keys[keys.index("state") + 1]
        if type(number) is int:
            every: list[torch.Tensor] = list(
                dict.fromkeys(
                    p for group in self._optimizers[0].param_groups for p in group["params"]
                )
            )
            if number < len(every):
                return every[number]
        return None


def held_by(owner: object) -> Iterator[object]:
    """Yield the attributes of ``owner``, and the items of lists and dicts among them."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value
