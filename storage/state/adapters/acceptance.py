"""Checks whether an object accepts the state stored for it.

The check runs before anything is filled: the state's tensors exist, but have no contents yet.
An object with its own ``load_state_dict`` decides itself which dicts it accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .deepspeed import zero_of
from .optimizer import StoredOptimizer, has_own_form
from .per_rank import OF_RANKS, PerRank
from .stateful import RNGState, has_state


def takes(value: object, state: object) -> bool:
    """Return whether ``value``, an object with a state, accepts ``state``."""
    if isinstance(value, torch.Generator):
        return _is_like(state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return _takes_numpy(state)
    if isinstance(value, np.random.Generator):
        return _takes_bits(value.bit_generator, state)
    if isinstance(value, random.Random):
        return _takes_python(state)
    if isinstance(value, torch.optim.Optimizer):
        return _takes_optimizer(value, state)
    zero = zero_of(value)
    if zero is not None:
        return _takes_optimizer(zero.base, state)
    if isinstance(value, RNGState):
        return _takes_global(state)
    if isinstance(value, PerRank):
        return _takes_of_ranks(value, state)
    return isinstance(state, Mapping)


def _takes_optimizer(optimizer: torch.optim.Optimizer, state: object) -> bool:
    if not isinstance(state, StoredOptimizer):
        return isinstance(state, Mapping) and has_own_form(optimizer)
    of_parameters = {key for group in state.stored for key in group.ranks}
    return all(isinstance(state.entries.get(key, {}), Mapping) for key in of_parameters)


def _takes_global(state: object) -> bool:
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("cuda"), list)
        and _is_like(state.get("torch"), torch.get_rng_state())
        and _takes_numpy(state.get("numpy"))
        and _takes_python(state.get("python"))
    )


def _takes_of_ranks(value: PerRank, state: object) -> bool:
    if not isinstance(state, Mapping):
        return False
    if callable(value.rule) or not has_state(value.value):
        return True
    return all(takes(value.value, each) for each in state[OF_RANKS].values())


def _is_like(state: object, present: torch.Tensor) -> bool:
    return (
        isinstance(state, torch.Tensor)
        and state.dtype == present.dtype
        and state.shape == present.shape
    )


def _takes_numpy(state: object) -> bool:
    return isinstance(state, list | tuple) and _runs(
        np.random.RandomState().set_state, tuple(state)
    )


def _takes_bits(generator: np.random.BitGenerator, state: object) -> bool:
    def assign(given: Any) -> None:
        type(generator)().state = given

    return isinstance(state, Mapping) and _runs(assign, state)


def _takes_python(state: object) -> bool:
    if not isinstance(state, list | tuple) or len(state) != 3:
        return False
    version, words, gauss = state
    if isinstance(words, np.ndarray):
        words = np.zeros_like(words)  # not read yet, and the last word must be a small number
    elif not isinstance(words, list | tuple):
        return False
    return _runs(random.Random().setstate, (version, tuple(map(int, words)), gauss))


def _runs(function: Callable[[Any], None], state: Any) -> bool:
    """Return whether a throwaway object of the same kind accepts ``state``."""
    try:
        function(state)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return False
    return True
