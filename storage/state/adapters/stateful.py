"""Objects with a state: modules, optimizers, random generators, and other state_dict objects.

Before a save they are *expanded*: replaced by their state as nested dicts. For a load, modules are
expanded in the same way and filled in place. Other objects are handed the stored dict. Its tensors
are those of the object's current state (:func:`present_state`), filled in place, if they have the
stored shape and dtype; so DTensors remain DTensors.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ....errors import StateError
from ..compat import stored_local
from ..device import refuse_forked_child
from .deepspeed import Zero, zero_of
from .dtensor import seen_through
from .exact_dtypes import exact_values
from .flat_parts import check_at_rest, sharded_state
from .foreign import refuse_object
from .module_names import Walked, module_state
from .optimizer import (
    StoredOptimizer,
    load_optimizer,
    optimizer_state,
    present_layout,
    refuse_unknown,
)

_log = logging.getLogger(__name__)
_SCALING = "loss_scaler"


class RNGState:
    """The process's global random generators: torch (CPU and every CUDA device), numpy, python.

    Part of a state: ``holdfast.save(uri, {"model": model, "rng": holdfast.RNGState()})``. Ranks
    differ; each gets its own state back.
    """

    def state_dict(self) -> dict[str, object]:
        """Return the current states of all generators."""
        cuda: list[torch.Tensor] = []
        if torch.cuda.is_available():
            refuse_forked_child()
            cuda = torch.cuda.get_rng_state_all()
        name, keys, position, has_gauss, cached = np.random.get_state()
        version, words, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "numpy": [name, np.asarray(keys), int(position), int(has_gauss), float(cached)],
            "python": [
                version,
                np.array(words, np.uint32),
                gauss,
            ],  # an array, because 625 values per rank would bloat the manifest
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set all generators. Ignores CUDA states beyond the devices of this process."""
        on_device = bool(state_dict["cuda"]) and torch.cuda.is_available()
        if on_device:
            refuse_forked_child()
        torch.set_rng_state(state_dict["torch"])
        if on_device:
            for device, state in zip(
                range(torch.cuda.device_count()), state_dict["cuda"], strict=False
            ):
                torch.cuda.set_rng_state(state, device)
        np.random.set_state(tuple(state_dict["numpy"]))
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(map(int, words)), gauss))


_STATELESS = {type(None), bool, int, float, str, dict, list, tuple}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = (type, torch.Tensor, Mapping, list, tuple)


def has_state(value: object) -> bool:
    """Return whether ``value`` is an object with a state, not a container, tensor or value."""
    if type(value) in _STATELESS or isinstance(value, _CONTAINERS):
        return False
    if isinstance(value, _GENERATORS):
        return True
    # A check by isinstance with a protocol takes twenty times as long: a trainer waits for every
    # value of its state.
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def fills_in_place(value: object) -> bool:
    """Return whether a load fills the tensors of this object's expansion instead of replacing
    them."""
    return isinstance(value, torch.nn.Module)


def present_state(value: Any, path: str) -> object:
    """Return an object's state before a load, whose tensors the load fills, or None.

    Optimizers create their state from the stored one, unless it has a custom form. Random
    generators have nothing to fill, and data loaders would start their workers. None, with a log
    line, also for an object whose ``state_dict`` raises because it has no state yet. Raises
    StateError for an optimizer that cannot be loaded.
    """
    if isinstance(value, torch.optim.Optimizer):
        refuse_unknown(value, path)
    elif (
        isinstance(value, (RNGState, DataLoader, *_GENERATORS))
        or getattr(value, "builds_anew", False)
        or zero_of(value) is not None
    ):
        return None
    try:
        if isinstance(value, torch.optim.Optimizer):
            return present_layout(value)
        return value.state_dict()
    except Exception as error:  # the user's code: it may have no state before it is loaded
        _log.info(
            "%s has no state before the load (%s): it is given tensors on the CPU", path, error
        )
        return None


def expand(value: Any, modules: Sequence[Walked], path: str, *, loading: bool = False) -> object:
    """Return the state of an object.

    ``modules``: all of the whole state, because an optimizer needs its own. Raises StateError for
    an unknown layout.
    """
    refuse_object(value, modules, path, loading=loading)
    if isinstance(value, torch.nn.Module):
        walked = next((each for each in modules if each.module is value), None) or Walked(value)
        if walked.is_flattened:
            check_at_rest(walked.flat, path, loading=loading)
            return sharded_state(walked.parts, walked.flat, walked.names, path)
        state = module_state(walked)
        parts = {name: part.shard() for part in walked.flat for name in part.names}
        return state | {name: part for name, part in parts.items() if name in state}
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_state(value, modules, path)
    zero = zero_of(value)
    if zero is not None:
        return _zero_state(zero, modules, path)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return list(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    state = value.state_dict()
    if not isinstance(state, dict):
        raise StateError(
            f"{path} is a {type(value).__name__}, whose state_dict() is a {type(state).__name__}, "
            f"not a dict"
        )
    return state


def restore(value: Any, state: Any) -> None:
    """Restore an object's state, which must be acceptable to it."""
    zero = zero_of(value)
    if isinstance(value, torch.nn.Module):
        _restore_module(Walked(value), state)
    elif isinstance(value, torch.optim.Optimizer):
        load_optimizer(value, state)
    elif zero is not None:
        _load_zero(zero, state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(tuple(state))
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        with (
            exact_values(value),
            torch.inference_mode() if _has_inference(state) else contextlib.nullcontext(),
        ):
            value.load_state_dict(state)


def _restore_module(walked: Walked, state: dict[str, Any]) -> None:
    if walked.zero is not None:
        walked.zero.copy_masters()
    if walked.is_flattened:
        return  # its tensors have been filled, and FSDP1 would gather all of them
    # Inference tensors are writable only in inference mode, and no other tensors should be created
    # there.
    registered = {name: part.in_module for part in walked.flat for name in part.names}
    state = {name: registered.get(name, value) for name, value in state.items()}
    with torch.inference_mode(_has_inference(state)):
        set_model_state_dict(walked.root, state)
    _forget_derived(parameter for _, parameter in walked.parameters)


def _forget_derived(parameters: Iterable[torch.Tensor]) -> None:
    """Reset values that filled parameters derived from their old contents.

    An example is the scale for their next gathering.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        local: Any = stored_local(parameter)
        detached = local.detach()
        if seen_through(detached) is not detached:
            _, *derived = local.__tensor_flatten__()[0]
            for name in derived:
                setattr(local, name, None)


def _has_inference(state: object) -> bool:
    if isinstance(state, torch.Tensor):
        return state.is_inference()
    if isinstance(state, Mapping):
        return any(map(_has_inference, state.values()))
    return isinstance(state, list | tuple) and any(map(_has_inference, state))


def _zero_state(zero: Zero, modules: Sequence[Walked], path: str) -> dict[str, object]:
    """Return the state of a ZeRO optimizer by its engine's parameter names, with its loss scaler.

    The optimizer that steps the masters is a torch optimizer with flat parameters. DeepSpeed's own
    Adam counts steps as numbers instead of tensors; a checkpoint always has tensors.
    """
    with zero.in_groups():
        state = optimizer_state(zero.base, modules, path)
    entries = state["state"]
    assert isinstance(entries, Mapping)  # the optimizer is a torch optimizer
    state["state"] = {name: _with_tensor_step(entry) for name, entry in entries.items()}
    scaling = zero.scaling()
    if scaling:
        state[_SCALING] = scaling
    return state


def _with_tensor_step(entry: object) -> object:
    if isinstance(entry, Mapping) and type(entry.get("step")) is int:
        return {**entry, "step": torch.tensor(float(entry["step"]))}
    return entry


def _load_zero(zero: Zero, given: StoredOptimizer) -> None:
    """Restore the optimizer's stored state. The masters themselves belong to the module."""
    with zero.in_groups():
        load_optimizer(zero.base, given)
    if type(zero.base).__module__.startswith("deepspeed."):
        for entry in zero.base.state.values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = int(entry["step"])
    zero.link_state()
    scaling = given.rest.get(_SCALING)
    if isinstance(scaling, Mapping):
        zero.set_scaling(scaling)
