"""Memory for images that a saver writes, kept between saves: fresh memory costs a page fault per
page."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...core.forks.renewal import in_child, new_lock
from ..arenas.memory import RESERVE_NBYTES, Memory, available_nbytes, sealed_memory
from .promises import promise

_FIT = 1.25
"""Memory that is up to this much larger than an image is used for it."""

_log = logging.getLogger(__name__)
_free: list[Memory] = []
_lock = new_lock()
_warned = False


def take_memory(nbytes: int, mapped: Callable[[Memory], object]) -> Memory | None:
    """Return memory for an image of ``nbytes``, or None, with a warning, if there is not enough.
    ``mapped`` is called with fresh memory. Once it is populated, call
    :func:`.promises.keep_promise`. Blocks."""
    with _lock:
        fitting = [memory for memory in _free if nbytes <= memory.nbytes <= _FIT * nbytes]
        if fitting:
            _free.remove(fitting[0])
            return fitting[0]
    release_memory()  # it is of a former size
    try:
        promise(nbytes, lambda: available_nbytes() - RESERVE_NBYTES)
        memory = Memory(sealed_memory(nbytes), nbytes)
    except (OSError, MemoryError) as error:
        _warn_once(f"an image of {nbytes:,} bytes", str(error))
        return None
    mapped(memory)
    return memory


def _warn_once(image: str, problem: str) -> None:
    global _warned  # noqa: PLW0603
    level = logging.DEBUG if _warned else logging.WARNING
    _warned = True
    _log.log(
        level,
        "%s is copied as fast as the storage takes it, for want of memory: %s",
        image,
        problem,
    )


def give_memory(memory: Memory) -> None:
    """Keep ``memory``, which nobody uses any more, for the next image."""
    with _lock:
        if _free:
            memory.close()
        else:
            _free.append(memory)


def release_memory() -> None:
    """Return all unused memory to the system."""
    with _lock:
        for memory in _free:
            memory.close()
        _free.clear()


_of_parents: list[Memory] = []


def _leave_to_parent() -> None:
    """Drop all memory in a forked child, which does not inherit the mappings; without unregistering
    it from CUDA, whose errors in a forked child end the process."""
    _of_parents.extend(_free)
    _free.clear()


in_child(_leave_to_parent)
