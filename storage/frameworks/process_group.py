"""The job's ranks, as torch.distributed knows them: a team over its store. No collective, no process group is used."""

from __future__ import annotations

import datetime
import os
from typing import Any, cast

import torch.distributed as dist

from ...errors import UsageError
from ..ranks.team import Solo, StoreLike, StoreTeam, Team

__all__ = ["current_rank", "current_team", "current_world", "shared_store", "store_host"]


def current_rank() -> int:
    """This process's rank; 0 where torch.distributed is not in use."""
    return dist.get_rank() if _in_use() else 0


def current_world() -> int:
    """How many ranks the job has; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if _in_use() else 1


def current_team(deadline_s: float, *, saving: bool) -> Team:
    """A new team of all ranks of the default process group; of one, where there is none.

    Every rank calls this as often as the others: that is how they find each other. Raises UsageError for a save in a
    launcher's process that has not joined its process group: it would save over the other ranks.
    """
    if not _in_use():
        if saving and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            raise UsageError(
                f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, "
                "but torch.distributed is not initialised",
                advice="Call torch.distributed.init_process_group first, or unset WORLD_SIZE.",
            )
        return Solo()
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return Solo()
    store = dist.distributed_c10d._get_default_store()
    # How many teams this rank has had since the store was made: counted in the store, so that all ranks count alike.
    call = store.add(f"holdfast/calls/{rank}", 1)
    return StoreTeam(_connection(store, deadline_s), rank, world, f"holdfast/{call}", deadline_s)


def shared_store(deadline_s: float) -> tuple[StoreLike, int, int, str] | None:
    """The job's store, this rank, how many there are, and a prefix for keys that all ranks share and nobody else uses;
    None for a process that is alone. Every rank calls this as often as the others."""
    if current_world() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    call = store.add(f"holdfast/shared/{dist.get_rank()}", 1)
    return _connection(store, deadline_s), dist.get_rank(), dist.get_world_size(), f"holdfast/shared/{call}"


def store_host() -> str:
    """The host that serves the job's store over TCP; "" where there is none."""
    store: Any = dist.distributed_c10d._get_default_store() if _in_use() else None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


_ours: tuple[Any, int, Any] | None = None
"""The job's store, the process, and our connection to it."""


def _connection(store: Any, deadline_s: float) -> StoreLike:
    """A connection of our own, where the store has such: no call of the trainer's ever waits for one of ours.

    Made once, since torch asks name servers for it, which takes seconds where they do not answer.
    """
    global _ours  # noqa: PLW0603 - one for the process
    if not hasattr(store, "clone"):
        return cast(StoreLike, store)
    if _ours is None or _ours[0] is not store or _ours[1] != os.getpid():  # a forked child shares its parent's socket
        _ours = (store, os.getpid(), store.clone())
    _ours[2].set_timeout(datetime.timedelta(seconds=max(1.0, deadline_s)))
    return cast(StoreLike, _ours[2])


def _in_use() -> bool:
    return dist.is_available() and dist.is_initialized()
