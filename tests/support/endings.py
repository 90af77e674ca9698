"""Jobs started as other launchers than torchrun do, where rank 0's process serves the store. What
each rank does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    """Arguments: what to do, rank, world, port, folder."""
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
    """Rank 0 ends without a word as soon as its save returns."""
    holdfast.save(folder / "c", {"own": torch.full((1000,), float(rank))})
    if rank == 0:
        os._exit(0)
    (folder / str(rank)).write_text("saved")


def leave_after_load(rank: int, world: int, folder: Path) -> None:
    """The last line of the program is a load."""
    state = {"own": torch.full((1000,), float(rank))}
    holdfast.save(folder / "c", state)
    holdfast.load(folder / "c", into=state)
    if rank:
        (folder / str(rank)).write_text("saved")


def made_anew(rank: int, world: int, folder: Path) -> None:
    """The process group is destroyed and made anew within the process, over a store that outlives
    it, and then smaller."""
    state = {"own": torch.full((1000,), float(rank))}
    holdfast.save(folder / "c", state, deadline_s=20)
    server = _store_apart(rank)
    for turn in range(3):
        dist.destroy_process_group()
        size = world if turn < 2 else world - 1
        if rank >= size:
            break
        if rank == turn % 2:
            time.sleep(0.3)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"turn {turn}", server), rank=rank, world_size=size
        )
        holdfast.load(folder / "c", into={"own": torch.zeros(1000)}, strict=False, deadline_s=20)
        holdfast.save(folder / "c", state, deadline_s=20)
    if rank == world - 1:
        (folder / str(rank)).write_text("saved")
        return
    dist.barrier()
    if rank:
        (folder / str(rank)).write_text("saved")


def _store_apart(rank: int) -> dist.TCPStore:
    """A store beside that of the job, which rank 0 serves at a port that the system chooses: any
    other may be taken by then."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port[0] = server.port
    dist.broadcast(port, 0)
    if rank:
        server = dist.TCPStore("127.0.0.1", int(port), None, False, wait_for_workers=False)
    return server


if __name__ == "__main__":
    main()
