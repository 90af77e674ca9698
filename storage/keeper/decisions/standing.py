"""Messages between the keepers of one job. Each keeper reports to the *leader*, the keeper of rank
0, which answers with a standing.

Reports and standings may be lost, duplicated or late, so each repeats everything its sender knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...arenas.label import GenerationId
from ...arenas.messages import FlushEnd
from .votes import Vote


@dataclass(frozen=True, slots=True)
class Written:
    """Result of one keeper's part of a flush. ``stored_nbytes``: file sizes by ``ranks``, 0 without
    shards; ``problem``: the error, if any; ``damaged``: an image has changed in memory; ``gone``:
    the keeper holds no images of the generation, as after it has replaced a dead one;
    ``borrowed_nbytes``: how many bytes of all files the storage has copied or linked; ``extents``:
    by ``ranks``, encoded, where the blocks of an image lie, if not in one file."""

    attempt: str
    ranks: tuple[int, ...] = ()
    stored_nbytes: tuple[int, ...] = ()
    problem: str = ""
    damaged: bool = False
    gone: bool = False
    borrowed_nbytes: int = 0
    extents: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the keeper ``name`` knows in ``epoch``."""

    name: str
    epoch: int
    votes: tuple[Vote, ...] = ()
    """Votes of its ranks, for generations without an outcome."""
    missing: tuple[GenerationId, ...] = ()
    """Generations that the leader waits for, but a rank of this keeper will never vote for."""
    agreed: GenerationId | None = None
    """Newest generation known to be agreed."""
    guarded: GenerationId | None = None
    """The generation to be encoded now, if this keeper has encoded it, else the newest one that it
    has encoded."""
    unguarded: GenerationId | None = None
    """Newest generation that it failed to encode in this ``attempt``."""
    attempt: str = ""
    guarded_by_all: GenerationId | None = None
    """Newest generation that it knows to be encoded on all keepers, in this epoch or before."""
    written: Written | None = None
    """Its part of the newest flush."""
    wanted: tuple[GenerationId, ...] = ()
    """Agreed generations that wait here to be flushed."""
    lost: tuple[int, ...] = ()
    """Ranks of its host that have died."""
    ended: FlushEnd | None = None
    """The newest flush that it knows to have ended for good."""
    seen: str = ""
    """Version of the last standing."""
    waits: bool = False
    """True without news, so that the answer may wait for a newer standing."""


@dataclass(frozen=True, slots=True)
class FlushOrder:
    """An order to all keepers to write their images of ``generation`` for this attempt. ``base``,
    ``base_key``: attempt and name of the checkpoint to borrow from, "" for none."""

    generation: GenerationId
    attempt: str
    base: str = ""
    base_key: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """The leader's view of ``epoch``."""

    version: str
    epoch: int
    agreed: tuple[GenerationId, ...] = ()
    void: tuple[GenerationId, ...] = ()
    """Newest outcomes, with ``agreed``."""
    open: tuple[GenerationId, ...] = ()
    """Generations with votes but no outcome."""
    guard: GenerationId | None = None
    attempt: str = ""
    """Id of the attempt to encode ``guard``, the generation to encode now."""
    guarded: GenerationId | None = None
    """Newest generation that the leader knows to be encoded on all keepers."""
    protected: GenerationId | None = None
    """Newest generation that all keepers know to be encoded on all keepers."""
    heard: bool = False
    """True if every keeper has reported since it first saw this leader's standing, so that the
    leader knows everything that they know."""
    settled: GenerationId | None = None
    """All generations of this epoch up to this one that are not named here are void or obsolete."""
    flush: FlushOrder | None = None
    """The flush to write now."""
    ended: FlushEnd | None = None
    """The newest flush that has ended."""
    lost: tuple[int, ...] = ()
    """Ranks that have died in this epoch."""

    @property
    def flushed(self) -> GenerationId | None:
        """Generation that is being flushed or will be retried. It is agreed, however old it is."""
        if self.flush is not None:
            return self.flush.generation
        if self.ended is not None and not self.ended.final:
            return self.ended.generation
        return None
