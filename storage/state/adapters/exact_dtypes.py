"""Restores optimizer states to the last bit.

torch's ``Optimizer.load_state_dict`` converts every floating-point tensor of a state to the dtype
of its parameter: fp32 moments of bf16 parameters lose half their bits. It also turns strings into
generators and fails on arrays. This module undoes exactly that, and keeps the changes that hooks
and subclasses make to the state before and after.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, TypeGuard

import torch

from ..compat import is_initialized
from .objects import held_by


class _Opaque:
    """Hides a value from torch, which iterates over everything it can."""

    def __init__(self, value: object) -> None:
        self.value = value


@contextlib.contextmanager
def exact_values(owner: object) -> Iterator[None]:
    """Prevent ``load_state_dict`` of ``owner``, or of optimizers it holds, from converting dtypes.

    One of our hooks runs after all others that prepare the state, and one before all others that
    follow the load. So they enclose torch's own conversion only. A subclass that loads without
    torch's method is unaffected.
    """
    with contextlib.ExitStack() as stack:
        for each in _torch_optimizers(owner, set()):
            around = _Around()
            stack.callback(each.register_load_state_dict_pre_hook(around.before).remove)
            stack.callback(
                each.register_load_state_dict_post_hook(around.after, prepend=True).remove
            )
        yield


def _torch_optimizers(owner: object, seen: set[int]) -> Iterator[torch.optim.Optimizer]:
    """Yield ``owner`` and the optimizers in its attributes.

    Wrappers forward their state and have no hooks of their own.
    """
    seen.add(id(owner))
    if isinstance(owner, torch.optim.Optimizer) and is_initialized(owner):
        yield owner
    for each in held_by(owner):
        if isinstance(each, torch.optim.Optimizer) and id(each) not in seen:
            yield from _torch_optimizers(each, seen)


class _Around:
    """The state of each parameter before torch's conversion."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, object]] = []

    def before(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, object]:
        """Record the given state, and protect the values that torch would spoil."""
        stored = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        state = dict(state_dict["state"])
        self._given = []
        for key, parameter in dict(zip(stored, params, strict=False)).items():
            if key in state:
                self._given.append((parameter, state[key]))
                state[key] = _protected(state[key])
        return {**state_dict, "state": state}

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, given in self._given:
            if parameter in optimizer.state:
                optimizer.state[parameter] = _restored(
                    parameter, given, optimizer.state[parameter], None
                )
        self._given = []


def _protected(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _protected(item) for key, item in value.items()}
    if _is_sequence(value):
        return type(value)(_protected(item) for item in value)
    if isinstance(value, torch.Tensor) or not isinstance(value, Iterable):
        return value
    return _Opaque(value)


def _restored(parameter: torch.Tensor, given: object, now: object, key: object) -> object:
    """Return ``now`` with torch's conversions of ``given`` to the parameter's dtype undone."""
    if isinstance(now, _Opaque):
        return now.value
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        # Torch keeps the dtype of steps, unless the kernel that counts them needs another one.
        converted = key != "step" and now.dtype != given.dtype and now.dtype == parameter.dtype
        if not converted:
            return now
        return given.to(device=now.device)
    if isinstance(given, Mapping) and isinstance(now, dict):
        items = {k: _restored(parameter, given.get(k), item, k) for k, item in now.items()}
        if type(given) is not dict and isinstance(given, MutableMapping):
            return _refilled(given, items)
        return items
    if _is_sequence(given) and _is_sequence(now) and len(now) == len(given):
        return type(now)(_restored(parameter, g, n, None) for g, n in zip(given, now, strict=True))
    return now


def _is_sequence(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return type(value) in (list, tuple)


def _refilled(
    given: MutableMapping[object, object], items: Mapping[object, object]
) -> MutableMapping[object, object]:
    """Return a mapping of the type of ``given``: torch turns all into plain dicts."""
    made = copy.copy(given)
    made.clear()
    made.update(items)
    return made
