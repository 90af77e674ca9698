"""The job's ranks, as torch.distributed knows them: a team over its store. No collective, no
process group is used."""

from __future__ import annotations

import datetime
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...core.forks.groups import is_inherited
from ...core.forks.renewal import new_lock
from ...errors import UsageError
from ..runtime.engine import start
from .calls import Call
from .keys import Keys, StoreLike
from .member import Member
from .store_team import StoreTeam
from .team import Solo, Team

__all__ = ["current_member", "current_rank", "current_team", "current_world", "store_host"]


def current_rank() -> int:
    """This process's rank; 0 where torch.distributed is not in use."""
    if _in_use():
        return dist.get_rank()
    return 0


def current_world() -> int:
    """How many ranks the job has; 1 where torch.distributed is not in use."""
    if _in_use():
        return dist.get_world_size()
    return 1


def current_team(call: Call, deadline_s: float, *, saving: bool) -> Team:
    """A new team of all ranks of the default process group, for ``call``; of one, where there is
    none.

    Does not wait. Raises UsageError for a save in a launcher's process that has not joined its
    process group: it would save over the other ranks. Raises UsageError in a forked child of a
    rank: its call would be taken for that rank's.
    """
    if not _in_use():
        if saving and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            raise UsageError(
                f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, "
                "but torch.distributed is not initialised",
                advice="Call torch.distributed.init_process_group first, or unset WORLD_SIZE.",
            )
        return Solo()
    rank = dist.get_rank()
    world = dist.get_world_size()
    if world == 1:
        return Solo()
    _check_rank(f"the {call}")
    contact = _contact(deadline_s)
    return StoreTeam(contact.store, rank, world, "", deadline_s, call, contact.member)


def current_member(deadline_s: float) -> Member | None:
    """This process as a rank of its job; None for a process that is alone. Does not wait. Raises
    UsageError in a forked child of a rank."""
    if current_world() == 1:
        return None
    _check_rank("this call")
    return _contact(deadline_s).member


def _check_rank(what: str) -> None:
    """Raise UsageError in a process that has its process group from the one that forked it."""
    group = dist.distributed_c10d._get_default_group()
    data = sys.modules.get("torch.utils.data")  # a worker may be the first to import Holdfast
    if not is_inherited(group) and (data is None or data.get_worker_info() is None):
        return
    raise UsageError(
        f"{what} is one of all ranks, and this process is not rank {dist.get_rank()} but was "
        f"forked from it",
        rank=dist.get_rank(),
        advice=(
            "Save, and load into a state, in the process that has joined the process group. Here, "
            "as in a worker of a data "
            "loader, holdfast.open(uri) and holdfast.load(uri) without into= read a checkpoint "
            "without the other ranks."
        ),
    )


def store_host() -> str:
    """The host that serves the job's store over TCP; "" where there is none."""
    if _in_use():
        store: Any = dist.distributed_c10d._get_default_store()
    else:
        store = None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


@dataclass(frozen=True, slots=True)
class _Contact:
    """This process in its job: until it is forked, or another process group takes the place of this
    one."""

    pid: int
    group: weakref.ref[Any]
    store: StoreLike
    member: Member


_ours: _Contact | None = None
_contact_lock = new_lock()


def _contact(deadline_s: float) -> _Contact:
    """That of the default process group. A process group that was made anew begins anew, also over
    the same store.

    Its connection is our own, where the store has such: no call of the trainer's ever waits for one
    of ours. It is made once, since torch asks name servers for it, which takes seconds where they
    do not answer. A forked child would share its parent's socket, so it makes one for itself.
    Nothing here keeps the group's store alive: after a process group was destroyed, the next one
    has a server of its own.
    """
    global _ours  # noqa: PLW0603 - one for the process
    with _contact_lock:
        group = dist.distributed_c10d._get_default_group()
        if _ours is None or _ours.pid != os.getpid() or _ours.group() is not group:
            store: Any = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):
                connection = store.clone()
            else:
                connection = store
            rank = dist.get_rank()
            world = dist.get_world_size()
            member = Member(
                Keys(connection, _prefix(world)), rank, world, start, weakref.ref(store)
            )
            _ours = _Contact(os.getpid(), weakref.ref(group), connection, member)
        if hasattr(_ours.store, "set_timeout"):
            _ours.store.set_timeout(datetime.timedelta(seconds=max(1.0, deadline_s)))
        return _ours


def _prefix(world: int) -> str:
    """What torch's launcher and the size of the job say of its generation. Nonces tell the rest
    apart."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"holdfast/{restarts}/{world}"


def _in_use() -> bool:
    return dist.is_available() and dist.is_initialized()
