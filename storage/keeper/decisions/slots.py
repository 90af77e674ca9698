"""Slots of a keeper, and the answers to requests for one. :mod:`.generations` decides about
them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from ....core.units import size_text
from ...arenas.label import GenerationId


class Reason(enum.Enum):
    """Reasons to refuse a request."""

    STALE_EPOCH = "stale-epoch"
    OLD_STEP = "old-step"
    NO_FREE_SLOT = "no-free-slot"
    NO_MEMORY = "no-memory"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason, and a sentence that explains it."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot to fill. ``fresh``: its memory must be allocated, followed by a call of
    :meth:`.generations.Generations.made` or ``unmade``."""

    slot: int
    fresh: bool


class Content(enum.Enum):
    """Contents of a slot."""

    FREE = enum.auto()
    FILLING = enum.auto()
    CAPTURED = enum.auto()
    SEALED = enum.auto()
    ABANDONED = enum.auto()
    """Dropped by a resume while it is being sealed, which still writes to it."""


ENDED = 0
"""Stands for all clients that ended while they were reading. Numbers of clients begin at 1."""


@dataclass(eq=False)
class Slot:
    """Memory of ``nbytes`` for one image of ``rank``. ``filler``: the client that fills it."""

    rank: int
    nbytes: int
    content: Content = Content.FREE
    generation: GenerationId | None = None
    filler: int = -1
    mappers: set[int] = field(default_factory=set)
    """Clients that can write to it."""
    readers: set[int] = field(default_factory=set)
    """Clients that restore from it, or may do so."""
    pins: int = 0
    """Number of flushes, peers and rebuilds that read it."""
    made: bool = True
    """False until its memory is allocated."""
    outlived: bool = False
    """True if its memory outlived a keeper. Unknown processes may have it mapped, so it is never
    filled again."""

    @property
    def order(self) -> GenerationId:
        """The generation, or one before all others if the slot is free."""
        return self.generation or GenerationId(-1, -1)

    def empty(self) -> None:
        """Mark the slot as free."""
        self.content = Content.FREE
        self.generation = None
        self.filler = -1

    def client_gone(self, client: int) -> None:
        """Record that a client's process has ended. An image that it was reading stays pinned until
        the next epoch: the job may have recorded that it resumes from it."""
        self.mappers.discard(client)
        if client in self.readers:
            self.readers.remove(client)
            self.readers.add(ENDED)


Pin: TypeAlias = tuple[Slot, ...]
"""Slots that one reader has pinned."""


def short_of_memory(
    needed: str, needed_nbytes: int, held_nbytes: int, budget_nbytes: int
) -> Refusal:
    """Return the refusal of a slot. ``needed``: the images that the ranks need."""
    if needed_nbytes > budget_nbytes:
        text = f"{needed} take {size_text(needed_nbytes)}"
    else:
        text = f"{size_text(held_nbytes)} are held, some of it by processes of former epochs"
    return Refusal(Reason.NO_MEMORY, f"{text}, and there is room for {size_text(budget_nbytes)}")
