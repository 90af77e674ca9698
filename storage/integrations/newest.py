"""Which checkpoint of a folder a trainer goes on from, by URI, as trainers want to be told."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...drivers.uri import Uri, join
from ..operations.listing import list_checkpoints

__all__ = ["as_path_or_uri", "newest_checkpoint"]


def newest_checkpoint(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> str | None:
    """The URI of the checkpoint below ``uri`` that has the highest step, and of those the one that
    was saved last. None where there is none: what is damaged, or has no step, does not count.

    Checks that all images are there, with their sizes; bytes are verified when they are loaded.
    Raises UriError, StorageError.
    """
    listed = list_checkpoints(uri, storage_options=storage_options)
    whole = [
        c.path
        for c in listed
        if c.step is not None and not (c.problem or c.damage or c.abandoned) and c.path
    ]
    if not whole:
        return None
    return as_path_or_uri(join(uri, *whole[-1].split("/")))


def as_path_or_uri(uri: Uri) -> str:
    """``uri`` as trainers know it: a path, where it is one, and nothing else is said."""
    if uri.scheme == "file" and not uri.options:
        return uri.location
    return str(uri)
