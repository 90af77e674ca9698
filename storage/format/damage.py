"""Saying what is damaged: the file, the offset, and the tensors whose bytes these were."""

from __future__ import annotations

import numpy as np

from ...errors import DamagedError
from .manifest import Manifest

__all__ = ["damaged", "tensors_at"]


def tensors_at(manifest: Manifest, image: int, start: int, stop: int) -> list[str]:
    """Names of the tensors that have bytes in [start, stop) of an image's file."""
    s = manifest.shards
    begin = s.start
    end = begin + s.nbytes(manifest.tensors)
    rows = np.flatnonzero((s.image == image) & (begin < stop) & (end > start))
    return [manifest.tensors.names[row] for row in np.unique(s.tensor[rows]).tolist()]


def damaged(
    manifest: Manifest, uri: str, image: int, start: int, stop: int, what: str
) -> DamagedError:
    """An error that names file, bytes and tensors; ``what`` completes "bytes a to b …"."""
    names = tensors_at(manifest, image, start, stop)
    shown = ", ".join(map(repr, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    of = f" They are of tensor {shown}." if names else " They are of no tensor."
    return DamagedError(
        f"bytes {start:,} to {stop:,} {what}.{of}",
        uri=uri,
        key=manifest.image_key(image),
        advice="Load another checkpoint; `holdfast verify` lists all damage of this one",
    )
