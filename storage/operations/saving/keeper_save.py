"""A save through a keeper: capture the image into the keeper's memory; the keeper does the rest.

It does so even if this process dies. A step that stays in memory involves no other rank: ranks use
the plan agreed on in an earlier save, and keepers check that all of them did. A step that goes to
storage has the rounds of any save and one more, *keep*: it uses keepers only if all ranks have a
slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ....core.spans import span
from ....errors import CoordinationError, SaveError
from ...arenas.arena import FillingSlot
from ...arenas.messages import Captured
from ...pipeline.capture import TensorChunks, capture_into
from ...pipeline.chunks import chunks_to_write
from ...ranks.team import Decide, Team
from ...runtime.engine import offload
from ...state.fingerprint import fingerprints
from ...state.plan import SavePlan, plan_save
from ..rounds import KEEP, Keepable, Kept
from .global_plan import GlobalPlan, agree
from .save_job import SaveJob


async def run_memory_step(rank: int, world: int, job: SaveJob) -> None:
    """Capture a step into memory without asking other ranks. Raises SaveError without a slot."""
    assert job.keeping is not None
    assert job.step is not None
    global_plan = None
    if world > 1:
        global_plan = job.plans.get((job.flat.layout_id, rank, world))
        if job.flat.layout_id is None or global_plan is None:
            raise SaveError(
                "the ranks have no agreed plan for a state of this layout",
                rank=rank,
                advice="The next save to storage makes one.",
            )
    plan = await planned(job, rank, global_plan)
    slot = await job.keeping.arena.fill(job.step, plan.layout.nbytes)
    if slot is None:
        raise SaveError(f"there is no memory for it: {job.keeping.arena.problem}", rank=rank)
    await _capture(job, slot, plan, rank, global_plan)


async def make_agreement(team: Team, uri: str, job: SaveJob) -> None:
    """Agree with the other ranks on a plan for this and later steps. Every rank calls this."""
    async with team.session():
        await global_plan_of(team, uri, job)


async def global_plan_of(team: Team, uri: str, job: SaveJob) -> GlobalPlan | None:
    """Return the global plan; None for a rank without peers."""
    if team.world == 1:
        return None
    digests = job.digests or partial(fingerprints, job.flat, lazy=job.lazy)
    return await agree(
        team, uri, job.flat, digests, job.plans, job.compression, overwrite=job.overwrite
    )


async def planned(job: SaveJob, rank: int, global_plan: GlobalPlan | None) -> SavePlan:
    """Return the plan of this rank's image."""
    agreed = None if global_plan is None else global_plan.agreed
    with span("plan"):
        return await offload(plan_save, job.flat, rank, agreed, job.lazy)


async def keep(team: Team, job: SaveJob, global_plan: GlobalPlan | None) -> bool:
    """Capture the image into the keeper's memory, and have it flushed, if all ranks can."""
    keeping = job.keeping
    assert keeping is not None
    assert keeping.storage is not None
    assert job.step is not None
    plan = await planned(job, team.rank, global_plan)
    slot = await keeping.arena.fill(job.step, plan.layout.nbytes)
    problem = ""
    if slot is None:
        problem = keeping.arena.problem or "there is no slot"
    try:
        verdict = await team.round(KEEP, Keepable(problem), _decide(job))
        if verdict.problem or slot is None:
            if slot is not None:
                await keeping.arena.dropped(slot)
            return False
    except BaseException:
        if slot is not None:
            await keeping.arena.dropped(slot)
        raise
    await _capture(job, slot, plan, team.rank, global_plan)
    if keeping.flushes:
        request = keeping.storage.request(job.step, verdict.branch)
        if not await keeping.arena.flush(request):
            raise CoordinationError(f"the keeper did not accept the flush: {keeping.arena.problem}")
    return True


def _decide(job: SaveJob) -> Decide[Keepable, Kept]:
    async def decide(statements: Sequence[Keepable]) -> Kept:
        problems = [statement.problem for statement in statements if statement.problem]
        if problems:
            return Kept(problem=problems[0])
        return Kept(branch="" if job.admit is None else await job.admit())

    return decide


async def _capture(
    job: SaveJob, slot: FillingSlot, plan: SavePlan, rank: int, global_plan: GlobalPlan | None
) -> None:
    """Copy the image into its slot and hand it to the keeper. Raises CoordinationError."""
    keeping = job.keeping
    assert keeping is not None
    assert job.step is not None
    try:
        equal = await _equal(job, global_plan)
        chunks = TensorChunks(plan.layout, plan.source)
        moved = job.callbacks.moved
        await capture_into(slot.memory, plan.layout, chunks, moved, beside=not job.waits)
        job.callbacks.captured()
        encoded = await offload(job.draft, plan, rank)
    except BaseException:
        await keeping.arena.dropped(slot)
        raise
    layout = plan.layout
    image = Captured(
        slot=slot.number,
        step=job.step,
        hashed_end=layout.hashed_end if chunks_to_write(layout) else 0,
        chunk_nbytes=layout.chunk_nbytes,
        block_nbytes=layout.block_nbytes,
        created_s=job.created_s,
        agreement="" if global_plan is None else global_plan.id.hex(),
        equal=equal,
    )
    if not await keeping.arena.captured(image, encoded, keeping.tell):
        raise CoordinationError(
            f"the keeper did not accept the image: {keeping.arena.problem}", rank=rank
        )


async def _equal(job: SaveJob, global_plan: GlobalPlan | None) -> Mapping[str, str]:
    """Return digests of the data that must be equal within a group of ranks, by group name."""
    if global_plan is None or not global_plan.identical:
        return {}
    assert job.digests is not None
    digests = await offload(job.digests, global_plan.rows)
    return {name: value.hex() for name, value in global_plan.followed(digests).identical.items()}
