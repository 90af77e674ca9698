"""Tasks for rank processes: training runs with a Checkpointer."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast


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
    """Saves by time, on ranks that run at their own pace."""
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
    """Ranks run at their own pace, and get SIGTERM in different steps; where each ended."""
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
