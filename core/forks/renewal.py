"""Makes forked children safe: releases their locks, and resets unfinished work of the parent.

A fork copies the memory of a process, but only the forking thread. A lock that another thread holds
at that moment stays held in the child forever, and so does the lock of a module that another thread
is importing. Therefore:

- Every lock of Holdfast comes from :func:`new_lock` or :func:`new_rlock`: in a child all are free.
- Resources that a child must not use (the engine's loop, saves in flight, pools) register a
  function with :func:`in_child` that resets them to their initial state.
- A fork waits until no other thread is importing anything, for :data:`IMPORTS_S` seconds at most.

A child is not a rank of its parent's job either, although it inherits the process group of
torch.distributed (:func:`is_inherited`). That group exists only if torch was imported.

Scope: other libraries have to release their own locks.
"""

from __future__ import annotations

import _imp
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

IMPORTS_S = 30.0
"""Longest time that a fork waits for imports of other threads. Importing torch takes seconds."""
_LOOK_S = 0.001

# Reset in place, so that references to a lock stay valid. Weak: most belong to short-lived objects.
_locks: dict[int, weakref.ref[Any]] = {}
_renewals: list[Callable[[], None]] = []
_holding = threading.local()


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, even if a thread held it at the fork.

    The data it guards may be half changed there: the child must not use it, or must reset it with
    :func:`in_child`.
    """
    made = threading.Lock()
    _register(made)
    return made


def new_rlock() -> threading.RLock:
    """Return a reentrant lock, otherwise like :func:`new_lock`."""
    made = threading.RLock()
    _register(made)
    return made


def in_child(renew: Callable[[], None]) -> None:
    """Register ``renew`` to be called in every forked child, once all locks are free.

    It stays registered for the life of the process, so this is for modules, not for objects.
    Functions run in order of registration: modules after those they import.
    """
    _renewals.append(renew)


def _register(made: object) -> None:
    number = id(made)
    _locks[number] = weakref.ref(made, lambda _: _locks.pop(number, None))


def _before() -> None:
    """Take the import lock at a moment when no other thread is importing."""
    _holding.imports = False
    until_s = time.monotonic() + IMPORTS_S
    while True:
        _imp.acquire_lock()
        _holding.imports = True
        if not _others_import():
            return
        _holding.imports = False
        _imp.release_lock()
        if time.monotonic() > until_s:
            return  # they may be waiting for this thread
        time.sleep(_LOOK_S)


def _others_import() -> bool:
    """Return whether another thread holds the lock of a module."""
    me = threading.get_ident()
    bootstrap: Any = importlib._bootstrap
    for reference in list(getattr(bootstrap, "_module_locks", {}).values()):
        owner = getattr(reference(), "owner", None)
        if owner is not None and owner != me:
            return True
    return False


def _after() -> None:
    if _holding.imports:
        _imp.release_lock()


def _after_in_child() -> None:
    _after()
    for reference in list(_locks.values()):
        held = reference()
        if held is not None:
            held._at_fork_reinit()
    for renew in _renewals:
        renew()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)


_inherited: weakref.ref[Any] | None = None


def is_inherited(group: object) -> bool:
    """Return whether this process inherited ``group`` from its parent, and is not a rank of it."""
    return _inherited is not None and _inherited() is group


def _note() -> None:
    global _inherited  # noqa: PLW0603 - one for the process
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    member = getattr(distributed, "GroupMember", None)
    group = getattr(member, "WORLD", None)
    if group is not None:
        _inherited = weakref.ref(group)


in_child(_note)
