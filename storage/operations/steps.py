"""A save in steps, for a caller that coordinates the ranks itself: one rank begins an attempt, each
rank writes its image and reports a fragment, and one rank commits.

Between the steps nothing is visible. If the caller never commits, the next save collects the
attempt. Scope: no rounds, and no plan of who writes what.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...drivers.contract import Driver
from ..format.fragment import Fragment, join
from ..format.manifest import image_key
from ..format.merge import merge
from ..format.packed import Compression
from ..pipeline.capture import TensorChunks
from ..pipeline.image_writer import ImageWriter
from ..protocol import limits
from ..protocol.attempt import Attempt, delete_attempt
from ..protocol.collect import give_up, sweep
from ..protocol.commit import commit, settle
from ..runtime.engine import offload
from ..state.plan import plan_save
from .save import SaveJob, written_fragment

__all__ = ["commit_attempt", "write_image"]


async def write_image(driver: Driver, attempt: Attempt, rank: int, job: SaveJob) -> Fragment:
    """Write what ``rank`` holds, all of it, as its image; return what to report. The image is
    durable on return."""
    plan = await offload(plan_save, job.flat, rank, None)
    chunks = TensorChunks(plan.layout, plan.source)
    writer = ImageWriter(
        driver, plan.layout, chunks, job.budget_nbytes, job.progress, job.compression
    )

    async def key() -> str:
        return image_key(attempt.id, rank, job.compression)

    digests = await writer.write(key)
    return written_fragment(attempt, job, plan, digests, writer.stored_nbytes, rank)


async def commit_attempt(
    driver: Driver,
    attempt: Attempt,
    fragments: Sequence[Fragment],
    compression: Compression | None = None,
) -> None:
    """Commit what all ranks have written; ``fragments`` come in order of rank. Then delete the
    checkpoint that it replaces.

    Raises CoverageError where an element is stored twice or not at all; SaveError, StorageError.
    """
    may_be_stored = False

    def putting() -> None:
        nonlocal may_be_stored
        may_be_stored = True

    try:
        manifest = await offload(merge, [join(fragments)], compression)
        obsolete = await commit(driver, attempt, manifest, putting)
    except BaseException:
        if not may_be_stored:
            await give_up(driver, attempt)
        raise
    await settle(driver, attempt)
    if obsolete is not None:
        await delete_attempt(driver, obsolete)
    if not driver.traits.bounded:
        await sweep(driver, limits.CLEAN_UP_S)
