"""What a keeper begins with: images that the keeper before had in memory, and those that are on
storage of this host. A restart may go on from them before any trainer has come."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from functools import partial

from ..arenas.label import GenerationId, Label
from ..arenas.memory import sealed_bytes
from ..runtime.engine import offload
from .descriptor_store import KeptImage
from .held import Held, HeldSlot
from .slots import Refusal
from .tiers import HeldImage

__all__ = ["recall_kept", "recall_local"]

_log = logging.getLogger(__name__)


def recall_kept(held: Held, images: Iterable[KeptImage]) -> None:
    """Have the memory again that has outlived the keeper before. Others may have it mapped still.
    Closes what there is no slot for."""
    for image in images:
        label = image.label
        recall = partial(held.generations.recall, *_of_image(label), outlived=True)
        number = held.in_use_already(label.nbytes, recall)
        if isinstance(number, Refusal):
            _log.warning("rank %d: %s", label.rank, number.text)
            image.slot.close()
            continue
        held.slots[number] = image.slot
        if image.agreed:
            held.generations.was_agreed(label.generation)
        _log.info("step %d of rank %d was kept", label.generation.step, label.rank)


async def recall_local(held: Held, images: AsyncIterator[HeldImage]) -> None:
    """Have images again that were written to storage of this host. Closes what there is no slot
    for. Raises what reading them raises."""
    async for image in images:
        label = image.label
        number = held.generations.recall(*_of_image(label))
        if isinstance(number, Refusal):
            _log.warning("rank %d: %s", label.rank, number.text)
            image.memory.close()
            continue
        label_fd = sealed_bytes(await offload(label.encode))
        held.slots[number] = HeldSlot(image.memory, label, label_fd)
        # Only what was agreed on is written there.
        held.generations.agreed(label.generation)
        _log.info("step %d of rank %d is in memory again", label.generation.step, label.rank)


def _of_image(label: Label) -> tuple[GenerationId, int, int, int]:
    return label.generation, label.rank, label.world, label.nbytes
