"""Tasks for rank processes: random states, groups of ranks, failures, runs, and data loaders."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset

import holdfast
from holdfast.drivers.local.driver import LocalDriver

from .jobs import sharded, train


def draw() -> list[Any]:
    """Draw the next random numbers of this process."""
    return [torch.rand(2).tolist(), np.random.random(2).tolist(), random.random()]


def random_save(uri: str) -> list[Any]:
    """Seed by rank, save, and draw."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    holdfast.save(
        uri,
        {"rng": holdfast.RNGState(), "g": torch.Generator().manual_seed(rank), "w": torch.ones(3)},
    )
    return draw()


def random_load(uri: str) -> list[Any]:
    """Set another seed, load, and draw."""
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    g = torch.Generator()
    holdfast.load(uri, into={"rng": holdfast.RNGState(), "g": g, "w": torch.zeros(3)})
    return [*draw(), g.initial_seed()]


def save_with(uri: str, overrides: dict[int, Any]) -> Any:
    """Save, with other states on some ranks. Return the time; an error has it in ``took_s``."""
    state = overrides.get(dist.get_rank(), {"x": torch.arange(100.0), "y": 1})
    return _timed(lambda: holdfast.save(uri, state() if callable(state) else state, deadline_s=30))


def unsavable() -> Any:
    """Return a state that is refused."""
    return {"x": torch.arange(100.0), "f": threading.Lock()}


def _timed(work: Any) -> Any:
    began = time.monotonic()
    try:
        work()
    except BaseException as error:
        error.took_s = time.monotonic() - began  # type: ignore[attr-defined]
        raise
    return time.monotonic() - began


def halting_save(uri: str, rank: int, moment: str, sign: str, deadline_s: float) -> Any:
    """Save; one rank halts before the driver's ``moment``, and touches ``sign``."""
    if dist.get_rank() == rank:
        method = getattr(LocalDriver, moment)

        async def halt(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
            if key == "manifest.safetensors" or moment != "put":
                Path(sign).touch()
                time.sleep(600)
            return await method(self, key, *args, **kwargs)

        setattr(LocalDriver, moment, halt)
    return _timed(
        lambda: holdfast.save(
            uri,
            {"x": torch.full((1000,), 2.0), "own": torch.full((9,), dist.get_rank())},
            deadline_s=deadline_s,
        )
    )


def interrupted_save(uri: str, rank: int) -> Any:
    """Save. One rank gets Ctrl-C while it waits for its storage, which never answers."""
    create = LocalDriver.create

    async def hang(self: Any, key: str, nbytes: int) -> Any:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(600)
        return await create(self, key, nbytes)

    LocalDriver.create = hang  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        own = {"own": torch.full((9,), dist.get_rank())}
        return _timed(lambda: holdfast.save(uri, own, deadline_s=30))
    finally:
        LocalDriver.create = create  # type: ignore[method-assign]


def hide_folder(path: str, rank: int, instead: str) -> str | None:
    """Mount another folder over ``path`` on one rank; return why that failed, if it did."""
    if dist.get_rank() != rank:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS; before any thread that must see it starts
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    for command in (["mount", "--make-rprivate", "/"], ["mount", "--bind", instead, path]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return None


COLLECTIVES = [
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "new_group", "new_subgroups",
]  # fmt: skip


def recorded_save(uri: str) -> list[str]:
    """Save and load a sharded job; return the collectives that were called meanwhile."""
    model, optim = sharded("fsdp", 1)
    train(model, optim, 0, 2)
    called: list[str] = []
    modules = [dist, dist.distributed_c10d]
    before = [(module, name, getattr(module, name)) for module in modules for name in COLLECTIVES]
    sequence = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group
    first = sequence()
    for module, name, function in before:
        setattr(module, name, _recording(function, name, called))
    try:
        handle = holdfast.async_save(
            uri, {"model": model, "optim": optim, "rng": holdfast.RNGState()}
        )
        handle.wait()
        holdfast.load(uri, into={"model": model, "optim": optim, "rng": holdfast.RNGState()})
    finally:
        for module, name, function in before:
            setattr(module, name, function)
    return called + [f"{sequence() - first} more"] * (sequence() != first)


def _recording(function: Any, name: str, called: list[str]) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    return record


def partial_loads(uri: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load on each rank one stored name of its own and one that was not stored. Return the missing
    and unexpected names in the report."""
    rank = dist.get_rank()
    holdfast.save(uri, {"all": torch.ones(3), f"of{rank}": torch.ones(2), "extra": 1})
    into = {"all": torch.zeros(3), f"of{rank}": torch.zeros(2), f"new{rank}": torch.zeros(2)}
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, strict=False, on_report=reports.append)
    return reports[0].missing, reports[0].unexpected


FULL = torch.arange(15.0).reshape(5, 3)


def _halves() -> tuple[Any, int]:
    """Return the group of this rank, one of several groups of two ranks, and its number."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    return groups[half], half


def actor_and_critic(folder: str) -> dict[str, Any]:
    """Save and load a checkpoint in each of two groups of two ranks at the same time."""
    group, half = _halves()
    mesh = DeviceMesh.from_group(group, "cpu")
    state = {
        "w": distribute_tensor(FULL + half, mesh, [Shard(0)]),
        "own": torch.tensor(float(dist.get_rank())),
        "data": holdfast.PerRank({"at": dist.get_rank()}),
    }
    uri = Path(folder, f"half-{half}")
    holdfast.save(uri, state, process_group=group)
    into = {
        "w": distribute_tensor(FULL * 0, mesh, [Shard(1)]),
        "own": torch.tensor(-1.0),
        "data": holdfast.PerRank({"at": -1}),
    }
    holdfast.load(uri, into=into, process_group=group)
    with holdfast.open(uri) as checkpoint:
        world = checkpoint.world
    whole = into["w"].full_tensor()
    dist.barrier()
    return {
        "world": world,
        "whole": torch.equal(whole, FULL + half),
        "own": into["own"].item(),
        "data": into["data"].value,
    }


def runs_of_groups(folder: str) -> int:
    """Train with a Checkpointer in each of two groups of two ranks; return the step it resumes
    from.
    """
    group, half = _halves()
    uri = Path(folder, f"run-{half}")
    with holdfast.Checkpointer(uri, every=1, when_busy="wait", process_group=group) as checkpointer:
        for step in range(1, 3 + half):
            checkpointer.step(step, {"w": torch.full((10,), float(step))})
    state = {"w": torch.zeros(10)}
    with holdfast.Checkpointer(uri, process_group=group) as checkpointer:
        step = checkpointer.resume(state)
    assert state["w"][0] == step
    dist.barrier()
    return step


def copies_of_one(folder: str) -> str:
    """Save a replicated tensor on each of two ranks alone, then a sharded one. Return the error of
    the latter."""
    mesh = DeviceMesh("cpu", [0, 1])
    uri = Path(folder, f"of-{dist.get_rank()}")
    replicated = distribute_tensor(FULL, mesh, [Replicate()])
    holdfast.save(uri, {"w": replicated}, process_group="self")
    assert torch.equal(holdfast.load(uri, process_group="self")["w"], FULL)
    said = ""
    try:
        half = distribute_tensor(FULL, mesh, [Shard(0)])
        holdfast.save(Path(folder, f"half-{dist.get_rank()}"), {"w": half}, process_group="self")
    except holdfast.CoverageError as error:
        said = str(error)
    dist.barrier()
    return said


WHOLE = torch.arange(35.0).reshape(7, 5)


class Around(torch.Tensor):
    """A tensor around another one; every operation drops the data that it derives from it."""

    held: torch.Tensor
    derived: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, held: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        made.derived = None
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors."""
        return ["held"] + ["derived"] * (self.derived is not None), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the function to the inner tensors."""
        args_of, kwargs_of = tree_map_only(cls, lambda around: around.held, (args, kwargs or {}))
        found = func(*args_of, **kwargs_of)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, found)


def model_of(whole: torch.Tensor) -> Any:
    """Return a module with a sharded wrapper parameter that has derived data."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = distribute_tensor(whole, mesh, [Shard(0)])
    around = DTensor.from_local(
        Around(plain.to_local()),
        mesh,
        plain.placements,
        run_check=False,
        shape=plain.shape,
        stride=plain.stride(),
    )
    around._local_tensor.derived = torch.ones(())
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(around, requires_grad=False))
    return model


def save_around(uri: str, lazy: bool) -> None:
    """Save twice; the second save recognises the state."""
    model = model_of(WHOLE)
    for _ in range(2):
        holdfast.async_save(uri, {"model": model}, lazy=lazy).wait()


def load_around(uri: str) -> list[bool]:
    """Load into a wrapped and a plain parameter; return the results of the checks. The wrapped
    parameter must also forget the data that it derived before."""
    model = model_of(torch.zeros(7, 5))
    expected = model_of(WHOLE)
    holdfast.load(uri, into={"model": model})
    into = {"model": {"w": torch.zeros(7, 5)}}
    holdfast.load(uri, into=into)
    local = model.w._local_tensor
    return [
        torch.equal(local.held, expected.w._local_tensor.held),
        local.derived is None,
        torch.equal(into["model"]["w"], WHOLE),
    ]


def skewed_run(uri: str, slow: int) -> tuple[list[int], dict[str, Any]]:
    """Save at each step, while one rank learns late that saves end."""
    from holdfast.storage.ranks.store_team import StoreTeam

    rank, begun = dist.get_rank(), []
    plain = StoreTeam._leave

    def late(self: StoreTeam) -> None:
        plain(self)
        time.sleep(0.15)

    if rank == slow:
        StoreTeam._leave = late  # type: ignore[method-assign]
    try:
        with holdfast.Checkpointer(uri, every=1) as ckpt:
            for step in range(1, 13):
                if ckpt.step(step, {"x": torch.ones(50) * rank}) is not None:
                    begun.append(step)
                time.sleep(0.05)
                dist.barrier()
    finally:
        StoreTeam._leave = plain  # type: ignore[method-assign]
    return begun, asdict(ckpt.counters)


def timed_run(uri: str) -> tuple[list[int], dict[str, Any]]:
    """Save by time, on ranks that run at their own pace."""
    rank, begun = dist.get_rank(), []
    with holdfast.Checkpointer(uri, every="0.2s", when_busy="wait") as ckpt:
        for step in range(1, 60):
            time.sleep(0.01 + 0.002 * ((step + rank) % 4))
            if ckpt.step(step, {"x": torch.ones(5)}) is not None:
                begun.append(step)
    return begun, asdict(ckpt.counters)


def damaged_run(uri: str) -> tuple[int, float]:
    """Save three steps, damage the last rank's image, and resume; return step and value."""
    rank = dist.get_rank()
    with holdfast.Checkpointer(uri, every=1, when_busy="wait", grace_s=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, {"own": torch.full((50_000,), float(step * 10 + rank))})
    dist.barrier()
    if rank == 0:
        (image,) = Path(uri).glob(f"step-00000003/data/*/{dist.get_world_size() - 1}.safetensors")
        data = bytearray(image.read_bytes())
        data[50_000] ^= 1
        image.write_bytes(data)
    dist.barrier()
    into = {"own": torch.zeros(50_000)}
    with holdfast.Checkpointer(uri, grace_s=None) as ckpt:
        return ckpt.resume(into), float(into["own"].unique())


def stopped_run(uri: str, signalled: list[int]) -> tuple[int, list[int], dict[str, Any]]:
    """Run ranks at their own pace, and send them SIGTERM in different steps; return where each
    ended."""
    rank, stop = dist.get_rank(), list[int]()
    logging.disable(logging.WARNING)
    before = signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    step = 0
    try:
        with holdfast.Checkpointer(
            uri, every=1000, grace_s=3.0 if -1 in signalled else 30.0
        ) as ckpt:
            for step in range(1, 100):
                if step == signalled[rank]:
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.step(step, {"x": torch.ones(50) * rank, "step": step})
                if stop or step == 20:
                    break
    finally:
        signal.signal(signal.SIGTERM, before)
        logging.disable(logging.NOTSET)
    return step, stop, asdict(ckpt.counters)


RULES = ("keep", "broadcast", "split", "merge")


class Samples(IterableDataset[int]):
    """The samples that a rank has yet to read, which are also its state."""

    def __init__(self, left: torch.Tensor) -> None:
        self.left = left

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not len(self.left):
            raise StopIteration
        sample, self.left = int(self.left[0]), self.left[1:]
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining samples."""
        return {"left": self.left.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these samples."""
        self.left = state["left"]


def part_of_an_epoch(load: str | None, save: str | None, samples: int, batches: int) -> list[int]:
    """Resume from a checkpoint, or begin. Read some batches (-1: all that remain) of this rank's
    share, save, and return the samples read."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(Samples(order[rank::world]), batch_size=3)
    state = {"data": holdfast.PerRank(loader, "split"), "step": 0}
    if load:
        holdfast.load(load, into=state)
    seen: list[int] = []
    batch = iter(loader)
    while batches and (found := next(batch, None)) is not None:
        seen += found.tolist()
        batches -= 1
        state["step"] += 1
    if save:
        holdfast.save(save, state)
    return seen


def save_lists(uri: str) -> None:
    """Save a list for each rule: rank r has r + 1 files left. Also save a list of lists, which is
    longer on each rank than on the previous one."""
    rank = dist.get_rank()
    files = [f"{rank}.{number}" for number in range(rank + 1)]
    state: dict[str, Any] = {rule: holdfast.PerRank(files, rule) for rule in RULES}
    holdfast.save(uri, state | {"lists": [[name] for name in files]})


def dealt_lists(uri: str) -> dict[str, list[str]]:
    """Return this rank's list under each rule."""
    state = {rule: holdfast.PerRank([], rule) for rule in RULES}
    holdfast.load(uri, into=state, strict="state")
    return {rule: per_rank.value for rule, per_rank in state.items()}


def marked_experts(uri: str, shape: tuple[int, int], *, save: bool) -> tuple[int, torch.Tensor]:
    """Train experts that are divided over ``shape[0]`` groups, each perhaps an FSDP mesh.

    Take two steps and save, or load; then take a step. Return the number of this group's first
    expert, and its experts.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("experts", "fsdp"))
    whole = torch.arange(4 * 6 * 3.0).reshape(4, 6, 3)
    mine = whole.chunk(shape[0])[mesh.get_local_rank("experts")]
    start = mesh.get_local_rank("experts") * len(mine)

    def divided(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh["fsdp"], [Shard(1)]) if shape[1] > 1 else tensor

    module = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(module.weight)
    module.experts = torch.nn.Parameter(divided(mine.clone() if save else torch.zeros_like(mine)))
    holdfast.mark_part(module.experts, shape=whole.shape, offset=(start, 0, 0))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)

    def step(number: int) -> None:
        module.experts.grad = divided(mine.cos() * number)
        module.weight.grad = torch.full((3, 3), 0.5)
        optimizer.step()

    state = {"model": module, "optim": optimizer}
    if save:
        step(1)
        step(2)
        holdfast.save(uri, state)
    else:
        holdfast.load(uri, into=state)
    step(3)
    experts = module.experts.detach()
    return start, experts.full_tensor() if isinstance(experts, DTensor) else experts


def expert_state(uri: str, shape: tuple[int, int], *, save: bool) -> None:
    """Save or load experts that are divided over ``shape[0]`` groups, each an FSDP mesh.

    Each rank only knows a DTensor of its group's experts.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("experts", "fsdp"))
    whole = torch.arange(4 * 6 * 3.0).reshape(4, 6, 3)
    mine = whole.chunk(shape[0])[mesh.get_local_rank("experts")]
    filled = mine if save else torch.zeros_like(mine)
    weight = distribute_tensor(filled.clone(), mesh["fsdp"], [Shard(1)])
    start = mesh.get_local_rank("experts") * len(mine)
    state = {"experts": holdfast.Shard(weight, shape=whole.shape, offset=(start, 0, 0))}
    if save:
        holdfast.save(uri, state)
    else:
        holdfast.load(uri, into=state)
    assert torch.equal(weight.full_tensor(), mine)
