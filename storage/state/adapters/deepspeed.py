"""DeepSpeed ZeRO: maps master weights to flat ranges of the user's parameters.

A ZeRO optimizer joins the parameters of a group into a flat fp32 parameter, and each rank holds a
part of it: the *masters*, which the optimizer steps. The parameters of the module are copies of the
masters, usually in another dtype: whole copies in stages 1 and 2; in stage 3 a part of each, with a
placeholder in the module. DeepSpeed refreshes the copies after each step. So a checkpoint contains
the masters, and a load fills them and then refreshes the copies.

Scope: DeepSpeed's bookkeeping, by the names of its attributes (of 0.19.8), and which of its
features are not supported. Nothing is imported from it: classes are recognized by name. Reading the
bookkeeping calls no collective; :meth:`Zero.copy_masters` does, as each step of the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import FlatPiece, Unit
from .flat_parts import FlatPart

ParameterNames = Mapping[torch.nn.Parameter, Sequence[str]]
"""Checkpoint names of all parameters of a module."""

_ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")


@dataclass(frozen=True, slots=True)
class _Books:
    """Attribute names of one kind of ZeRO optimizer.

    ``parameters``: the parameters in each flat one. ``masters``: this rank's part of each flat one.
    """

    parameters: str
    masters: str


_STAGE_3 = _Books("fp16_groups", "fp32_partitioned_groups_flat")
_KINDS = {
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): _Books(
        "bit16_groups", "single_partition_of_fp32_groups"
    ),
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"): _Books(
        "bf16_groups", "fp32_groups_flat_partition"
    ),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): _STAGE_3,
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""An engine's counters, on which its data schedules, monitors and log depend."""
_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a loss scaler that changes during training."""


def engine_of(module: torch.nn.Module) -> Any | None:
    """Return ``module`` if it is a DeepSpeed engine."""
    return module if _ENGINE in map(_kind, type(module).__mro__) else None


def engine_counters(engine: Any) -> dict[str, int]:
    """Return the training counters of an engine by name."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_engine_counters(engine: Any, stored: Mapping[str, int]) -> None:
    """Set the counters in ``stored``, which is empty if the model was not DeepSpeed's."""
    for name in stored.keys() & set(_COUNTERS):
        setattr(engine, name, stored[name])


def zero_of(value: object) -> Zero | None:
    """Return the bookkeeping of ``value`` if it is a ZeRO optimizer of a known kind."""
    books = _KINDS.get(_kind(type(value)))
    return None if books is None else Zero(value, books)


def _kind(of: type) -> tuple[str, str]:
    return (of.__module__, of.__qualname__)


class _Masters(Unit):
    """This rank's part of a flat parameter."""

    framework = "DeepSpeed ZeRO"
    apart = "Give these parameters groups of their own."

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat


class Zero:
    """A ZeRO optimizer's bookkeeping."""

    def __init__(self, optimizer: Any, books: _Books) -> None:
        self.optimizer = optimizer
        self._books = books

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that steps the masters."""
        base: torch.optim.Optimizer = self.optimizer.optimizer
        return base

    @property
    def _has_stage_3(self) -> bool:
        return self._books is _STAGE_3

    def unknown(self, engine: Any) -> str | None:
        """Return a feature of ``engine`` or its optimizer that is not supported; None if all
        are."""
        optimizer = self.optimizer
        parameters = list(engine.module.parameters())
        swaps = ("swap_optimizer", "params_in_nvme_and_cpu")
        unknown = {
            f"the class {type(engine).__name__}": _is_of_another_kind(engine),
            "offload to NVMe": any(getattr(optimizer, name, False) for name in swaps),
            "an optimizer that is offloaded in part": hasattr(optimizer, "backup_optimizer"),
            "offload_states, before reload_states": bool(
                getattr(optimizer, "offloaded_states", None)
            ),
            "ZeRO++ hpZ": engine.zero_hpz_partition_size() > 1,
            "ZeRO++ qgZ": engine.zero_quantized_gradients(),
            "quantized weights": any(
                hasattr(getattr(p, "ds_tensor", None), "ds_quant_scale") for p in parameters
            ),
            "experts": any(getattr(p, "allreduce", True) is False for p in parameters),
            "tensor parallelism": engine.autotp_size() > 1 or engine.mpu is not None,
        }
        return next((name for name, present in unknown.items() if present), None)

    def parts(self, names: ParameterNames) -> list[FlatPart]:
        """Return this rank's part of every parameter that ZeRO has partitioned.

        ``names``: the module's parameters with their checkpoint names.
        """
        held = []
        flattened = getattr(self.optimizer, self._books.parameters)
        for flat, parameters in zip(self._flat(), flattened, strict=True):
            unit = _Masters(flat)
            for p, piece in self._pieces(parameters):
                held.append(FlatPart(tuple(names[p]), unit, piece, p))
        if self._has_stage_3:  # frozen parameters are partitioned, too, and have no masters
            frozen = names.keys() - {part.registered for part in held}
            for p in [p for p in names if p in frozen]:
                unit = _Masters(p.ds_tensor)  # type: ignore[attr-defined]  # set by DeepSpeed
                held.append(FlatPart(tuple(names[p]), unit, _piece_of_stage_3(p, 0), p))
        return held

    def _flat(self) -> list[torch.Tensor]:
        flat: list[torch.Tensor] = getattr(self.optimizer, self._books.masters)
        return flat

    def _pieces(self, parameters: Sequence[Any]) -> Iterator[tuple[Any, FlatPiece]]:
        at = 0
        for parameter in parameters:
            if self._has_stage_3:
                yield parameter, _piece_of_stage_3(parameter, at)
                at += parameter.partition_numel()
            else:
                yield parameter, _piece_of_stage_1(parameter)

    @contextlib.contextmanager
    def in_groups(self) -> Iterator[None]:
        """Keep the masters in the groups of :attr:`base` within the block.

        Stage 3 puts them there only during each step.
        """
        if not self._has_stage_3:
            yield
            return
        self.optimizer._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()

    def copy_masters(self) -> None:
        """Refresh the module's parameters from the masters. All ranks must call this."""
        optimizer = self.optimizer
        with torch.no_grad():
            if not self._has_stage_3:
                optimizer.update_lp_params()
                return
            optimizer.checkpoint_event_prologue()  # drops gathered parameters
            for group in range(len(self._flat())):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()  # gathers parameters that stay gathered

    def link_state(self) -> None:
        """Point DeepSpeed to the state of :attr:`base` after it was replaced."""
        if not self._has_stage_3 and self.base.state:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def scaling(self) -> dict[str, object]:
        """Return the state of the loss scaler; empty if the scale is fixed."""
        scaler = getattr(self.optimizer, "loss_scaler", None)
        if not getattr(scaler, "dynamic", False):
            return {}
        return {name: getattr(scaler, name) for name in _SCALING}

    def set_scaling(self, stored: Mapping[str, object]) -> None:
        """Restore the state of the loss scaler, unless the scale is fixed."""
        for name in self.scaling().keys() & stored.keys():
            setattr(self.optimizer.loss_scaler, name, stored[name])


def _is_of_another_kind(engine: Any) -> bool:
    """Return whether the engine has another class of DeepSpeed, such as the pipeline engine."""
    kinds = list(map(_kind, type(engine).__mro__))
    return any(kind[0].startswith("deepspeed.") for kind in kinds[: kinds.index(_ENGINE)])


def _piece_of_stage_1(parameter: Any) -> FlatPiece:
    mapping = parameter._hp_mapping
    if mapping is None:
        return _piece(parameter.shape, 0, 0, 0)
    inside = mapping.lp_fragment_address
    return _piece(parameter.shape, inside.start, inside.numel, mapping.hp_fragment_address.start)


def _piece_of_stage_3(parameter: Any, at: int) -> FlatPiece:
    """Return this rank's piece of a stage 3 parameter.

    All ranks hold equally many elements; those beyond its end are padding.
    """
    share = parameter.ds_tensor.ds_numel
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    start = min(share * rank, parameter.ds_numel)
    return _piece(parameter.ds_shape, start, min(share, parameter.ds_numel - start), at)


def _piece(shape: Sequence[int], start: int, numel: int, at: int) -> FlatPiece:
    return FlatPiece((), tuple(shape), start, numel, at, original=None, is_regular=True)
