"""System calls that change a file system, seen just before they are made. Of this process, by its
own hand."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

SYSTEM_CALLS = (
    "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite", "pwritev", "rename", "replace", "rmdir", "unlink", "write",
)  # fmt: skip

COMMIT = "rename manifest.safetensors"
"""The label of the call that makes a checkpoint visible."""


@contextlib.contextmanager
def tapped(before: Callable[[int, str], None]) -> Iterator[None]:
    """``before(n, label)`` is called before the n-th of them, counted from 1; by one thread at a
    time. ``label`` is the name of the call and what it acts on: "rename manifest.safetensors". What
    it raises, the call raises."""
    count, busy, lock = 0, False, threading.RLock()
    real = {name: getattr(os, name) for name in SYSTEM_CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, busy
            with lock:
                if not busy:  # else ``before`` makes it
                    count, busy = count + 1, True
                    try:
                        before(count, f"{name} {_target(name, args)}")
                    finally:
                        busy = False
            return real[name](*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _target(name: str, args: tuple[Any, ...]) -> str:
    what = args[1] if name in ("link", "rename", "replace") else args[0]
    if isinstance(what, int):
        what = os.readlink(f"/proc/self/fd/{what}")
    return os.path.basename(os.fspath(what))
