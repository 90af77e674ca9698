"""Ranks of jobs that other launchers than torchrun start: rank 0's process serves the store."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    """Run one rank. Arguments: the task, rank, world, port, folder."""
    what, rank, world, port, folder = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        Path(sys.argv[5]),
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    globals()[what](rank, world, folder)


def cut_after_save(rank: int, world: int, folder: Path) -> None:
    """End rank 0 without a word as soon as its save returns."""
    holdfast.save(folder / "c", {"own": torch.full((1000,), float(rank))})
    if rank == 0:
        os._exit(0)
    (folder / str(rank)).write_text("saved")


def leave_after_load(rank: int, world: int, folder: Path) -> None:
    """End the program with a load."""
    state = {"own": torch.full((1000,), float(rank))}
    holdfast.save(folder / "c", state)
    holdfast.load(folder / "c", into=state)
    if rank:
        (folder / str(rank)).write_text("saved")


if __name__ == "__main__":
    main()
