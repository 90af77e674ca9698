"""The ranks of a call, as torch.distributed knows them: a team over its store. No collective is
used; a process group only says which ranks take part, and how they are numbered."""

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

from ...core.forks.groups import is_inherited
from ...core.forks.renewal import new_lock
from ...errors import UsageError
from ..runtime.engine import start
from .calls import Call
from .keys import Keys, StoreLike
from .member import Member
from .store_team import StoreTeam
from .team import Solo, Team

__all__ = [
    "Contact",
    "Group",
    "acting_in",
    "acting_name",
    "check_group",
    "contact_of",
    "current_member",
    "current_numbers",
    "current_rank",
    "current_team",
    "current_world",
    "store_host",
]

Group: TypeAlias = 'dist.ProcessGroup | Literal["self"] | None'
"""Which ranks take part in a call: those of a process group; ``"self"``: this process alone, as in
MPI's COMM_SELF; None: those of the default process group."""

_acting: ContextVar[Group] = ContextVar("holdfast_process_group", default=None)


@contextlib.contextmanager
def acting_in(group: Group) -> Iterator[None]:
    """In the body, this thread acts as a rank of ``group``. Raises as :func:`check_group`."""
    check_group(group)
    token = _acting.set(group)
    try:
        yield
    finally:
        _acting.reset(token)


def check_group(group: Group) -> None:
    """Raise UsageError for what is no process group, and in a process that is not in it."""
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
    """The process group that this thread acts in; None where this process is alone."""
    group = _acting.get()
    if group == "self" or not _in_use():
        return None
    if group is None:
        return dist.distributed_c10d._get_default_group()
    return group


def current_rank() -> int:
    """This process's rank; 0 where it is alone."""
    group = _group()
    if group is None:
        return 0
    return dist.get_rank(group)


def current_world() -> int:
    """How many ranks take part; 1 where this process is alone."""
    group = _group()
    if group is None:
        return 1
    return dist.get_world_size(group)


def acting_name() -> str | None:
    """Names the group that this thread acts in; None for the default process group."""
    group = _acting.get()
    if group is None or group == "self":
        return group
    return str(group.group_name)


def current_numbers() -> Mapping[int, int] | None:
    """The rank that each rank of the job has among those that take part, by its rank in the job;
    None where these are the same."""
    if _acting.get() is None:
        return None
    group = _group()
    if group is None:
        return {dist.get_rank(): 0}
    ranks = dist.get_process_group_ranks(group)
    return {rank: number for number, rank in enumerate(ranks)}


def current_team(call: Call, deadline_s: float, *, saving: bool) -> Team:
    """A new team of the ranks that take part in ``call``.

    Does not wait. Raises UsageError for a save in a launcher's process that has not joined its
    process group: it would save over the other ranks. Raises UsageError in a forked child of a
    rank: its call would be taken for that rank's.
    """
    group = _group()
    if group is None:
        if _acting.get() == "self":
            return Solo()
        if saving and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            raise UsageError(
                f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, "
                "but torch.distributed is not initialised",
                advice="Call torch.distributed.init_process_group first, or unset WORLD_SIZE.",
            )
        return Solo()
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if world == 1:
        return Solo()
    _check_rank(f"the {call}")
    contact = contact_of(group, deadline_s)
    return StoreTeam(contact.store, rank, world, "", deadline_s, call, contact.member)


def current_member(deadline_s: float) -> Member | None:
    """This process as one of the ranks that take part; None for a process that is alone. Does not
    wait. Raises UsageError in a forked child of a rank."""
    group = _group()
    if group is None or dist.get_world_size(group) == 1:
        return None
    _check_rank("this call")
    return contact_of(group, deadline_s).member


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
    if not _in_use():
        return ""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


@dataclass(frozen=True, slots=True)
class Contact:
    """This process among the ranks of a process group: until it is forked, or the group is gone."""

    pid: int
    group: weakref.ref[dist.ProcessGroup]
    store: StoreLike
    member: Member

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether it is that of this process in ``group``."""
        return self.pid == os.getpid() and self.group() is group

    @property
    def ended(self) -> bool:
        """Whether it is of no use any more."""
        return self.pid != os.getpid() or self.group() is None


_contacts: dict[str, Contact] = {}
"""By the name of the process group."""
_contact_lock = new_lock()


def contact_of(group: dist.ProcessGroup, deadline_s: float) -> Contact:
    """That of ``group``. A process group that was made anew begins anew, also over the same store.

    Its connection is our own, where the store has such: no call of the trainer's ever waits for one
    of ours. It is made once, since torch asks name servers for it, which takes seconds where they
    do not answer. A forked child would share its parent's socket, so it makes one for itself.
    Nothing here keeps the group's store alive: after a process group was destroyed, the next one
    has a server of its own.
    """
    with _contact_lock:
        for name in [name for name, contact in _contacts.items() if contact.ended]:
            del _contacts[name]
        name = str(group.group_name)
        contact = _contacts.get(name)
        if contact is None or not contact.serves(group):
            contact = _contacts[name] = _new_contact(group)
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
    return Contact(os.getpid(), weakref.ref(group), connection, member)


def _prefix(group: dist.ProcessGroup, world: int) -> str:
    """What torch's launcher, the size of the group and its name say of its generation. Nonces tell
    the rest apart."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"holdfast/{restarts}/{world}"
    if group is dist.distributed_c10d._get_default_group():
        return prefix
    return f"{prefix}/{group.group_name}"


def _in_use() -> bool:
    return dist.is_available() and dist.is_initialized()
