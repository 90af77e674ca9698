"""ZeRO optimizers of DeepSpeed: their state by parameter names, as for any optimizer.

The optimizer that steps the masters is a torch optimizer with flat parameters, so its state is
handled like theirs, with two differences. DeepSpeed's own Adam counts steps as numbers instead of
tensors; a checkpoint always has tensors. And the state of the loss scaler is stored with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .deepspeed import Zero
from .module_names import Walked
from .optimizer import StoredOptimizer, load_optimizer, optimizer_state

__all__ = ["load_zero_optimizer", "zero_optimizer_state"]

_SCALING = "loss_scaler"


def zero_optimizer_state(zero: Zero, modules: Iterable[Walked], path: str) -> dict[str, object]:
    """Return state and hyperparameters, by the parameter names of the engine among ``modules``."""
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


def load_zero_optimizer(zero: Zero, given: StoredOptimizer) -> None:
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
