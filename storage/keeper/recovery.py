"""Restores images when a keeper begins, from the previous keeper and from the local level. They are
ready before any trainer connects."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from functools import partial

from ..arenas.label import GenerationId, Label
from ..arenas.memory import sealed_bytes
from ..runtime.engine import offload
from .decisions.slots import Refusal
from .descriptor_store import KeptImage
from .slot_memory import Held, HeldSlot
from .tiers import HeldImage

__all__ = ["recall_kept", "recall_local"]

_log = logging.getLogger(__name__)


def recall_kept(held: Held, images: Iterable[KeptImage]) -> None:
    """Take over memory that outlived the previous keeper; other processes may still have it mapped.
    Closes images that get no slot."""
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
        _log.info(
            "step %d of rank %d was kept by the descriptor store", label.generation.step, label.rank
        )


async def recall_local(held: Held, images: AsyncIterator[HeldImage]) -> None:
    """Take over images that were loaded from the local level. Closes images that get no slot.
    Raises as reading them."""
    async for image in images:
        label = image.label
        number = held.generations.recall(*_of_image(label))
        if isinstance(number, Refusal):
            _log.warning("rank %d: %s", label.rank, number.text)
            image.memory.close()
            continue
        label_fd = sealed_bytes(await offload(label.encode))
        held.slots[number] = HeldSlot(image.memory, label, label_fd)
        # Only agreed generations are written there.
        held.generations.agreed(label.generation)
        _log.info(
            "step %d of rank %d was loaded from the local level", label.generation.step, label.rank
        )


def _of_image(label: Label) -> tuple[GenerationId, int, int, int]:
    return label.generation, label.rank, label.world, label.nbytes
