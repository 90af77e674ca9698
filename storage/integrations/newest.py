"""The checkpoint that a trainer resumes from, as a path or URI."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ...drivers.uri import Uri, join, parse
from ..format.manifest import MANIFEST_KEY
from ..operations.location import UriLike
from ..operations.maintenance.listing import ListedCheckpoint, check_lineages, list_checkpoints

__all__ = [
    "as_path_or_uri",
    "is_resumable",
    "is_stock",
    "listed_below",
    "newest_checkpoint",
    "stock_steps",
]

_NAMED = 10
"""The most checkpoints that a message names."""
_log = logging.getLogger(__name__)


def newest_checkpoint(
    uri: UriLike, *, storage_options: Mapping[str, object] | None = None
) -> str | None:
    """Return the checkpoint below ``uri`` with the highest step, as a path or URI.

    Of several, return the latest; without any, return None. Checkpoints that are damaged, that have
    no step, or that training has abandoned by going back to an earlier step are ignored; those with
    a higher step are logged. Checks that all images exist and have their sizes; bytes are verified
    when loaded. Raises UriError, StorageError; DamagedError if the record of a run's branches
    cannot be read.
    """
    listed = listed_below(uri, storage_options)
    whole = [c for c in listed if is_resumable(c)]
    newest = (whole[-1].step or 0) if whole else -1
    later = [c for c in listed if c.step is not None and c.step > newest]
    damaged = [f"{c.path} ({c.damage})" for c in later if c.damage]
    abandoned = [f"{c.path} (training went back)" for c in later if not c.damage]
    if later:
        names = ", ".join([*damaged, *abandoned][:_NAMED])
        _log.warning("%s: passing over later checkpoints: %s", parse(uri).redacted, names)
    return as_path_or_uri(join(uri, *whole[-1].path.split("/"))) if whole else None


def listed_below(
    uri: UriLike, storage_options: Mapping[str, object] | None
) -> list[ListedCheckpoint]:
    """Return the checkpoints below ``uri``, oldest first, without versions of weight channels.
    Raises like :func:`newest_checkpoint`."""
    listed = list_checkpoints(uri, storage_options=storage_options)
    check_lineages(parse(uri).redacted, listed)
    return [c for c in listed if c.path and not c.is_version]


def is_resumable(c: ListedCheckpoint) -> bool:
    """Return whether a run may resume from a checkpoint."""
    return c.step is not None and not (c.problem or c.damage or c.abandoned)


def is_stock(uri: UriLike, marker: str) -> bool:
    """Return whether the trainer itself has saved the checkpoint at ``uri``, later than Holdfast.

    ``marker``: a file in each checkpoint of the trainer itself. One that goes back, or that is
    switched to Holdfast and back, may save into the same folder in both formats.
    """
    try:
        stock_ns = os.stat(os.path.join(uri, marker)).st_mtime_ns
    except OSError:
        return False
    try:
        return stock_ns > os.stat(os.path.join(uri, MANIFEST_KEY)).st_mtime_ns
    except OSError:
        return True


def stock_steps(folder: UriLike, prefix: str, marker: str) -> list[int]:
    """Return the steps of the checkpoints in a local folder that are :func:`is_stock`."""
    paths = [path for path in Path(folder).glob(f"{prefix}*") if is_stock(path, marker)]
    numbers = [path.name.removeprefix(prefix) for path in paths]
    return [int(number) for number in numbers if number.isdecimal()]


def as_path_or_uri(uri: Uri) -> str:
    """Return ``uri`` as a trainer expects it: as a plain path, if it is one without options."""
    if uri.scheme == "file" and not uri.options:
        return uri.location
    return str(uri)
