"""Optimizers: their state by the names of their parameters, so that it fits any job that has those parameters.

Saved as torch's ``get_optimizer_state_dict`` gives it. For a load nothing is asked of the optimizer's present state, which
a new one does not have: the stored entries say what there is, and each is made like the parameter that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ...errors import MismatchError
from .names import Walked, plain_state_dict

__all__ = ["Make", "load_optimizer", "makes_for", "optimizer_state"]

Make = Callable[[Sequence[Any], tuple[int, ...], torch.dtype], torch.Tensor | None]
"""(keys below the object, shape, dtype) → the tensor to be filled; None for what this rank has no place for."""


def optimizer_state(optimizer: torch.optim.Optimizer, modules: Iterable[Walked]) -> dict[str, Any]:
    """State and hyperparameters, by fqn where one of ``modules`` has all parameters, else by torch's numbering.

    As torch's ``get_optimizer_state_dict`` gives it; but an optimizer that has never stepped has no state, and gets none:
    torch's helper would take a step to make some.
    """
    owner, by_id = _module_of(optimizer, modules)
    if owner is None:
        return optimizer.state_dict()
    if optimizer.state and owner.names.fsdp1:
        return get_optimizer_state_dict(owner.module, optimizer)
    names = dict(enumerate(by_id[id(p)] for group in optimizer.param_groups for p in group["params"]))
    packed = plain_state_dict(optimizer)
    return {
        "state": {names[number]: entry for number, entry in packed["state"].items()},
        "param_groups": [_with_params(g, [names[number] for number in g["params"]]) for g in packed["param_groups"]],
    }


def makes_for(optimizer: torch.optim.Optimizer, modules: Iterable[Walked]) -> Make:
    """How to make the tensors of this optimizer's state: those it has, where they fit, else new ones like the parameter."""
    names = _names(optimizer, modules)
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}

    def make(keys: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if keys[0] != "state":
            return torch.empty(shape, dtype=dtype)
        parameter = parameters.get(keys[1])
        if parameter is None:
            return None
        present = optimizer.state.get(parameter, {}).get(keys[2]) if len(keys) == 3 else None
        if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
            return present.detach()
        if tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return make


def load_optimizer(optimizer: torch.optim.Optimizer, modules: Iterable[Walked], stored: Mapping[str, Any]) -> None:
    """Give the optimizer its stored state. Which parameters its groups have stays as it is.

    Raises MismatchError where the numbers of groups differ.
    """
    groups = optimizer.param_groups
    if len(stored["param_groups"]) != len(groups):
        raise MismatchError(
            f"{len(stored['param_groups'])} parameter groups in the checkpoint, {len(groups)} in the optimizer"
        )
    names = _names(optimizer, modules)
    number = {id(p): i for i, p in enumerate(dict.fromkeys(p for group in groups for p in group["params"]))}
    state = {
        number[id(p)]: stored["state"][names[id(p)]]
        for g in groups
        for p in g["params"]
        if names[id(p)] in stored["state"]
    }
    given = [
        _with_params(group | dict(kept), [number[id(p)] for p in group["params"]])
        for group, kept in zip(groups, stored["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": given})


def _with_params(group: Mapping[str, Any], params: list[Any]) -> dict[str, Any]:
    return {**group, "params": params}


def _names(optimizer: torch.optim.Optimizer, modules: Iterable[Walked]) -> dict[int, Any]:
    """By id of each parameter, its key in a stored state: its fqn, or torch's number."""
    owner, by_id = _module_of(optimizer, modules)
    if owner is not None:
        return by_id
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return {id(p): i for i, p in enumerate(every)}


def _module_of(optimizer: torch.optim.Optimizer, modules: Iterable[Walked]) -> tuple[Walked | None, dict[int, Any]]:
    """The module all of whose parameters in ``optimizer`` are its own, and the fqns of its parameters, by id; None where no
    single one is."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for walked in modules:
        names = walked.names
        found: dict[int, Any] = {}
        for name, p in walked.module.named_parameters() if names.fsdp1 else walked.parameters:
            if id(p) not in found:
                found[id(p)] = names[name]
        if wanted <= found.keys():
            return walked, found
    return None, {}
