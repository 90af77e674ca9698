"""More tasks for rank processes: plain tensors, random states, and what goes wrong."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.operations.saving import save
from holdfast.storage.ranks.process_group import current_member

from .bits import difference
from .jobs import laid_out, placement, sharded, state_of, train

__all__ = ["plain_load", "plain_save"]


def plain_state(rank: int, world: int) -> dict[str, Any]:
    """Return tensors and values that are equal, different, partial or tied on the ranks."""
    tied = torch.arange(700.0)
    state: dict[str, Any] = {
        "same": torch.arange(30_000.0), "turned": torch.arange(12.0).reshape(3, 4).t(), "own": torch.full((5,), float(rank)),
        "z": {"first": tied}, "a": {"second": tied}, "array": np.arange(4), "empty": torch.zeros(0, 2),
        "step": 7, "who": rank, "parity": ["even", "odd"][rank % 2], "list": [1, (2, float(rank))],
    }  # fmt: skip
    shared = torch.arange(6.0)
    state["tied on some"] = {
        "p": shared,
        "q": shared if rank % 2 else shared + rank + 1,
        "r": shared if rank % 2 else shared.clone(),
    }
    if rank == 1:
        state["only"] = {"t": torch.full((3,), 5.0), "v": "here"}
    if rank >= 2:
        state["some"] = torch.arange(9)
    return state


def plain_save(uri: str) -> tuple[int, list[str]]:
    """Save it; return the bytes of this rank's image and the names in it."""
    from safetensors import safe_open

    report = holdfast.save(uri, plain_state(dist.get_rank(), dist.get_world_size()))
    path = Path(uri) / "data" / report.attempt / f"{dist.get_rank()}.safetensors"
    if not report.nbytes:
        return 0, []
    with safe_open(path, "numpy") as image:
        return report.nbytes, sorted(name for name in image.keys() if not name.startswith("__"))


def plain_load(uri: str, saved_world: int) -> list[str]:
    """Load it into a state of this rank's own, and without one; return differences."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = plain_state(rank, saved_world)
    into = plain_state(rank + 10, saved_world) | (
        {"only": {"t": torch.zeros(3), "v": ""}} if rank == 1 else {}
    )
    into = {key: into[key] for key in expected if key in into}
    into["same"], into["turned"] = torch.zeros(30_000), torch.zeros(3, 4).t()
    if rank >= 2:
        into["some"] = torch.zeros(9, dtype=torch.int64)
    found = [] if world == saved_world else ["strict"]
    holdfast.load(uri, into=into, strict=world == saved_world)
    if text := difference(expected, into):
        found.append(text)
    built = holdfast.load(uri)
    if text := difference(expected, {key: built[key] for key in expected}):
        found.append(f"built: {text}")
    return [text for text in found if text != "strict"]


class Tied(nn.Module):
    """A tied weight whose second name comes first in the alphabet, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.wte.weight


def giant_save(uri: str, plain: bool) -> int:
    """Save one replicated tensor of 16 MB, plain or as a DTensor; return the bytes written."""
    tensor = torch.arange(4_000_000, dtype=torch.float32).view(4, -1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return holdfast.save(uri, {"t": tensor if plain else laid_out(tensor, mesh, ("R",))}).nbytes


def replicas(uri: str, seed: int) -> list[Any]:
    """Save a replicated module, and load it into another; return bytes and difference."""
    torch.manual_seed(seed)
    model = Tied()
    model.register_buffer("mean", torch.full((3,), float(dist.get_rank())))
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    report = holdfast.save(uri, {"model": model})
    other = Tied()
    other.register_buffer("mean", torch.zeros(3))
    holdfast.load(uri, into={"model": other})
    return [report.nbytes, difference(saved, dict(other.state_dict()))]


def draw() -> list[Any]:
    """The next random numbers of this process."""
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
    """Seed otherwise, load, and draw."""
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    g = torch.Generator()
    holdfast.load(uri, into={"rng": holdfast.RNGState(), "g": g, "w": torch.zeros(3)})
    return [*draw(), g.initial_seed()]


def save_with(uri: str, overrides: dict[int, Any], deadline_s: float = 30.0) -> Any:
    """Save, with other states on some ranks; return the time, or raise with it in ``took_s``."""
    state = overrides.get(dist.get_rank(), {"x": torch.arange(100.0), "y": 1})
    return _timed(
        lambda: holdfast.save(uri, state() if callable(state) else state, deadline_s=deadline_s)
    )


def load_with(uri: str, overrides: dict[int, Any], strict: bool = True) -> Any:
    """Load; some ranks' targets are others."""
    into = overrides.get(dist.get_rank(), {"x": torch.zeros(100), "y": 0})
    _timed(lambda: holdfast.load(uri, into=into, strict=strict))
    return into


def disagreeing(uri: str, how: str) -> Any:
    """Save a sharded tensor of which rank 2 has another idea than the others."""
    odd = dist.get_rank() == 2
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 9 if odd and how == "shape" else 8
    x = torch.zeros(rows, 3, dtype=torch.float64 if odd and how == "dtype" else torch.float32)
    kind = "S1" if odd and how == "offset" else "S0"
    local = torch.zeros(-(-rows // 4), 3) if kind == "S0" else torch.zeros(8, 1)
    shard = DTensor.from_local(
        local.to(x.dtype),
        mesh,
        [placement(kind)],
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )
    return _timed(lambda: holdfast.save(uri, {"x": shard}))


def unsavable() -> Any:
    """A state that is refused."""
    return {"x": torch.arange(100.0), "f": threading.Lock()}


def _timed(work: Any) -> Any:
    began = time.monotonic()
    try:
        work()
    except BaseException as error:
        error.took_s = time.monotonic() - began  # type: ignore[attr-defined]
        raise
    return time.monotonic() - began


def joining_save(uri: str, hosts: list[str], rank: int, sign: str, deadline_s: float) -> Any:
    """Save with the given hosts; one rank halts before it forwards its host's fragments."""
    member = current_member(deadline_s)
    assert member is not None
    member.host = hosts[dist.get_rank()]
    if dist.get_rank() == rank:
        save.join = partial(_halted, sign)
    state = {"x": torch.full((1000,), 2.0), "own": torch.full((9,), dist.get_rank())}
    return _timed(lambda: holdfast.save(uri, state, deadline_s=deadline_s))


def _halted(sign: str, *_: Any) -> Any:
    Path(sign).touch()
    time.sleep(600)


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
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS, before any thread is started that is to see it
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


def overlapped(uri: str, saves: int, budget_nbytes: int | None) -> list[Any]:
    """Train while earlier steps are saved; return the state at each save."""
    model, optim = sharded("fsdp", 1)
    handles, states = [], []
    for step in range(saves):
        train(model, optim, step, step + 1)
        state = {
            "model": model,
            "optim": optim,
            "step": step,
            "own": torch.full((3,), float(dist.get_rank() + step)),
        }
        states.append(state_of(model, optim))
        handles.append(holdfast.async_save(f"{uri}/{step}", state, budget_nbytes=budget_nbytes))
        state["own"].zero_()
        for p in model.parameters():
            p.data.add_(0)  # touched at once
        train(model, optim, step + 100, step + 102)
    for handle in handles:
        handle.wait()
    return states


def partial_meshes(uri: str) -> list[Any]:
    """Save and load pipeline stages: each half of the ranks has a tensor of its own."""
    stage = dist.get_rank() // 2
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    full = torch.arange(35.0).reshape(7, 5) + stage
    state = {
        f"stage{stage}": {"w": laid_out(full, whole["dp"], ("S0",)), "lr": stage},
        "shared": torch.ones(4),
        "step": 1,
    }
    holdfast.save(uri, state)
    into = {
        f"stage{stage}": {"w": laid_out(full * 0, whole["dp"], ("S0",)), "lr": -1},
        "shared": torch.zeros(4),
        "step": 0,
    }
    holdfast.load(uri, into=into)
    return [
        torch.equal(into[f"stage{stage}"]["w"].to_local(), state[f"stage{stage}"]["w"].to_local()),
        into[f"stage{stage}"]["lr"] == stage,
    ]


def meshes_of_one_name(uri: str, how: str) -> Any:
    """Save and load tensors of one name on two mesh lines: alike, different, or on one only."""
    rank = dist.get_rank()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("line", "dp"))
    full = torch.arange(35.0).reshape(7, 5) + (rank // 2 if how == "different" else 0)
    here = how != "one line" or rank < 2
    state: dict[str, Any] = {"w": laid_out(full, whole["dp"], ("S0",))} if here else {}
    state["v"] = laid_out(torch.arange(9.0), whole["dp"], ("R",))
    into = {
        name: laid_out(torch.full(t.shape, -1.0), whole["dp"], ("S0",)) for name, t in state.items()
    }

    def work() -> None:
        holdfast.save(uri, state)
        holdfast.load(uri, into=into)

    _timed(work)
    return whole_of(into)


def whole_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """DTensors, gathered."""
    return {name: t.full_tensor() for name, t in state.items()}


class Holder:
    """An object with a state that is all small values."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        """What it holds."""
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold that."""
        self.held = state["held"]


def own_lists(uri: str) -> list[Any]:
    """Lists and tuples that are longer on some ranks, also within each other, in an object's state."""
    rank = dist.get_rank()
    held = [list(range(rank)), tuple("abc"[:rank]), [[{"of": rank}]] * rank, [7] * (4 - rank)]
    holder = Holder(held)
    holdfast.save(uri, {"holder": holder})
    holder.held = None
    holdfast.load(uri, into={"holder": holder})
    return [] if holder.held == held else [holder.held, held]


def repeated(uri: str, saves: int) -> list[int]:
    """Save and load again and again; return how many keys the job's store has after each."""
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for step in range(saves):
        holdfast.save(
            uri,
            {
                "step": step,
                "x": torch.full((10,), float(step)),
                "own": torch.tensor(dist.get_rank()),
            },
        )
        holdfast.load(uri, into={"step": 0, "x": torch.zeros(10), "own": torch.tensor(0)})
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts
