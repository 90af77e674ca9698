"""What keepers of one job tell each other: each reports to the *lead keeper*, which is that of rank
0, and the answer is how things stand.

Reports and standings may be lost, come twice, or come late: each says all that its sender knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arenas.label import GenerationId
from .votes import Vote

__all__ = ["FlushEnd", "FlushOrder", "Report", "Standing", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """What has become of a keeper's part of a flush. ``stored_nbytes``: of the files of ``ranks``,
    0 for one without shards; ``problem``: why there are none; ``damaged``: memory no longer holds
    what was sealed; ``gone``: nor anything of it, as where a keeper has taken the place of one that
    was to write it."""

    attempt: str
    ranks: tuple[int, ...] = ()
    stored_nbytes: tuple[int, ...] = ()
    problem: str = ""
    damaged: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What the keeper ``name`` knows in ``epoch``.

    ``votes``: of its ranks, for generations whose outcome it does not know. ``missing``: of those
    that the lead waits for, the ones that a rank of this keeper will never vote for. ``agreed``:
    the newest generation that it knows to be agreed on. ``guarded``: what all are to make parity of
    now, if it holds its part of that, else the newest one for which it does; ``unguarded``: the
    newest one for which it could not make that in this ``attempt``; ``told``: the newest one that
    it knows all to have made it of, in this epoch or before.
    ``written``: its part of the newest flush; ``wanted``: what is agreed on, and waits here for the
    lead keeper to have it written to storage. ``seen``: the version of the standing that it knows;
    ``waits``: it has no news, and waits for a newer one."""

    name: str
    epoch: int
    votes: tuple[Vote, ...] = ()
    missing: tuple[GenerationId, ...] = ()
    agreed: GenerationId | None = None
    guarded: GenerationId | None = None
    unguarded: GenerationId | None = None
    attempt: str = ""
    told: GenerationId | None = None
    written: Written | None = None
    wanted: tuple[GenerationId, ...] = ()
    seen: str = ""
    waits: bool = False


@dataclass(frozen=True, slots=True)
class FlushOrder:
    """Every keeper is to write its images of ``generation`` for this attempt."""

    generation: GenerationId
    attempt: str


@dataclass(frozen=True, slots=True)
class FlushEnd:
    """What has become of the flush of a generation: ``problem`` is "" where it is durable.
    ``final``: it is not tried again."""

    generation: GenerationId
    attempt: str
    nbytes: int = 0
    problem: str = ""
    final: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """How things stand in ``epoch``. ``agreed`` and ``void``: the newest outcomes; ``open``:
    generations with votes, and without an outcome; ``settled``: those of this epoch that are not
    newer, and are not named here, are void, or of no use any more. ``guard``: what all are to make
    parity of now, in this ``attempt``; ``guarded``: the newest one that all have made it of, as far
    as the lead keeper knows; ``protected``: the newest one of which all know that; ``heard``: the
    lead keeper has heard all keepers since they know of it, and so knows. ``flush``: what all
    are to write now; ``ended``: the newest flush that has ended."""

    version: str
    epoch: int
    agreed: tuple[GenerationId, ...] = ()
    void: tuple[GenerationId, ...] = ()
    open: tuple[GenerationId, ...] = ()
    guard: GenerationId | None = None
    attempt: str = ""
    guarded: GenerationId | None = None
    protected: GenerationId | None = None
    heard: bool = False
    settled: GenerationId | None = None
    flush: FlushOrder | None = None
    ended: FlushEnd | None = None

    @property
    def flushed(self) -> GenerationId | None:
        """What the lead keeper has all write to storage, until that comes to an end. However old it
        is, it is agreed on."""
        if self.flush is not None:
            return self.flush.generation
        if self.ended is not None and not self.ended.final:
            return self.ended.generation
        return None
