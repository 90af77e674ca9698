"""Memory that CUDA knows: a device copies to and from it directly, and beside everything else,
where other memory takes a detour through the driver's own."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...core.forks.renewal import new_lock
from ..arenas.memory import Memory

__all__ = ["Cuda", "pin"]

_PORTABLE = 1
"""cudaHostRegisterPortable: for all devices of the process."""

_log = logging.getLogger(__name__)
_lock = new_lock()
_has_warned = False


@dataclass(frozen=True)
class Cuda:
    """CUDA's runtime, as torch has it, and a device that this process uses already: a call on any
    other one would make a context there, which takes half a gigabyte of that device. -1: whichever
    is the thread's."""

    runtime: Any
    device: int = -1

    def register(self, address: int, nbytes: int) -> int:
        """The error, 0 for none. In a thread that ends then: CUDA remembers an error of a thread,
        and torch would raise it from the next copy there."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._register, address, nbytes).result()

    def _register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self.device):
            return int(self.runtime.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """The error, 0 for none."""
        with torch.cuda.device(self.device):
            return int(self.runtime.cudaHostUnregister(address))


def pin(memory: Memory, cuda: Cuda | None = None) -> bool:
    """Register ``memory`` with CUDA until it is unmapped; whether that is so. Blocks until all of
    it is locked. Copies are only slower without, so a failure is no error: it is logged, once.

    ``cuda``: None for that of this process; then nothing is done where it does not use any.
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
    """CUDA, with a device that this process has memory of."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):
            return Cuda(torch.cuda.cudart(), device)  # type: ignore[no-untyped-call]
    return None


def _unpin(cuda: Cuda, address: int) -> None:
    try:
        code = cuda.unregister(address)
    except Exception as error:  # within a finalizer, where CUDA may have ended already
        _log.debug("memory of a keeper stays registered with CUDA: %s", error)
        return
    if code != 0:
        _log.debug("cudaHostUnregister has returned %d", code)


def _warn(problem: str) -> None:
    """Once per process: the next slot would fail likewise."""
    global _has_warned  # noqa: PLW0603
    with _lock:
        has_warned = _has_warned
        _has_warned = True
    if not has_warned:
        _log.warning(
            "memory of a keeper is not registered with CUDA, so copies to it are slower: %s",
            problem,
        )
