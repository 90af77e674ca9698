"""A stored optimizer state, given back to the last bit.

``Optimizer.load_state_dict`` of torch converts every floating-point tensor of a state to the dtype
of its parameter: fp32 moments of bf16 parameters lose half their bits. It also makes generators of
strings and fails on arrays. This module undoes that, and only that: what hooks and subclasses do to
the state before and after holds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, TypeGuard

import torch

from ..compat import is_initialized

__all__ = ["exact_values"]


class _Opaque:
    """A value that torch hands through as it is: it looks into everything that can be iterated."""

    def __init__(self, value: object) -> None:
        self.value = value


@contextlib.contextmanager
def exact_values(owner: object) -> Iterator[None]:
    """Within this, no value is converted to another dtype by the ``load_state_dict`` of ``owner``,
    an optimizer, or of optimizers that it has.

    A hook of ours runs after all others that prepare the state, and one before all others that
    follow. So they stand right around torch's own conversion. A subclass that loads without torch's
    method is not touched.
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
    """``owner``, and those that it has as attributes: wrappers hand their state on, and have no
    hooks of their own."""
    seen.add(id(owner))
    held = getattr(owner, "__dict__", {})
    if isinstance(owner, torch.optim.Optimizer) and is_initialized(owner):
        yield owner
    for value in list(held.values()):
        for each in _items(value):
            if isinstance(each, torch.optim.Optimizer) and id(each) not in seen:
                yield from _torch_optimizers(each, seen)


def _items(value: object) -> Iterable[object]:
    """What an attribute holds: the items of a container, or itself."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return [value]


class _Around:
    """The state of each parameter as it was before torch's conversion."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, object]] = []

    def before(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, object]:
        """Keep what is given, and protect what torch would spoil."""
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
        """Put back what torch has converted."""
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
    """``now``, but for what torch has made of ``given`` because of the dtype of ``parameter``."""
    if isinstance(now, _Opaque):
        return now.value
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        # Torch leaves the dtype of steps alone, unless the kernel that counts them needs another
        # one.
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
    """Whether ``value`` is of a type that torch makes anew, item by item."""
    return type(value) in (list, tuple)


def _refilled(
    given: MutableMapping[object, object], items: Mapping[object, object]
) -> MutableMapping[object, object]:
    """A mapping of the type of ``given``: torch makes plain dicts of all."""
    made = copy.copy(given)
    made.clear()
    made.update(items)
    return made
