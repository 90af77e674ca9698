"""Error messages for damage: the file, the byte range and the affected tensors."""

from __future__ import annotations

import numpy as np

from ...errors import DamagedError
from .manifest import Manifest

__all__ = ["damaged", "tensors_at"]

_NAMES_MAX = 5


def tensors_at(manifest: Manifest, image: int, start: int, stop: int) -> list[str]:
    """Return the names of tensors that have bytes in [start, stop) of an image's file."""
    s = manifest.shards
    end = s.start + s.nbytes(manifest.tensors)
    rows = np.flatnonzero((s.image == image) & (s.start < stop) & (end > start))
    return [manifest.tensors.names[row] for row in np.unique(s.tensor[rows]).tolist()]


def damaged(
    manifest: Manifest, uri: str, image: int, start: int, stop: int, what: str
) -> DamagedError:
    """Build an error that names file, bytes and tensors; ``what`` completes "bytes a to b …"."""
    names = tensors_at(manifest, image, start, stop)
    return DamagedError(
        f"bytes {start:,} to {stop:,} {what}. {_belong_to(names)}",
        uri=uri,
        key=manifest.image_key(image),
        advice="Load another checkpoint; `holdfast verify` lists all damage of this one",
    )


def _belong_to(names: list[str]) -> str:
    if not names:
        return "They belong to no tensor."
    shown = ", ".join(map(repr, names[:_NAMES_MAX]))
    if len(names) > _NAMES_MAX:
        shown += f" and {len(names) - _NAMES_MAX} more"
    return f"They belong to tensor {shown}."
