"""Every kind of DCP save, followed by every kind of DCP load, through a given writer and reader."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter
from support.dcp_tasks import accepts

State = dict[str, Any]
WRITERS = {"stock": FileSystemWriter, "ours": HoldfastWriter}
READERS = {"stock": FileSystemReader, "ours": HoldfastReader}


def state_of(step: int) -> State:
    """Return a state whose tensors and values follow from ``step``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(35.0).reshape(7, 5) + step
    return {
        "model": {
            "sharded": distribute_tensor(full, mesh, [Shard(0)]),
            "replicated": distribute_tensor(full + 1, mesh, [Replicate()]),
            "plain": full.bfloat16() + 2,
        },
        "optim": {"state": [{"exp": full + 3, "n": 3 * step}], "betas": (0.9, 0.1 * step)},
        "values": {"text": f"at {step}", "none": None, "flags": [True, step > 3]},
        "step": step,
    }


def async_saved(state: State, **options: Any) -> Any:
    """Save in a thread; return the metadata."""
    return dcp.async_save(state, **options).result(60)  # type: ignore[union-attr]


def caching_planner(name: str) -> DefaultSavePlanner:
    """Return a planner that caches plans for planners of this name, if this torch has one."""
    planner = type(name, (DefaultSavePlanner,), {})
    if accepts(DefaultSavePlanner, "enable_plan_caching"):
        return planner(enable_plan_caching=True)
    return planner()


Call = Callable[[State, Any, str], Any]
SAVES: dict[str, Call] = {
    "save": lambda state, w, uri: dcp.save(state, storage_writer=w(uri)),
    "save to an id": lambda state, w, uri: dcp.save(
        state, checkpoint_id=uri, storage_writer=w("/nowhere")
    ),
    "save_state_dict": lambda state, w, uri: dcp.save_state_dict(state, w(uri)),
    "in a thread": lambda state, w, uri: async_saved(state, storage_writer=w(uri)),
    "in a process group": lambda state, w, uri: dcp.save(
        state, storage_writer=w(uri), process_group=dist.new_group()
    ),
    "alone": lambda state, w, uri: dcp.save(
        state if dist.get_world_size() == 1 else whole(state),
        storage_writer=w(uri if dist.get_rank() == 0 else f"{uri}-{dist.get_rank()}"),
        no_dist=True,
    ),
    "deduplicated": lambda state, w, uri: dcp.save(
        state,
        storage_writer=w(uri),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    ),
    "with cached plans": lambda state, w, uri: [
        dcp.save(state, storage_writer=w(to), planner=caching_planner(uri))
        for to in (f"{uri}-first", uri)
    ],
    "twice": lambda state, w, uri: (
        dcp.save(state_of(1), storage_writer=w(uri)),
        dcp.save(state, storage_writer=w(uri)),
    ),
    "exclusively": lambda state, w, uri: dcp.save(state, storage_writer=w(uri, overwrite=False)),
    "exclusively, twice": lambda state, w, uri: (
        dcp.save(state, storage_writer=w(uri, overwrite=False)),
        dcp.save(state_of(1), storage_writer=w(uri, overwrite=False)),
    ),
    "with an object": lambda state, w, uri: dcp.save(
        {**state, "object": {"a", "set"}}, storage_writer=w(uri)
    ),
}
if accepts(dcp.save, "use_collectives"):
    SAVES["without collectives"] = lambda state, w, uri: dcp.save(
        state, storage_writer=w(uri), use_collectives=False
    )


def loaded(into: State, reader: Any, **options: Any) -> State:
    """Load into a state; return it."""
    dcp.load(into, storage_reader=reader, **options)
    return into


def old_loaded(into: State, reader: Any) -> State:
    """Load by the older function, with its default planner."""
    dcp.load_state_dict(into, reader)
    return into


def with_part(state: State, part: str, **items: Any) -> State:
    """Return ``state`` with additional or other ``items`` in one of its parts."""
    return {**state, part: {**state[part], **items}}


LOADS: dict[str, Call] = {
    "load": lambda into, r, uri: loaded(into, r(uri)),
    "load an id": lambda into, r, uri: loaded(into, r("/nowhere"), checkpoint_id=uri),
    "load_state_dict": lambda into, r, uri: old_loaded(into, r(uri)),
    "in a process group": lambda into, r, uri: loaded(into, r(uri), process_group=dist.new_group()),
    "alone": lambda into, r, uri: loaded(whole(into), r(uri), no_dist=True),
    "a part": lambda into, r, uri: loaded({"optim": into["optim"], "step": 0}, r(uri)),
    "whole tensors": lambda into, r, uri: loaded(whole(into), r(uri)),
    "other shards": lambda into, r, uri: loaded(
        with_part(
            into, "model", sharded=into["model"]["sharded"].redistribute(placements=[Shard(1)])
        ),
        r(uri),
    ),
    "a missing tensor": lambda into, r, uri: loaded(
        with_part(into, "model", other=torch.ones(3)), r(uri)
    ),
    "a missing value": lambda into, r, uri: loaded({**into, "other": 1}, r(uri)),
    "a missing tensor, partially": lambda into, r, uri: loaded(
        with_part(into, "model", other=torch.ones(3)),
        r(uri),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    ),
    "another size": lambda into, r, uri: loaded(
        with_part(into, "model", plain=torch.ones(7, 6)), r(uri)
    ),
    "another dtype": lambda into, r, uri: loaded(
        with_part(into, "model", plain=torch.ones(7, 5)), r(uri)
    ),
    "a value for a tensor": lambda into, r, uri: loaded(with_part(into, "model", plain=1), r(uri)),
    "a tensor for a value": lambda into, r, uri: loaded({**into, "step": torch.ones(2)}, r(uri)),
    "built": lambda into, r, uri: _load_state_dict_from_keys(storage_reader=r(uri)),
    "built from keys": lambda into, r, uri: _load_state_dict_from_keys(
        {"optim", "model.plain"}, storage_reader=r(uri)
    ),
    "built from an id": lambda into, r, uri: _load_state_dict_from_keys(
        "step", checkpoint_id=uri, storage_reader=r("/nowhere")
    ),
    "sharded optimizer": lambda into, r, uri: load_sharded_optimizer_state_dict(
        {"plain": torch.ones(7, 5)}, "optim", r(uri)
    ),
    "metadata": lambda into, r, uri: described(r(uri), r(uri).read_metadata()),
}


ALIKE = ("load", "load an id", "a missing value", "another dtype")
"""Loads of the same layout. DCP's own writer supports no others after a save of several ranks
without collectives: some ranks would fail, and others wait for them."""


def whole(state: Any) -> Any:
    """Return a state of whole tensors on every rank."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def described(reader: Any, metadata: Any) -> Any:
    """Return the parts of metadata that do not depend on where a writer stores data."""
    meta = metadata.storage_meta
    return {
        "items": {
            name: (str(item.size), str(item.properties.dtype)) if hasattr(item, "size") else "value"
            for name, item in metadata.state_dict_metadata.items()
        },
        "paths": metadata.planner_data,
        "id": str(meta.checkpoint_id) == str(reader.checkpoint_id),
        "save": isinstance(meta.save_id, str),
        "load": isinstance(meta.load_id, str),
    }


def plain(value: Any) -> Any:
    """Return a value of lists and texts, which tells tensors apart by dtype, shape and bits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, DTensor):
        return plain(value.to_local())
    if hasattr(value, "local_shards"):
        return "shards", [plain(shard.tensor) for shard in value.local_shards()]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    return value


def outcome(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns, or the type of its error."""
    try:
        return plain(call())
    except CheckpointException as error:
        (first, *_) = (failed for failed, _ in error.failures.values())
        return type(first)
    except Exception as error:
        return type(error)


def matrix(folder: str, writer: str, reader: str) -> dict[tuple[str, str], Any]:
    """Return the outcome of each save, and of each load after it."""
    outcomes: dict[tuple[str, str], Any] = {}
    logging.getLogger().setLevel(logging.ERROR)  # DCP logs each missing file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, save) in enumerate(SAVES.items()):
            uri = f"{folder}/{number}"
            found = outcome(lambda save=save, uri=uri: save(state_of(7), WRITERS[writer], uri))
            outcomes[name, ""] = found if isinstance(found, type) else None
            dist.barrier()
        for (number, name), (how, load) in itertools.product(enumerate(SAVES), LOADS.items()):
            if name == "without collectives" and dist.get_world_size() > 1 and how not in ALIKE:
                continue
            uri = f"{folder}/{number}"
            outcomes[name, how] = outcome(
                lambda load=load, uri=uri: load(state_of(0), READERS[reader], uri)
            )
            dist.barrier()
    return outcomes
