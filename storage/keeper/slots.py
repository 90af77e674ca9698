"""A slot of a keeper: what is in it, and who can write to it; and what is answered to those who ask
for one. What may become of it is decided by :mod:`.generations`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..arenas.label import GenerationId

__all__ = ["Content", "Grant", "HeldRanks", "Reason", "Refusal", "Slot"]


class Reason(enum.Enum):
    """Why a request is refused."""

    STALE_EPOCH = "stale-epoch"
    OLD_STEP = "old-step"
    NO_FREE_SLOT = "no-free-slot"
    NO_MEMORY = "no-memory"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why, in one word and in a sentence."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot to fill. ``fresh``: its memory is yet to be made, which is to be followed by
    :meth:`.generations.Generations.made` or ``unmade``. ``freed``: slots that are no more,
    because images have another size now."""

    slot: int
    fresh: bool
    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldRanks:
    """A generation, and the ranks whose images are sealed."""

    id: GenerationId
    world: int
    ranks: tuple[int, ...]
    agreed: bool


class Content(enum.Enum):
    """What is in a slot."""

    FREE = enum.auto()
    FILLING = enum.auto()
    CAPTURED = enum.auto()
    SEALED = enum.auto()
    ABANDONED = enum.auto()
    """A resume has dropped it while it was sealed, which writes to it until it ends."""


@dataclass(eq=False)
class Slot:
    """One image of ``rank``, of ``nbytes``. ``filler``: the client that fills it."""

    rank: int
    nbytes: int
    content: Content = Content.FREE
    generation: GenerationId | None = None
    filler: int = -1
    mappers: set[int] = field(default_factory=set)
    """Clients that can write to it."""
    readers: set[int] = field(default_factory=set)
    """Clients that go on from it, or may."""
    flushes: int = 0
    """How many flushes read it."""
    made: bool = True
    """Whether it has its memory."""
    outlived: bool = False
    """Whether its memory has outlived a keeper, and processes that are not known here may have it
    mapped: it is never filled again."""

    def empty(self) -> None:
        """There is no image in it."""
        self.content = Content.FREE
        self.generation = None
        self.filler = -1
