"""Deletes one checkpoint by its URI.

For callers with their own retention policy, such as trainers. To keep the last n of a folder, use
:mod:`.prune`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ....drivers.uri import divided
from ....errors import UriError
from ...protocol import limits
from ...runtime.engine import check_may_wait, run
from ..location import Place
from .choice import Choice
from .listing import ListedCheckpoint
from .prune import carry_out, delete_if_empty, plan_pruning

__all__ = ["remove"]


def remove(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> bool:
    """Delete the checkpoint at ``uri`` and leftovers of dead attempts; return whether one was
    deleted.

    Other files stay, and so does a checkpoint whose save is still running. Atomic: the manifest
    goes first, so a reader finds a complete checkpoint or none. Raises UriError and StorageError.
    """
    check_may_wait()
    place = Place.of(uri, storage_options)
    return run(_removed(place))


async def _removed(place: Place) -> bool:
    plan = await plan_pruning(place, _all, limits.IDLE_S, lambda path: path == "")
    report = await carry_out(place, plan, limits.IDLE_S)
    for error in plan.errors.values():
        raise error
    if report.checkpoints:
        await _remove_folder(place)
    return bool(report.checkpoints)


async def _all(listed: Sequence[ListedCheckpoint]) -> Choice:
    return Choice(listed)


async def _remove_folder(place: Place) -> None:
    """Delete the checkpoint's folder if it is empty."""
    try:
        folder, key = divided(place.uri)
    except UriError:
        return
    async with Place(folder, place.options).opened() as driver:
        await delete_if_empty(driver, key)
