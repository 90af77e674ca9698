"""A job whose second rank dies in its first life. Argument: a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import holdfast


def main() -> None:
    """Run on every rank."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Use no backend that connects ranks: a restarted gloo may find addresses of dead ranks in this
    # store.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    state = {"w": torch.arange(5.0), "own": torch.tensor(rank)}
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        holdfast.save(folder / "good", state, step=1)
        if rank == 1:
            time.sleep(0.5)
            os._exit(1)
        holdfast.save(folder / "second", state, step=2, deadline_s=8)
    into = {"w": torch.zeros(5), "own": torch.tensor(-1)}
    holdfast.load(folder / "good", into=into, deadline_s=20)
    holdfast.save(folder / "second", state, step=2, deadline_s=20)
    if torch.equal(into["w"], state["w"]) and into["own"] == rank:
        (folder / f"good {rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
