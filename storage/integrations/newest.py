"""The checkpoint that a trainer resumes from, as a path or URI."""

from __future__ import annotations

from collections.abc import Mapping

from ...drivers.uri import Uri, join, parse
from ..operations.location import UriLike
from ..operations.maintenance.listing import check_lineages, list_checkpoints

__all__ = ["as_path_or_uri", "newest_checkpoint", "resumable"]


def newest_checkpoint(
    uri: UriLike, *, storage_options: Mapping[str, object] | None = None
) -> str | None:
    """Return the checkpoint below ``uri`` with the highest step, as a path or URI.

    Of several, return the latest; without any, return None. Checkpoints that are damaged or have no
    step are ignored. Checks that all images exist and have their sizes; bytes are verified when
    loaded. Raises UriError, StorageError; DamagedError if the record of a run's branches cannot be
    read.
    """
    paths = resumable(uri, storage_options)
    return as_path_or_uri(join(uri, *paths[-1].split("/"))) if paths else None


def resumable(uri: UriLike, storage_options: Mapping[str, object] | None) -> list[str]:
    """Return the paths of the checkpoints below ``uri`` that a run may resume from, oldest first.

    Raises like :func:`newest_checkpoint`.
    """
    listed = list_checkpoints(uri, storage_options=storage_options)
    check_lineages(parse(uri).redacted, listed)
    return [
        c.path
        for c in listed
        if c.step is not None and not (c.problem or c.damage or c.abandoned) and c.path
    ]


def as_path_or_uri(uri: Uri) -> str:
    """Return ``uri`` as a trainer expects it: as a plain path, if it is one without options."""
    if uri.scheme == "file" and not uri.options:
        return uri.location
    return str(uri)
