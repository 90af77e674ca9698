"""State that belongs to a rank, such as a data loader's position, and its resharding.

In the checkpoint, a ``PerRank`` is a dict by rank: readers unaware of it see every rank's value by
number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from ....errors import StateError, UsageError
from ...ranks.process_group import current_rank, current_world
from .stateful import expand, has_state, restore

Rule = Literal["keep", "broadcast", "split", "merge"] | Callable[[list[Any], int, int], object]
"""Called with the values of all ranks that saved one, in rank order, this rank and the number of
ranks."""

RANKS = "world"
OF_RANKS = "of"
"""Keys of a stored PerRank: the number of ranks, and a dict of their values."""

_NAMED = ("keep", "broadcast", "split", "merge")


class PerRank:
    """A part of a state that belongs to the rank: ``holdfast.save(uri, {"data":
    holdfast.PerRank(loader, "split")})``.

    ``value`` is an object with a state (a data loader, a random generator), which gets its state
    back; or small values and tensors in dicts, lists and tuples: after a load, ``.value`` is the
    loaded value. Modules and optimizers need no rule.

    If as many ranks load as have saved, each gets its own value back. Otherwise the ``rule`` of the
    load decides:

    ==============  ===============================================================================
    ``keep``        rank r gets the value of rank r mod n, of the n that saved
    ``broadcast``   every rank gets the value of the first
    ``split``       the values of all ranks are joined and cut into equal parts: remaining samples,
                    files, tokens
    ``merge``       each rank gets the values of some ranks, in order, joined but never cut; with
                    more ranks than values, some get none
    a function      ``rule(values, rank, world)`` returns this rank's value
    ==============  ===============================================================================

    Lists, tuples, arrays and tensors are joined along their first dimension, dicts key by key.
    Values that cannot be joined must be equal on all ranks; otherwise StateError is raised.
    """

    def __init__(self, value: Any, rule: Rule = "keep") -> None:
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            raise UsageError(
                f"a {type(value).__name__} does not belong to one rank",
                advice="Save it without PerRank.",
            )
        if not callable(rule) and rule not in _NAMED:
            raise UsageError(
                f"rule {rule!r}", advice=f"Give a function, or one of: {', '.join(_NAMED)}."
            )
        self.value = value
        self.rule: Rule = rule

    builds_anew = True
    """Tells a load not to fill the present tensors: the stored ones belong to the saving ranks."""

    def state_dict(self) -> dict[str, object]:
        """Return this rank's value by its number, and the number of ranks."""
        state = self.value
        if has_state(state):
            state = expand(state, (), "a PerRank")
        return {RANKS: current_world(), OF_RANKS: {str(current_rank()): state}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's share of the stored values. Raises StateError."""
        saved = {int(rank): state for rank, state in state_dict[OF_RANKS].items()}
        rank = current_rank()
        world = current_world()
        if state_dict[RANKS] == world and rank in saved:
            state = saved[rank]
        else:
            state = resharded([saved[r] for r in sorted(saved)], self.rule, rank, world)
        if has_state(self.value):
            restore(self.value, state)
        else:
            self.value = state


def is_of_ranks(state: object) -> bool:
    """Return whether ``state`` was stored by a PerRank."""
    return (
        isinstance(state, Mapping)
        and type(state.get(RANKS)) is int
        and isinstance(state.get(OF_RANKS), Mapping)
        and all(isinstance(rank, str) and rank.isdecimal() for rank in state[OF_RANKS])
    )


def resharded(values: list[object], rule: Rule, rank: int, world: int) -> object:
    """Return the share of rank ``rank`` of ``world`` in the ranks' ``values``.

    Raises StateError if ``rule`` does not fit.
    """
    if callable(rule):
        return rule(values, rank, world)
    if rule == "keep":
        return values[rank % len(values)]
    if rule == "broadcast":
        return values[0]
    joined = _joined(values, "value")
    if rule == "split":
        return _cut(joined, rank, world)
    mine = values[len(values) * rank // world : len(values) * (rank + 1) // world]
    if not mine:
        return _cut(joined, 0, 0)
    return _joined(mine, "value")


def _joined(values: Sequence[Any], path: str) -> object:
    first = values[0]
    if all(type(value) is type(first) for value in values):
        if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
            return {key: _joined([v[key] for v in values], f"{path}[{key!r}]") for key in first}
        if isinstance(first, list | tuple):
            return type(first)(item for value in values for item in value)
        if isinstance(first, torch.Tensor) and first.ndim:
            return torch.cat(list(values))
        if isinstance(first, np.ndarray) and first.ndim:
            return np.concatenate(list(values))
        if all(bool(value == first) for value in values):
            return first
    raise StateError(
        f"{path} of a PerRank differs between ranks, and cannot be joined",
        advice="Give a function as its rule: rule(values, rank, world).",
    )


def _cut(joined: object, part: int, parts: int) -> object:
    """Return part ``part`` of ``parts`` even ones; empty if ``parts`` is 0."""
    if isinstance(joined, dict):
        return {key: _cut(item, part, parts) for key, item in joined.items()}
    if isinstance(joined, torch.Tensor | np.ndarray) and not joined.ndim:
        return joined
    if isinstance(joined, list | tuple | torch.Tensor | np.ndarray):
        if not parts:
            return joined[:0]
        n = len(joined)
        return joined[n * part // parts : n * (part + 1) // parts]
    return joined
