"""What a keeper holds: the memory of its slots, with the labels of the images in it; and the state
machine that decides about them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..arenas.label import GenerationId, Label
from ..arenas.memory import Memory
from .generations import Generations
from .tiers import HeldImage

__all__ = ["Held", "HeldSlot"]


@dataclass(eq=False)
class HeldSlot:
    """The memory of a slot; and its label, once the image in it is whole."""

    memory: Memory
    label: Label | None = None
    label_fd: int = -1

    def unlabel(self) -> None:
        """What is in it is no image any more."""
        self.label = None
        if self.label_fd >= 0:
            os.close(self.label_fd)
            self.label_fd = -1

    def close(self) -> None:
        """Give its memory back to the system."""
        self.unlabel()
        self.memory.close()


class Held:
    """The slots of a keeper, by number."""

    def __init__(self, budget_nbytes: int) -> None:
        self.generations = Generations(budget_nbytes)
        self.slots: dict[int, HeldSlot] = {}

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(slot.memory.nbytes for slot in self.slots.values())

    def images(self, generation: GenerationId) -> list[HeldImage]:
        """Those of a generation, by rank. What was given up is none of them, though its bytes are
        there until its slot is filled again."""
        found = [
            HeldImage(slot.label, slot.memory)
            for number, slot in self.slots.items()
            if slot.label is not None and self.generations.holds(number, generation)
        ]
        return sorted(found, key=lambda image: image.label.rank)

    def close_unheld(self) -> list[int]:
        """Give back the memory of slots that the state machine has given up; their numbers."""
        unheld = [number for number in self.slots if number not in self.generations.slots]
        for number in unheld:
            self.slots.pop(number).close()
        return unheld

    def close(self) -> None:
        """Give back all memory."""
        while self.slots:
            self.slots.popitem()[1].close()
