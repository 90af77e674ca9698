"""Checkpoints of Megatron-core: strategies for ``dist_checkpointing``, and distributed optimizers.

    dist_checkpointing.save(state, folder, sharded_strategy=HoldfastSaveStrategy())
    dist_checkpointing.load(state, folder)

Megatron's tensors are stored under their keys. Megatron itself writes everything else
(``common.pt``, ``ShardedObject``) into the same folder with ``torch.save``, as it does for every
strategy. So the folder must be a path that all ranks see. To do without these files, and to save to
any URI:

    model_state = model.sharded_state_dict(metadata=metadata)
    state = {"model": model_state, "optim": optimizer_state(optimizer, model_state)}
    holdfast.save(uri, state)
    holdfast.load(uri, into=state)

Importing this module registers the strategy that loads such folders with Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)

from ...errors import MismatchError, StateError
from ...planner.box import Box, flat_to_boxes
from ..api import load, save
from ..format.packed import Compression
from ..operations.reading.reader import TensorInfo
from ..operations.reading.reader import open as open_checkpoint

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = ["HoldfastLoadStrategy", "HoldfastSaveStrategy", "optimizer_state"]

_BACKEND = "holdfast"
_VERSION = 1


class HoldfastSaveStrategy(SaveShardedStrategy):  # type: ignore[misc]  # its types are not installed
    """Saves the tensors of a sharded state dict; returns once they are committed.

    Megatron then writes its ``metadata.json``; without that file it does not recognise the folder
    as a checkpoint. ``compression`` as in :func:`holdfast.save`. Megatron's ``async_sharded_save``
    is not supported, because it forks a process that shares no store with the job.
    """

    def __init__(self, *, compression: Compression | None = None) -> None:
        super().__init__(_BACKEND, _VERSION)
        self._compression = compression

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the tensors. Every rank calls this. Raises as :func:`holdfast.save`."""
        save(checkpoint_dir, _parts(sharded_state_dict), compression=self._compression)


class HoldfastLoadStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Loads tensors saved by :class:`HoldfastSaveStrategy` in place, under any layout."""

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> ShardedStateDict:
        """Return the state dict with tensors in place of its sharded tensors.

        Every rank calls this. Raises as :func:`holdfast.load`.
        """
        for part in nested_values(sharded_state_dict):
            part.init_data("cpu")
        load(checkpoint_dir, into=_parts(sharded_state_dict), strict="state")
        return dict_list_map_outplace(lambda part: part.data, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Return every tensor by its key, whole and without data."""
        with open_checkpoint(checkpoint_dir) as checkpoint:
            return {key: _described(key, info) for key, info in checkpoint.tensors.items()}

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise CheckpointingException for a checkpoint of another strategy."""
        if loaded_backend != _BACKEND:
            raise CheckpointingException(
                f"the checkpoint was saved with {loaded_backend}; leave out sharded_strategy"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise CheckpointingException for an unknown version."""
        if loaded_version != _VERSION:
            raise CheckpointingException(f"unknown version {loaded_version} of {_BACKEND}")


register_default_strategy(StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, HoldfastLoadStrategy())


def _parts(sharded_state_dict: ShardedStateDict) -> dict[str, ShardedTensor]:
    """Return all parts of a state dict, detached.

    Detaching drops the attributes that optimizers set on parameters: Megatron itself pairs
    parameters with their master copies.
    """
    parts = enumerate(nested_values(sharded_state_dict))
    return {str(number): replace(part, data=part.data.detach()) for number, part in parts}


def _described(key: str, info: TensorInfo) -> ShardedTensor:
    data = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
    return ShardedTensor.from_rank_offsets(key, data).without_data()


def optimizer_state(optimizer: object, model_state: ShardedStateDict) -> dict[str, object]:
    """Return the state of a distributed optimizer, for :func:`holdfast.save` and
    :func:`holdfast.load`.

    ``optimizer``: a ``DistributedOptimizer``, or a ``ChainedOptimizer`` of several.
    ``model_state``: ``sharded_state_dict(...)`` of the modules that it optimizes. Each moment and
    master copy is stored as a part of a tensor of the parameter's shape, under Megatron's name for
    it: ``optimizer.state.exp_avg.<key>``. Nothing is gathered, and any layout loads a checkpoint of
    any other. A load fills the tensors of the optimizer, which are created first if it has not
    stepped yet; groups, step and loss scale are restored too.

    Raises StateError for an optimizer of another kind.
    """
    optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    optimizers = [each for each in optimizers if not getattr(each, "is_stub_optimizer", False)]
    described = {
        id(item.data): item
        for item in nested_values(model_state)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
    }
    parts: list[ShardedTensor] = []
    for each in optimizers:
        _refuse_unknown(each)
        _make_moments(each)
        parts += _parts_of_optimizer(each, described)
    tensors = {str(number): part for number, part in enumerate(parts)}
    return {"tensors": tensors, "common": _Common(optimizers)}


def _parts_of_optimizer(
    optimizer: DistributedOptimizer, described: Mapping[int, ShardedTensor | ShardedTensorFactory]
) -> Iterator[ShardedTensor]:
    """Yield the master copies and moments on this rank.

    ``described``: Megatron's description of each parameter, by its id.
    """
    for parameter, start in _ranges_of(optimizer):
        whole = described.get(id(parameter))
        if whole is None:
            raise StateError(
                "a parameter of the optimizer is not in model_state",
                advice="Pass sharded_state_dict() of all modules that it optimizes.",
            )
        for name, tensor in _tensors_of(optimizer, parameter).items():
            yield from _parts_of_range(whole, f"optimizer.state.{name}", tensor, start)


def _refuse_unknown(optimizer: object) -> None:
    config = getattr(optimizer, "config", None)
    if not hasattr(optimizer, "gbuf_ranges"):
        raise StateError(
            f"{type(optimizer).__name__} is not a DistributedOptimizer with its own buffers",
            advice="Save what its sharded_state_dict() returns.",
        )
    unknown = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    if any(getattr(config, option, False) for option in unknown):
        raise StateError(
            "the optimizer is precision-aware or offloaded, and this release does not support the "
            "form of its state",
            advice="Save its sharded_state_dict() with HoldfastSaveStrategy.",
        )


def _make_moments(optimizer: DistributedOptimizer) -> None:
    """Create the state that Adam creates in its first step."""
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for state in inner.state.values():
            state.setdefault("step", torch.zeros(()))


def _ranges_of(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter with a range on this rank, and the first element of that range."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _tensors_of(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return the master copy and the moments of a parameter's range."""
    group, number = optimizer.model_param_group_index_map[parameter]
    inner = optimizer.optimizer
    master = inner.param_groups[group]["params"][number]
    state = inner.state[master]
    moments = {name: state[name] for name in state if name != "step"}
    return {"param": master.detach(), **moments}


def _parts_of_range(
    whole: ShardedTensor | ShardedTensorFactory, prefix: str, tensor: torch.Tensor, start: int
) -> Iterator[ShardedTensor]:
    """Yield the boxes of ``whole`` covered by ``tensor``, which holds its elements from ``start``
    on.
    """
    stop = start + tensor.numel()
    for part, first in _placed(whole):
        lengths = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        low = min(max(start - first, 0), part.data.numel())
        high = min(max(stop - first, 0), part.data.numel())
        at = first + low - start
        for box in flat_to_boxes(lengths, low, high):
            yield _part_at(part, f"{prefix}.{part.key}", tensor[at : at + box.volume], box)
            at += box.volume


def _placed(whole: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the parts of ``whole``, each with its first element within the parameter."""
    if isinstance(whole, ShardedTensor):
        yield whole, 0
        return
    for part in nested_values([whole.build()]):
        data = part.data
        inside = data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
        if not inside or not data.is_contiguous():
            raise StateError(
                f"{whole.key!r} is a ShardedTensorFactory whose parts are not ranges of the "
                f"parameter",
                advice="Save sharded_state_dict() of the optimizer with HoldfastSaveStrategy.",
            )
        yield part, data.storage_offset() - whole.data.storage_offset()


def _part_at(part: ShardedTensor, key: str, tensor: torch.Tensor, box: Box) -> ShardedTensor:
    return replace(
        part,
        key=key,
        data=tensor.view(box.lengths),
        dtype=tensor.dtype,
        local_shape=box.lengths,
        global_offset=box.shifted(part.global_offset).offsets,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


class _Common:
    """State that all ranks share: hyperparameters of all groups, step and loss scale."""

    def __init__(self, optimizers: Sequence[DistributedOptimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, object]:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._groups()
        ]
        common: dict[str, object] = {"groups": groups}
        steps = [int(state["step"]) for state in self._states() if "step" in state]
        if steps:  # a rank of a small model may have no parameter
            common["step"] = max(steps)
        for scaler in self._scalers():
            common["scaler"] = scaler.state_dict()
        return common

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        stored, present = _by_place(state_dict["groups"]), _by_place(self._groups())
        if {place[:2] for place in stored} != {place[:2] for place in present}:
            raise MismatchError(
                f"the optimizer and the checkpoint have other parameter groups, by {_KIND} and "
                f"whether they hold experts: {list(present)} and {list(stored)}"
            )
        for (kind, number, is_expert), group in present.items():
            others = stored.get((kind, number, not is_expert), {})
            found = stored.get((kind, number, is_expert), others)
            group.update(found, is_expert_parallel=is_expert)
        for state in self._states():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], state_dict["step"])
        for scaler in self._scalers():
            if "scaler" in state_dict:
                scaler.load_state_dict(state_dict["scaler"])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.optimizer.param_groups]

    def _states(self) -> list[dict[str, Any]]:
        return [state for each in self._optimizers for state in each.optimizer.state.values()]

    def _scalers(self) -> list[Any]:
        scalers = [each.grad_scaler for each in self._optimizers]
        return [scaler for scaler in scalers if scaler is not None]


_KIND = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Options that tell parameter groups apart, besides whether they hold experts."""

_Place = tuple[tuple[object, ...], int, bool]


def _by_place(groups: Iterable[dict[str, Any]]) -> dict[_Place, dict[str, Any]]:
    """Return parameter groups by kind, number within that kind, and whether they hold experts.

    Megatron forms separate groups of experts if these are divided over ranks, and only then.
    """
    placed: dict[_Place, dict[str, Any]] = {}
    for group in groups:
        kind = tuple(group.get(key, group.get(f"pre_{key}")) for key in _KIND)
        is_expert = bool(group.get("is_expert_parallel"))
        number = sum(each[0] == kind and each[2] == is_expert for each in placed)
        placed[kind, number, is_expert] = group
    return placed
