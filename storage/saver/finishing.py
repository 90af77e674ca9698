"""Commits a save whose trainers have died, by their savers alone.

The savers of a job know nothing of each other, so they meet in the storage: each puts its fragment
of the manifest beside its image, once that is durable, and the saver of rank 0 commits when all are
there. It puts the same commit record as its trainer would have: the trainer is dead, so a record
that it has left is as good as the saver's own. Every other step is that of any commit, except that
the attempt is not settled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...errors import NotACheckpointError, NotFoundError, SaveError
from ..format.fragment import Fragment, decode_fragment, join
from ..format.merge import merge
from ..format.packed import checked_compression
from ..format.tables import ImageTable
from ..pipeline.image_writer import WrittenImage
from ..protocol.attempt import Attempt, check_marker, delete_attempt
from ..protocol.commit import commit
from ..protocol.current import is_current
from ..ranks.messages import LEADER
from ..runtime.engine import offload
from .messages import Write

FINISH_S = 600.0
"""Longest time to wait for the savers of other ranks."""
_LOOK_S = 0.5


def fragment_key(attempt: str, rank: int) -> str:
    """Return the key at which the saver of ``rank`` puts its fragment of the manifest."""
    return f"{Attempt(attempt).prefix}/{rank}.fragment"


def fragment_of(write: Write, written: WrittenImage) -> Fragment:
    """Return the rank's fragment of the manifest, with its image."""
    stored_nbytes = written.stored_nbytes if write.compression else None
    images = ImageTable.of(write.rank, write.hashed_end, written.digests, stored_nbytes)
    draft = decode_fragment(write.draft, "the draft of a fragment", {})
    return draft.with_image((write.attempt, write.step, write.created_s), images, written.extents)


async def finish(driver: Driver, write: Write, written: WrittenImage) -> bool:
    """Commit the save of a dead trainer, or contribute to it. Return whether it is committed: True,
    or unknown on other ranks than 0.

    Raises SaveError if not all ranks have contributed within :data:`FINISH_S`, and as
    :func:`~..protocol.commit.commit`, for example SupersededError if the job has begun
    another save there.
    """
    attempt = Attempt(write.attempt, write.record)
    with contextlib.suppress(NotACheckpointError):
        if await is_current(driver, attempt.id):
            return True
    fragment = fragment_of(write, written)
    if write.rank != LEADER:
        await check_marker(driver, attempt)
        await driver.put(fragment_key(attempt.id, write.rank), fragment.encode())
        return False
    others = range(1, write.world)
    fragments = [fragment, *await _fragments_of(driver, attempt, others)]
    compression = checked_compression(write.compression or None)
    manifest = await offload(merge, [join(fragments)], compression)
    manifest = replace(manifest, branch=write.branch, increments=write.choice.increments)
    # Not settled: a put of the dead trainer may still be on its way.
    obsolete = await commit(driver, attempt, manifest, overwrite=write.overwrite)
    if obsolete is not None:
        await delete_attempt(driver, obsolete)
    keys = [fragment_key(attempt.id, rank) for rank in others]
    await at_most(driver.traits.concurrency, (driver.delete(key) for key in keys))
    return True


async def _fragments_of(driver: Driver, attempt: Attempt, ranks: Sequence[int]) -> list[Fragment]:
    """Return the fragments of ``ranks``, in order, as soon as all are there."""
    found: dict[int, Fragment] = {}
    loop = asyncio.get_running_loop()
    until_s = loop.time() + FINISH_S
    while missing := [rank for rank in ranks if rank not in found]:
        await check_marker(driver, attempt)
        for rank in missing:
            try:
                data = await driver.get(fragment_key(attempt.id, rank))
            except NotFoundError:
                break
            found[rank] = decode_fragment(data, f"the fragment of rank {rank}", {})
        else:
            break
        if loop.time() > until_s:
            raise SaveError(
                f"the trainers have died, and the saver of rank {missing[0]} has not contributed "
                f"within {FINISH_S:g} s",
                uri=driver.uri,
                rank=missing[0],
            )
        await asyncio.sleep(_LOOK_S)
    return [found[rank] for rank in ranks]
