"""Deletes one checkpoint, by its URI.

Scope: for those who know that a checkpoint is of no use any more, as trainers with a retention of
their own do. Whoever keeps the last n of a folder wants :mod:`.prune`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...drivers.uri import divided
from ...errors import UriError
from ..runtime.engine import check_may_wait, run
from .location import Place
from .prune import delete_if_empty, prune_here

__all__ = ["remove"]


def remove(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> bool:
    """Delete the checkpoint at ``uri``, and what dead attempts left there; return whether one was
    deleted. What else lies there stays, and so does a checkpoint whose save is not done yet.

    Atomic: the manifest goes first, so a reader finds a whole checkpoint or none. Raises UriError,
    StorageError.
    """
    check_may_wait()
    place = Place.of(uri, storage_options)
    report = run(prune_here(place, lambda listed: listed, lambda path: path == ""))
    if report.checkpoints:
        run(_remove_folder(place))
    return bool(report.checkpoints)


async def _remove_folder(place: Place) -> None:
    """Delete the folder that the checkpoint was in, if nothing else is in it."""
    try:
        folder, key = divided(place.uri)
    except UriError:
        return
    async with Place(folder, place.options).opened() as driver:
        await delete_if_empty(driver, key)
