"""Recognizes unsupported layouts of other frameworks by their traces on tensors and modules.

Such a tensor is not what it seems: a placeholder whose elements are elsewhere, a piece of a flat
buffer, or a copy that the optimizer's next step overwrites. Saved at face value, it makes an empty
or wrong checkpoint; loaded at face value, it loses the loaded data. So it is refused by name,
before any I/O.

Scope: recognizes layouts, and says what to do instead. Imports no framework: attributes and class
names are enough. Tensors that have lost their attributes (``module.state_dict()`` detaches them)
are left to :mod:`..flattening.placeholders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ....errors import StateError
from ..compat import FLAT_PARAMETER_MARKS, ShardedTensor, buffers_of, parameters_of, stored_local
from .deepspeed import zero_of
from .dtensor import check_layout, hooked, layouts_on
from .module_names import Walked
from .tensors import PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class _Layout:
    """An unsupported layout.

    ``text``: predicate for an error about a tensor or an object. ``advice``: what to do instead.
    """

    text: str
    advice: str


_FSDP1 = _Layout(
    "is sharded by FSDP1 (torch's FullyShardedDataParallel), and only its module knows which part "
    "of which parameter it holds",
    "Put the module wrapped by FSDP1 into the state, next to its optimizer: "
    '{"model": model, "optim": optimizer}.',
)
_SHARDED_TENSOR = _Layout(
    "is a ShardedTensor in place of a parameter, as created by torch's old sharding API, which "
    "this release does not support",
    "Use DTensors; or pass the ShardedTensors themselves, in a dict.",
)
_ZERO3 = _Layout(
    "is partitioned by DeepSpeed ZeRO-3, and only the engine knows where its elements are",
    "Put the engine itself into the state, instead of its module. If it is refused too, use "
    "engine.save_checkpoint and engine.load_checkpoint.",
)
_MASTERS = _Layout(
    "has a master copy in a DeepSpeed optimizer, which would overwrite the loaded values in the "
    "next step",
    "Put the engine itself into the state, instead of its module. If it is refused too, load into "
    "engine.module.state_dict(), and then call engine.optimizer.refresh_fp32_params().",
)
_DEEPSPEED_OPTIMIZER = _Layout(
    "is an optimizer of DeepSpeed whose flat partitions this release does not support",
    "Use engine.save_checkpoint and engine.load_checkpoint.",
)
_STEPS_MASTERS = _Layout(
    "is an optimizer that DeepSpeed has wrapped, and has flat partitions in place of parameters",
    "Put engine.optimizer into the state.",
)
_WITHOUT_ENGINE = _Layout(
    "is an optimizer of DeepSpeed, and only its engine knows the names of parameters",
    "Put the engine into the state too, or use engine.save_checkpoint.",
)
_MEGATRON_MASTERS = _Layout(
    "has a master copy in an optimizer of Megatron, which would overwrite the loaded values in "
    "the next step",
    "Load the master copies, too: optimizer_state(optimizer, model_state), from "
    "holdfast.storage.integrations.megatron. Or load into module.state_dict(), and then call "
    "optimizer.reload_model_params().",
)
_MEGATRON_OPTIMIZER = _Layout(
    "is an optimizer of Megatron whose state_dict() leaves out the moments and the master copies "
    "of parameters",
    "Pass optimizer_state(optimizer, model_state), from holdfast.storage.integrations.megatron.",
)
_SHARD_HOOKS = _Layout(
    "is part of a larger tensor, according to its hook __create_chunk_list__, in a layout that "
    "this release does not support",
    "Pass it as a DTensor, or give it all hooks of torch.distributed._checkpointable.",
)

_OF_ZERO3 = ("ds_id", "ds_tensor")
_OF_HOOKS = ("__create_chunk_list__", "__create_write_items__")
_MARKS = frozenset(
    {*FLAT_PARAMETER_MARKS, *_OF_ZERO3, "_hp_mapping", "main_param_sharded", *_OF_HOOKS}
)


def is_suspect(tensor: torch.Tensor) -> bool:
    """Return whether a framework has marked ``tensor``, so that it needs a closer look.

    Must be cheap: a trainer waits for this once per tensor.
    """
    return not _MARKS.isdisjoint(tensor.__dict__)


def refuse_tensor(tensor: torch.Tensor, path: Callable[[], str], *, loading: bool) -> None:
    """Raise StateError if ``tensor``, which is no local part of a DTensor, has an unknown
    layout."""
    layout = _of_tensor(tensor, loading)
    if layout is None and not isinstance(tensor, DTensor) and hooked(tensor):
        layout = _SHARD_HOOKS
    if layout is not None:
        raise _refusal(path(), layout)


def refuse_object(value: object, modules: Iterable[Walked], path: str, *, loading: bool) -> None:
    """Raise StateError if ``value``, an object with a state, or a parameter of it, has an unknown
    layout.

    ``modules``: all modules of the state, walked.
    """
    if isinstance(value, torch.nn.Module):
        walked = next((walked for walked in modules if walked.module is value), None)
        _refuse_module(walked or Walked(value), path, loading)
        return
    layout = _of_optimizer(value, modules)
    if layout is not None:
        raise _refusal(path, layout)
    if isinstance(value, torch.optim.Optimizer):
        known = _known_to_module(value, modules)
        for group, parameters in enumerate(value.param_groups):
            for number, parameter in enumerate(parameters["params"]):
                if _is_unusual(parameter) and id(parameter) not in known:
                    _refuse_parameter(
                        parameter, f"parameter {number} of group {group} in {path}", loading
                    )


def _of_optimizer(value: object, modules: Iterable[Walked]) -> _Layout | None:
    known = [walked.zero.optimizer for walked in modules if walked.zero is not None]
    if any(value is optimizer for optimizer in known):
        return None
    if zero_of(value) is not None:
        return _WITHOUT_ENGINE
    if any(value is optimizer.optimizer for optimizer in known):
        return _STEPS_MASTERS
    # A wrapper such as Accelerate's has the real one inside.
    for inner in (value, getattr(value, "optimizer", None)):
        if _is_of(inner, "deepspeed") and hasattr(inner, "param_groups"):
            return _DEEPSPEED_OPTIMIZER
    if _is_of(value, "megatron") and any(
        hasattr(each, "gbuf_ranges") for each in (value, *getattr(value, "chained_optimizers", ()))
    ):
        return _MEGATRON_OPTIMIZER
    return None


def _known_to_module(optimizer: torch.optim.Optimizer, modules: Iterable[Walked]) -> set[int]:
    """Return the ids of the flat parameters if one of ``modules`` has all of the optimizer's.

    That module gives them their names.
    """
    every = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for walked in modules:
        if walked.flat and every <= walked.by_owner.keys() | walked.keys.keys():
            return set(walked.by_owner)
    return set()


def refuse_stale(module: torch.nn.Module, beside: Iterable[object], path: str) -> None:
    """Raise StateError if a load into ``module`` would leave master copies of its parameters stale.

    That happens if an optimizer of Megatron has them, and is not among ``beside``, the other loaded
    objects.
    """
    if any(
        _is_of(other, "megatron") and not isinstance(other, torch.nn.Module) for other in beside
    ):
        return
    for name, parameter in module.named_parameters():
        if parameter.__dict__.get("main_param") is not None:
            raise _refusal(f'{path}["{name}"]', _MEGATRON_MASTERS)


def refuse_master(masters: Mapping[str, torch.Tensor], loaded: Iterable[torch.Tensor]) -> None:
    """Raise StateError if one of ``masters`` is not among the tensors in ``loaded``.

    ``masters`` are keyed by the paths of their parts of parameters.
    """
    if masters:
        addresses = {tensor.data_ptr() for tensor in loaded}
        for path, master in masters.items():
            if master.numel() and master.data_ptr() not in addresses:
                raise _refusal(path, _MEGATRON_MASTERS)


def _refuse_module(walked: Walked, path: str, loading: bool) -> None:
    parts = walked.parts
    if walked.zero is not None:
        unknown = walked.zero.unknown(walked.engine)
        if unknown is not None:
            raise StateError(
                f"{path} is an engine of DeepSpeed with {unknown}, which this release does not "
                f"support",
                advice="Use engine.save_checkpoint and engine.load_checkpoint.",
            )
    elif walked.engine is not None:
        parts = [("", walked.engine), *parts]
    flat = {id(part.in_module) for part in walked.flat}
    for prefix, part in parts:
        if loading and _steps_masters(part):
            raise _refusal(f'"{prefix[:-1]}" in {path}' if prefix else path, _MASTERS)
        for tensors in (parameters_of(part), buffers_of(part)):
            for name, tensor in tensors.items():
                if tensor is not None and _is_unusual(tensor) and id(tensor) not in flat:
                    _refuse_parameter(tensor, f'{path}["{prefix}{name}"]', loading)


def _steps_masters(part: torch.nn.Module) -> bool:
    """Return whether ``part`` is an engine of DeepSpeed.

    Some of its optimizers leave no mark on parameters.
    """
    return _is_of(part, "deepspeed") and _is_of(getattr(part, "optimizer", None), "deepspeed")


def _is_unusual(tensor: torch.Tensor) -> bool:
    if type(tensor) is DTensor:
        local = stored_local(tensor)
        return type(local) not in PLAIN_TYPES or is_suspect(local) or is_suspect(tensor)
    return type(tensor) not in PLAIN_TYPES or is_suspect(tensor)


def _refuse_parameter(tensor: torch.Tensor, path: str, loading: bool) -> None:
    if isinstance(tensor, DTensor):
        # Detaching, as a state dict does, creates a new local tensor without hooks. They must be
        # checked here.
        layout = layouts_on(tensor.device_mesh).of(tensor, lambda: path)
        check_layout(tensor, stored_local(tensor), layout, lambda: path)
    refuse_tensor(tensor, lambda: path, loading=loading)


def _of_tensor(tensor: torch.Tensor, loading: bool) -> _Layout | None:
    if isinstance(tensor, ShardedTensor):
        return _SHARDED_TENSOR
    own = tensor.__dict__
    if any(mark in own for mark in FLAT_PARAMETER_MARKS):
        return _FSDP1
    if any(mark in own for mark in _OF_ZERO3):
        gathered = tuple(tensor.shape) == tuple(own.get("ds_shape", ()))
        return None if gathered and not loading else _ZERO3
    if loading and own.get("_hp_mapping") is not None:
        return _MASTERS
    if loading and own.get("main_param_sharded") and tensor.dtype in _SHORT:
        return _MEGATRON_MASTERS  # by the distributed optimizer, whose state dict lacks them
    return None


_SHORT = (torch.bfloat16, torch.float16)


def _is_of(value: object, package: str) -> bool:
    """Return whether a class of ``value``, inherited or not, belongs to ``package``."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)


def _refusal(path: str, layout: _Layout) -> StateError:
    return StateError(f"{path} {layout.text}", advice=layout.advice)
