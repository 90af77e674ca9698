"""Checkpoints of Megatron-core: strategies for ``dist_checkpointing``, and distributed optimizers.

    dist_checkpointing.save(state, folder, sharded_strategy=HoldfastSaveStrategy())
    dist_checkpointing.load(state, folder, sharded_strategy=HoldfastLoadStrategy())

Megatron's tensors are stored under their keys. Everything else (``common.pt``, a file for each
``ShardedObject``) is put into the same folder with ``torch.save``, in the same files for each
version of Megatron. So the folder must be a path that all ranks see. To do without these files, and
to save to any URI:

    model_state = model.sharded_state_dict(metadata=metadata)
    state = {"model": model_state, "optim": optimizer_state(optimizer, model_state)}
    holdfast.save(uri, state)
    holdfast.load(uri, into=state)
"""

from __future__ import annotations

import fcntl
import math
import operator
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from ...errors import MismatchError, StateError
from ...planner.box import flat_to_boxes
from ..api import async_save, load, save
from ..format.manifest import MANIFEST_KEY
from ..format.packed import Compression
from ..operations.reading.reader import TensorInfo
from ..operations.reading.reader import open as open_checkpoint
from ..operations.saving.handle import SaveHandle
from ..runtime.engine import start as start_on_engine
from ..state.adapters.megatron import built_in_place

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = ["HoldfastLoadStrategy", "HoldfastSaveStrategy", "optimizer_state"]

_BACKEND = "holdfast"
_VERSION = 1


# Megatron 0.17 and later takes no other strategies than its own.
class HoldfastSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]  # no types
    """Saves a sharded state dict; returns once its tensors are committed.

    Megatron then writes its ``metadata.json``; without that file it does not recognise the folder
    as a checkpoint. ``compression`` as in :func:`holdfast.save`.
    """

    def __init__(self, *, compression: Compression | None = None) -> None:
        super().__init__(_BACKEND, _VERSION)
        self._compression = compression

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the state. Every rank calls this. Raises as :func:`holdfast.save`."""
        _save_objects(sharded_state_dict, checkpoint_dir)
        save(checkpoint_dir, _parts(sharded_state_dict), compression=self._compression)

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Start saving the state; return once its tensors are copied to host memory.

        Every rank calls this. Return the request for Megatron's queue, which is done when the
        tensors are committed. Its finalization raises the error of a failed save.
        ``async_strategy``: the queue, ``mcore`` or ``nvrx``.
        """
        request: Any = AsyncRequest
        if async_strategy != "mcore":
            _, request = torch_dist.get_async_strategy(async_strategy, "AsyncRequest")
        _save_objects(sharded_state_dict, checkpoint_dir)
        parts = _parts(sharded_state_dict)
        saving = async_save(checkpoint_dir, parts, compression=self._compression)
        return request(_wait_for_unlock, (_locked_during(saving),), [saving.wait])


def _locked_during(saving: SaveHandle) -> str:
    """Return the path of a file that this process keeps locked until the save has ended."""
    # Not by flock: a forked process would share the lock, and hold it after this process has died.
    file = tempfile.NamedTemporaryFile(prefix="holdfast-megatron-")  # noqa: SIM115  # closed later
    fcntl.lockf(file, fcntl.LOCK_EX)
    start_on_engine(_close_after(saving, file))
    return file.name


async def _close_after(saving: SaveHandle, file: IO[bytes]) -> None:
    with file, suppress(Exception):  # the finalization raises it
        await saving.last.reached()


def _wait_for_unlock(path: str) -> None:
    """Wait until another process has unlocked a file, or has died.

    This is all that Megatron's process for a save does. It uses nothing of the job's.
    """
    with suppress(FileNotFoundError), Path(path).open("rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)


class HoldfastLoadStrategy(torch_dist.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads a folder of :class:`HoldfastSaveStrategy` in place, under any layout.

    Folders in Megatron's own format are loaded by Megatron.
    """

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, *options: str
    ) -> ShardedStateDict:
        """Return the state dict with tensors and values in place of its sharded items.

        Every rank calls this. Raises as :func:`holdfast.load`, and MismatchError for a missing
        ``ShardedObject``.
        """
        if not _is_ours(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir, *options)
        for part in _of(ShardedTensor, sharded_state_dict):
            part.init_data("cpu")
        parts = _parts(sharded_state_dict)
        if _on_any_rank(bool(parts)):  # Megatron's wrapper loads objects alone
            load(checkpoint_dir, into=parts, strict="state")
        return dict_list_map_outplace(
            lambda item: (
                item.data if isinstance(item, ShardedTensor) else _load_object(item, checkpoint_dir)
            ),
            sharded_state_dict,
        )

    def load_tensors_metadata(self, checkpoint_dir: str | Path, *options: Any) -> ShardedStateDict:
        """Return every tensor by its key, whole and without data."""
        if not _is_ours(checkpoint_dir):
            return super().load_tensors_metadata(checkpoint_dir, *options)
        with open_checkpoint(checkpoint_dir) as checkpoint:
            return {key: _described(key, info) for key, info in checkpoint.tensors.items()}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return every tensor by its key, and every object by its unique key, without data."""
        if not _is_ours(checkpoint_dir):
            return super().load_sharded_metadata(checkpoint_dir)
        files = Path(checkpoint_dir).glob("*/shard_*.pt")
        keys = [f"{file.parent.name}/{file.stem}" for file in files]
        objects = {key: ShardedObject.empty_from_unique_key(key) for key in keys}
        return {**objects, **self.load_tensors_metadata(checkpoint_dir)}


with suppress(ImportError):  # Megatron 0.17 and later does not find strategies by metadata.json
    from megatron.core.dist_checkpointing.strategies.base import (
        StrategyAction,
        register_default_strategy,
    )

    register_default_strategy(
        StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, HoldfastLoadStrategy()
    )


def _is_ours(folder: str | Path) -> bool:
    # Megatron's wrapper for parallel saves puts its own name into metadata.json.
    return Path(folder, MANIFEST_KEY).exists()


def _on_any_rank(holds: bool) -> bool:
    if not dist.is_initialized():
        return holds
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, holds)
    return any(found)


def _of(kind: type[Any], sharded_state_dict: ShardedStateDict) -> list[Any]:
    return [item for item in nested_values(sharded_state_dict) if isinstance(item, kind)]


def _parts(sharded_state_dict: ShardedStateDict) -> dict[str, ShardedTensor]:
    """Return all parts of tensors of a state dict, detached.

    Detaching drops the attributes that optimizers set on parameters: Megatron itself pairs
    parameters with their master copies.
    """
    parts = enumerate(_of(ShardedTensor, sharded_state_dict))
    return {str(number): replace(part, data=part.data.detach()) for number, part in parts}


def _save_objects(sharded_state_dict: ShardedStateDict, folder: str | Path) -> None:
    """Write the objects into files with the names that Megatron 0.16 gives them."""
    for item in _of(ShardedObject, sharded_state_dict):
        if is_main_replica(item.replica_id):
            path = _path_of(item, folder)
            path.parent.mkdir(exist_ok=True)
            torch.save(item.data, path)


def _load_object(item: ShardedObject, folder: str | Path) -> object:
    path = _path_of(item, folder)
    if not path.exists():
        raise MismatchError(
            f"the checkpoint {folder} has no {item.unique_key}",
            advice="It was saved in a layout with other objects; leave this one out of the state.",
        )
    return torch.load(  # noqa: TID251  # torch's own loader, restricted
        path, map_location="cpu", weights_only=True
    )


def _path_of(item: ShardedObject, folder: str | Path) -> Path:
    common = item.key == "common_state"  # of Megatron 0.19 and later; others write that file
    return Path(folder, "common.pt" if common else f"{item.unique_key}.pt")


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
    for part in _parts_in(whole):
        order, shape, strides = _in_order_of_memory(whole, part)
        first = part.data.storage_offset() - whole.data.storage_offset()
        low, high = (
            _number_below(limit - first, shape, strides)
            for limit in (start, start + tensor.numel())
        )
        back = [order.index(dim) for dim in range(len(order))]
        for box in flat_to_boxes(shape, low, high):
            at = first + sum(map(operator.mul, box.offsets, strides)) - start
            data = tensor.as_strided(box.lengths, strides, tensor.storage_offset() + at)
            offsets = tuple(box.offsets[dim] for dim in back)
            yield _part_at(part, f"{prefix}.{part.key}", data.permute(back), offsets)


def _parts_in(whole: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    return [whole] if isinstance(whole, ShardedTensor) else built_in_place(whole)


def _in_order_of_memory(
    whole: ShardedTensor | ShardedTensorFactory, part: ShardedTensor
) -> tuple[list[int], list[int], list[int]]:
    """Return the dimensions of ``part``, those with large strides first, their sizes and strides.

    In this order, a range of the parameter's elements is a range of the part's. Raises StateError
    if there is no such order, or if the part has memory of its own.
    """
    data = part.data[(None,) * part.prepend_axis_num]
    apart = whole.data.numel() + 1  # further than any element, for dimensions without a stride
    strides = [s if n > 1 else apart for n, s in zip(data.shape, data.stride(), strict=True)]
    order = sorted(range(data.ndim), key=lambda dim: -strides[dim])
    shape, strides = [data.shape[dim] for dim in order], [strides[dim] for dim in order]
    spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    nested = all(s > sum(spans[i + 1 :]) for i, s in enumerate(strides))
    inside = data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
    if not (inside and nested):
        raise StateError(
            f"{whole.key!r} is a ShardedTensorFactory whose parts are not "
            f"in the parameter's memory",
            advice="Save sharded_state_dict() of the optimizer with HoldfastSaveStrategy.",
        )
    return order, shape, strides


def _number_below(limit: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of an array lie before ``limit``, counted from its first element."""
    if limit <= 0:
        return 0
    number = 0
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        whole, last = divmod(limit - 1, stride)
        inner = math.prod(shape[dim + 1 :])
        if whole >= size:
            return number + size * inner
        number += whole * inner
        limit = last + 1
    return number + 1


def _part_at(
    part: ShardedTensor, key: str, tensor: torch.Tensor, offsets: Sequence[int]
) -> ShardedTensor:
    return replace(
        part,
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_offset=tuple(map(operator.add, part.global_offset, offsets)),
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
