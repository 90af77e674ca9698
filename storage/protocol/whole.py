"""Commits a checkpoint whose images are stored, from the fragments of all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...drivers.contract import Driver
from ..format.fragment import Fragment, join
from ..format.lineage import ROOT
from ..format.merge import merge
from ..format.packed import Compression
from ..runtime.engine import offload
from . import limits
from .attempt import Attempt, delete_attempt
from .collect import give_up, sweep
from .commit import commit, settle

__all__ = ["commit_attempt"]


async def commit_attempt(
    driver: Driver,
    attempt: Attempt,
    fragments: Sequence[Fragment],
    compression: Compression | None = None,
    branch: str = ROOT,
) -> None:
    """Commit the images that all ranks have written, and delete the checkpoint that it replaces.

    ``fragments`` must be in order of rank. ``branch``: the run's branch, recorded in the manifest.
    Raises CoverageError if an element is stored twice or not at all; SaveError; StorageError.
    """
    may_be_stored = False

    def putting() -> None:
        nonlocal may_be_stored
        may_be_stored = True

    try:
        manifest = await offload(merge, [join(fragments)], compression)
        obsolete = await commit(driver, attempt, replace(manifest, branch=branch), putting)
    except BaseException:
        if not may_be_stored:
            await give_up(driver, attempt)
        raise
    await settle(driver, attempt)
    if obsolete is not None:
        await delete_attempt(driver, obsolete)
    if not driver.traits.bounded:
        await sweep(driver, limits.CLEAN_UP_S)
