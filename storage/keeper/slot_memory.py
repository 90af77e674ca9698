"""Owns the memory of a keeper's slots, the labels of the images in them, and the state machine that
decides about both."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ...errors import DamagedError
from ..arenas.label import LABEL_NBYTES_MAX, GenerationId, Label
from ..arenas.memory import (
    RESERVE_NBYTES,
    Memory,
    available_nbytes,
    check_sealed,
    read_sealed,
    reserved_memory,
    sealed_bytes,
)
from ..runtime.engine import offload
from .decisions.generations import Generations
from .decisions.slots import Refusal
from .sealing import is_sealed
from .tiers import LocalImage

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PooledSlot:
    """Memory of a slot, and its label once the image in it is complete."""

    memory: Memory
    label: Label | None = None
    label_fd: int = -1

    @classmethod
    async def sealed(cls, label: Label, memory: Memory) -> PooledSlot:
        """Return the slot of a complete image."""
        return cls(memory, label, sealed_bytes(await offload(label.encode)))

    @classmethod
    def of_descriptors(cls, fds: Sequence[int], run: str) -> PooledSlot:
        """Return a complete image of ``run``, given its memory and its label in any order; takes
        ownership of them. On failure, closes them and raises OSError, ValueError, DamagedError."""
        left = list(fds)
        try:
            if len(fds) != 2:
                raise ValueError(f"{len(fds)} descriptors instead of two")
            label_fd, memory_fd = sorted(fds, key=_is_changeable)
            label = Label.decode(read_sealed(label_fd, LABEL_NBYTES_MAX))
            if label.run != run:
                raise ValueError(f"it is of the run {label.run}")
            check_sealed(memory_fd, label.nbytes)
            left.remove(memory_fd)
            memory = Memory(memory_fd, label.nbytes)
            left.remove(label_fd)
        finally:
            for fd in left:
                os.close(fd)
        return cls(memory, label, label_fd)

    async def is_whole(self) -> bool:
        """Check the image and its label against their checksums. Reads the whole image, in
        threads."""
        try:
            label = Label.decode(read_sealed(self.label_fd, LABEL_NBYTES_MAX))
        except (DamagedError, OSError):
            return False
        return label == self.label and await is_sealed(self.memory, label)

    async def mend(self, intact: PooledSlot) -> None:
        """Repair the image in place from ``intact``, and close that. Concurrent readers are safe:
        only damaged bytes change."""
        try:
            await offload(self._copy, intact.memory)
        except BaseException:
            intact.close()
            raise
        self.unlabel()
        self.label, self.label_fd = intact.label, intact.label_fd
        intact.memory.close()

    def _copy(self, memory: Memory) -> None:
        self.memory.view[:] = memory.view

    def unlabel(self) -> None:
        """Remove the label: the memory no longer holds an image."""
        self.label = None
        if self.label_fd >= 0:
            os.close(self.label_fd)
            self.label_fd = -1

    def close(self) -> None:
        """Release the memory."""
        self.unlabel()
        self.memory.close()


class SlotPool:
    """The slots of a keeper, by number. ``given_nbytes``: the limit that the user has set for all
    of them; None: as much as the system can spare. For ``history`` and ``every``, see
    :class:`.options.KeeperOptions`."""

    def __init__(self, given_nbytes: int | None = None, history: int = 0, every: int = 1) -> None:
        """Raise OSError if the system does not tell how much memory is available."""
        self.generations = Generations(0)
        self.slots: dict[int, PooledSlot] = {}
        self.limit(given_nbytes, history, every)
        self._making_nbytes = 0
        """Memory being allocated now, which the system may not report as used yet."""

    @property
    def nbytes(self) -> int:
        """Size of all slots."""
        return sum(slot.memory.nbytes for slot in self.slots.values())

    def limit(self, given_nbytes: int | None, history: int, every: int) -> None:
        """Set the limits that the user gives. Images beyond smaller ones stay until their memory is
        reused. Raises OSError as the constructor does."""
        self.generations.history = history
        self.generations.every = every
        self._given_nbytes = given_nbytes
        spare_nbytes = max(0, available_nbytes() - RESERVE_NBYTES + self.nbytes)
        self.generations.budget_nbytes = min(spare_nbytes, given_nbytes or spare_nbytes)

    async def take_memory(self, slot: int, nbytes: int, node: int) -> str:
        """Allocate the memory of a slot, on this NUMA node if possible; -1: on any. Return "", or
        the reason why that failed."""
        self._making_nbytes += nbytes
        try:
            check_spare(self._making_nbytes)
            memory = await offload(partial(reserved_memory, nbytes, node=node))
        except OSError as error:
            self.generations.unmade(slot)
            return f"{nbytes:,} bytes are needed: {error.strerror or error}"
        finally:
            self._making_nbytes -= nbytes
        self.slots[slot] = PooledSlot(memory)
        self.generations.made(slot)
        return ""

    def recall(self, slot: PooledSlot, *, outlived: bool) -> bool:
        """Take over a complete image before any trainer connects. ``outlived``: its memory comes
        from the previous keeper, and other processes may still have it mapped. Return False, and
        close the slot, if there is no room."""
        label = slot.label
        assert label is not None
        of_image = label.generation, label.rank, label.world, label.nbytes
        take = partial(self.generations.recall, *of_image, outlived=outlived)
        number = self.in_use_already(label.nbytes, take) if outlived else take()
        if isinstance(number, Refusal):
            _log.warning("rank %d: %s", label.rank, number.text)
            slot.close()
            return False
        self.slots[number] = slot
        how = "left by the previous keeper" if outlived else "loaded from the local level"
        _log.info("step %d of rank %d was %s", label.generation.step, label.rank, how)
        return True

    def take_over(self, fds: Sequence[int], run: str, *, agreed: bool) -> PooledSlot | None:
        """Take over an image from the previous keeper, and ownership of its descriptors. Return its
        slot; None, with a warning, if it is no image of ``run`` or there is no room."""
        try:
            slot = PooledSlot.of_descriptors(fds, run)
        except (DamagedError, OSError, ValueError) as error:
            _log.warning("the previous keeper left no image of this run: %s", error)
            return None
        assert slot.label is not None
        if not self.recall(slot, outlived=True):
            return None
        if agreed:
            self.generations.was_agreed(slot.label.generation)
        return slot

    def held(self) -> list[tuple[PooledSlot, bool]]:
        """Return the slots with complete images that were not dropped, and whether each belongs to
        an agreed generation; those a restart needs most come first."""
        found = [
            (self.generations.is_restorable(slot.label.generation), slot.label.generation, slot)
            for number, slot in self.slots.items()
            if slot.label is not None and self.generations.holds(number, slot.label.generation)
        ]
        found.sort(key=lambda one: one[:2], reverse=True)
        return [(slot, agreed) for agreed, _, slot in found]

    async def add_rebuilt(
        self, label: Label, memory: Memory, damaged: PooledSlot | None
    ) -> Refusal | None:
        """Add a rebuilt image, in place of the ``damaged`` one if there is one. Return a refusal,
        and release the memory, if there is no room."""
        image = await PooledSlot.sealed(label, memory)
        if damaged is not None:
            await damaged.mend(image)
            return None
        # No await from here until it is held: the inventory must not list what cannot be read.
        number = self.generations.recall(
            label.generation, label.rank, label.world, label.nbytes, epoch=False
        )
        if isinstance(number, Refusal):
            image.close()
            return number
        self.slots[number] = image
        return None

    def in_use_already(self, nbytes: int, take: Callable[[], int | Refusal]) -> int | Refusal:
        """Return the slot that ``take()`` finds for memory of an earlier keeper. Extends the budget
        by its size, unless refused: that memory was in use already when the budget was derived."""
        before_nbytes = self.generations.budget_nbytes
        budget_nbytes = before_nbytes + nbytes
        self.generations.budget_nbytes = min(budget_nbytes, self._given_nbytes or budget_nbytes)
        number = take()
        if isinstance(number, Refusal):
            self.generations.budget_nbytes = before_nbytes
        return number

    @contextmanager
    def pinned(self, generation: GenerationId) -> Iterator[None]:
        """Keep the images of a generation from being overwritten during the body."""
        pin = self.generations.pin(generation)
        try:
            yield
        finally:
            self.generations.unpin(pin)

    def images(self, generation: GenerationId) -> list[LocalImage]:
        """Return the images of a generation, by rank. Excludes dropped images, even if their slots
        are not overwritten yet."""
        found = [
            LocalImage(slot.label, slot.memory)
            for number, slot in self.slots.items()
            if slot.label is not None and self.generations.holds(number, generation)
        ]
        return sorted(found, key=lambda image: image.label.rank)

    def slot_of(self, generation: GenerationId, rank: int) -> PooledSlot | None:
        """Find the slot that holds the image of a rank."""
        for number, slot in self.slots.items():
            is_of_rank = slot.label is not None and slot.label.rank == rank
            if is_of_rank and self.generations.holds(number, generation):
                return slot
        return None

    def has(self, generation: GenerationId, rank: int) -> bool:
        """Return whether the image of a rank is held."""
        return self.slot_of(generation, rank) is not None

    def discard(self, generation: GenerationId) -> None:
        """Drop a generation with its memory, unless somebody reads it."""
        self.generations.discard(generation)
        self.close_unheld()

    def close_unheld(self) -> list[int]:
        """Release the memory of slots that the state machine has removed, and return their
        numbers."""
        unheld = [number for number in self.slots if number not in self.generations.slots]
        for number in unheld:
            self.slots.pop(number).close()
        return unheld

    def close(self) -> None:
        """Release all memory."""
        while self.slots:
            self.slots.popitem()[1].close()


def _is_changeable(fd: int) -> bool:
    """Tell the memory of an image from its label, which is sealed against writes."""
    try:
        return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    except OSError as error:
        if error.errno == errno.EINVAL:  # no memfd at all
            return True
        raise


def check_spare(nbytes: int) -> None:
    """Raise OSError if the system cannot spare that much memory."""
    spare_nbytes = available_nbytes() - RESERVE_NBYTES
    if nbytes > spare_nbytes:
        raise OSError(errno.ENOMEM, f"the system can spare {spare_nbytes:,} of {nbytes:,} bytes")


def spared_memory(nbytes: int, moved: Callable[[], None] = lambda: None) -> Memory:
    """Return reserved memory. Raises OSError if the system cannot spare that much."""
    check_spare(nbytes)
    return reserved_memory(nbytes, moved)
