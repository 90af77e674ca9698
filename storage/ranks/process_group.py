"""The ranks of a call according to torch.distributed, as a team over its store. No collective is
used; a process group only defines which ranks take part, and their numbers."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist

from ...core.forks.renewal import is_inherited, new_lock
from ...errors import UsageError
from ..runtime.engine import start
from .calls import Call
from .keys import Keys, StoreLike
from .member import Member
from .store_team import StoreTeam
from .team import Team

Group: TypeAlias = 'dist.ProcessGroup | Literal["self"] | None'
"""The ranks that take part in a call: a process group; ``"self"``, this process alone, like MPI's
COMM_SELF; or None, the default process group.
"""

_acting: ContextVar[Group] = ContextVar("holdfast_process_group", default=None)


@contextlib.contextmanager
def acting_in(group: Group) -> Iterator[None]:
    """Make this thread act as a rank of ``group`` in the body. Raises as :func:`check_group`."""
    check_group(group)
    token = _acting.set(group)
    try:
        yield
    finally:
        _acting.reset(token)


def check_group(group: Group) -> None:
    """Raise UsageError for an invalid process group, or one without this process."""
    if group is None or group == "self":
        return
    advice = 'Give a process group that this process is in, "self", or None for all ranks.'
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this process is not in the process group", advice=advice)
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"process_group is a {type(group).__name__}", advice=advice)
    if not _in_use():
        raise UsageError("torch.distributed is not initialised", advice=advice)
    if dist.get_rank(group) < 0:
        raise UsageError("this process is not in the process group", advice=advice)


def _group() -> dist.ProcessGroup | None:
    group = _acting.get()
    if group == "self" or not _in_use():
        return None
    if group is None:
        return dist.distributed_c10d._get_default_group()
    return group


def current_rank() -> int:
    """Return this process's rank; 0 if it is alone."""
    group = _group()
    return 0 if group is None else dist.get_rank(group)


def current_world() -> int:
    """Return the number of ranks that take part; 1 if this process is alone."""
    group = _group()
    return 1 if group is None else dist.get_world_size(group)


def acting_name() -> str | None:
    """Return the name of the group that this thread acts in; None for the default process group."""
    group = _acting.get()
    if group is None or group == "self":
        return group
    return str(group.group_name)


def current_numbers() -> Mapping[int, int] | None:
    """Return the mapping from the job's ranks to the acting group's; None if equal."""
    if _acting.get() is None:
        return None
    group = _group()
    if group is None:
        return {dist.get_rank(): 0}
    ranks = dist.get_process_group_ranks(group)
    return {rank: number for number, rank in enumerate(ranks)}


def current_team(call: Call, deadline_s: float, *, saving: bool) -> Team:
    """Create a team of the ranks that take part in ``call``. Does not wait.

    Raises UsageError for a save in a launched process that has not joined its process group,
    because it would overwrite the saves of other ranks; and in a forked child of a rank, because
    its call would be mistaken for its parent's.
    """
    group = _group()
    if group is None:
        if _acting.get() == "self":
            return Team()
        if saving and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            raise UsageError(
                f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, "
                "but torch.distributed is not initialised",
                advice="Call torch.distributed.init_process_group first, or unset WORLD_SIZE.",
            )
        return Team()
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if world == 1:
        return Team()
    _check_rank(f"the {call}")
    contact = contact_of(group, deadline_s)
    return StoreTeam(contact.store, rank, world, "", deadline_s, call, contact.member)


def current_member(deadline_s: float) -> Member | None:
    """Return this process as one of the ranks that take part; None if it is alone. Does not wait.
    Raises UsageError in a forked child of a rank."""
    group = _group()
    if group is None or dist.get_world_size(group) == 1:
        return None
    _check_rank("this call")
    return contact_of(group, deadline_s).member


def _check_rank(what: str) -> None:
    """Raise UsageError if this process inherited its process group through a fork."""
    group = dist.distributed_c10d._get_default_group()
    data = sys.modules.get("torch.utils.data")  # a worker may be the first to import Holdfast
    if not is_inherited(group) and (data is None or data.get_worker_info() is None):
        return
    raise UsageError(
        f"{what} involves all ranks, and this process is not rank {dist.get_rank()} but was "
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
    """Return the host that serves the job's store over TCP; "" for other stores."""
    if not _in_use():
        return ""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


@dataclass(frozen=True, slots=True)
class Contact:
    """The membership of the process ``pid`` in a process group."""

    pid: int
    store: StoreLike
    member: Member


_contacts: weakref.WeakKeyDictionary[dist.ProcessGroup, Contact] = weakref.WeakKeyDictionary()
_contact_lock = new_lock()


def contact_of(group: dist.ProcessGroup, deadline_s: float) -> Contact:
    """Return the contact of ``group``. A process group that is re-created gets a new one.

    It has its own connection if the store supports that, so that the trainer's calls never wait for
    ours. It is created only once, because torch asks name servers for it, which takes seconds if
    they do not answer. A forked child would share its parent's socket, so it creates its own.
    Nothing here keeps the group's store alive: once a process group is destroyed, the next one
    starts its own server.
    """
    with _contact_lock:
        contact = _contacts.get(group)
        if contact is None or contact.pid != os.getpid():
            contact = _contacts[group] = _new_contact(group)
        if hasattr(contact.store, "set_timeout"):
            contact.store.set_timeout(datetime.timedelta(seconds=max(1.0, deadline_s)))
        return contact


def _new_contact(group: dist.ProcessGroup) -> Contact:
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        connection = store.clone()
    else:
        connection = store
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    keys = Keys(connection, _prefix(group, world))
    member = Member(keys, rank, world, start, weakref.ref(store), store_host())
    return Contact(os.getpid(), connection, member)


def _prefix(group: dist.ProcessGroup, world: int) -> str:
    """Return a prefix from torch's restart count, and the group's size and name."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"holdfast/{restarts}/{world}"
    if group is dist.distributed_c10d._get_default_group():
        return prefix
    return f"{prefix}/{group.group_name}"


def _in_use() -> bool:
    return dist.is_available() and dist.is_initialized()
