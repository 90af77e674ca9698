"""Registers a keeper's memory with CUDA, so that devices copy to and from it directly.

Copies to other memory go through a buffer of the driver, and block other work.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..arenas.memory import Memory

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cuda:
    """CUDA's runtime as torch exposes it, and a device that this process already uses.

    A call on any other device would create a context there, which takes half a gigabyte of its
    memory. -1 stands for the thread's current device.
    """

    runtime: Any
    device: int = -1

    def register(self, address: int, nbytes: int) -> int:
        """Register the memory and return the error code, 0 for success.

        Runs in a short-lived thread: CUDA remembers the errors of a thread, and torch would raise
        this one from the thread's next copy.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._register, address, nbytes).result()

    def _register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self.device):
            return int(self.runtime.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Unregister the memory and return the error code, 0 for success."""
        with torch.cuda.device(self.device):
            return int(self.runtime.cudaHostUnregister(address))


def pin(memory: Memory, cuda: Cuda | None = None) -> bool:
    """Register ``memory`` with CUDA until it is unmapped; return whether that succeeded.

    Blocks until all of it is locked. A failure only makes copies slower, so it is logged once
    rather than raised. ``cuda``: None for this process's own; then nothing happens unless CUDA is
    in use.
    """
    cuda = cuda or _in_use()
    if cuda is None:
        return False
    try:
        code = cuda.register(memory.address, memory.nbytes)
    except (RuntimeError, AttributeError) as error:
        _warn(str(error))
        return False
    if code != 0:
        _warn(f"cudaHostRegister has returned {code}")
        return False
    memory.before_unmapping = partial(_unpin, cuda, memory.address)
    return True


def _in_use() -> Cuda | None:
    """Return CUDA with a device that holds memory of this process, or None."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):
            return Cuda(torch.cuda.cudart(), device)  # type: ignore[no-untyped-call]
    return None


def _unpin(cuda: Cuda, address: int) -> None:
    try:
        code = cuda.unregister(address)
    except Exception as error:  # runs in a finalizer, when CUDA may have shut down already
        _log.debug("memory of a keeper stays registered with CUDA: %s", error)
        return
    if code != 0:
        _log.debug("cudaHostUnregister has returned %d", code)


@functools.cache
def _warn(problem: str) -> None:
    """Log the problem once per process: every further slot would fail likewise."""
    _log.warning(
        "memory of a keeper is not registered with CUDA, so copies to it are slower: %s", problem
    )
