"""Tasks for rank processes: random states, and what goes wrong."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast
from holdfast.drivers.local.driver import LocalDriver

from .jobs import sharded, train


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


def save_with(uri: str, overrides: dict[int, Any]) -> Any:
    """Save, with other states on some ranks; return the time, or raise with it in ``took_s``."""
    state = overrides.get(dist.get_rank(), {"x": torch.arange(100.0), "y": 1})
    return _timed(lambda: holdfast.save(uri, state() if callable(state) else state, deadline_s=30))


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


def partial_loads(uri: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load on each rank one stored name of its own and one that was not stored.

    Return the missing and unexpected names in the report.
    """
    rank = dist.get_rank()
    holdfast.save(uri, {"all": torch.ones(3), f"of{rank}": torch.ones(2), "extra": 1})
    into = {"all": torch.zeros(3), f"of{rank}": torch.zeros(2), f"new{rank}": torch.zeros(2)}
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, strict=False, on_report=reports.append)
    return reports[0].missing, reports[0].unexpected
