"""Digests of tensors, to find out whether tensors of one name are equal on all ranks.

A plain tensor does not say which other ranks hold it. Taking equal names for equal contents would
save a mixture of ranks wherever they differ (a random state, a running mean). So every byte is
digested; at memory speed that costs a few percent of a save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from .bits import address_of, as_bits, byte_view
from .capture.lazy import LazyCapture
from .device import copied_to_host
from .flat_state import FlatState

_PIECE_NUMEL = 4 << 20
_PIECE_NBYTES = 1 << 20


def unsure_rows(flat: FlatState, world: int) -> list[int]:
    """Return the rows whose replicas this rank cannot determine alone.

    These are plain tensors, and DTensors on a mesh with fewer ranks than the job: another mesh may
    hold the same tensor (layers that tensor parallelism does not split) or a different one
    (pipeline stages).
    """
    return [
        row
        for row, layout in enumerate(flat.layouts)
        if layout.holders is None or (layout.ranks < world and not layout.is_empty)
    ]


def fingerprints(
    flat: FlatState, rows: Sequence[int], lazy: LazyCapture | None = None
) -> dict[int, bytes]:
    """Return a 16-byte digest per row, over the shape, dtype and bytes that this rank holds.

    The digest of a tied tensor also covers the other tensor's name. ``lazy`` reads tensors that may
    be written to meanwhile.
    """
    roots = {row: flat.alias[row] if flat.alias[row] >= 0 else row for row in rows}
    digests = {root: fingerprint(flat, root, lazy) for root in dict.fromkeys(roots.values())}
    for row, root in roots.items():
        if root != row:
            name = flat.names[root].encode("utf-8", "surrogatepass")
            digests[row] = xxhash.xxh3_128_digest(digests[root] + name)
    return {row: digests[row] for row in rows}


def label(flat: FlatState, row: int) -> str:
    """Return a label that is equal on all ranks with the same part: the tensor's name and the
    region."""
    layout = flat.layouts[row]
    if layout.holders is None:
        return flat.names[row]
    return flat.names[row] + layout.region


def fingerprint(flat: FlatState, row: int, lazy: LazyCapture | None = None) -> bytes:
    """Return a digest of the dtype, shape and bytes of this rank's part of the tensor in
    ``row``."""
    tensor = flat.locals[row]
    hasher = xxhash.xxh3_128(f"{flat.dtypes[row]}{list(flat.shapes[row])}".encode())
    if tensor.numel() == 0:
        return hasher.digest()
    if lazy is not None and row in lazy.host:
        _update_carefully(hasher, lazy, row, tensor.nbytes)
        return hasher.digest()
    if address_of(tensor) is not None:
        hasher.update(byte_view(as_bits(tensor)).numpy().data)
        return hasher.digest()
    try:
        flat_bits = as_bits(tensor).reshape(-1)
    except torch.OutOfMemoryError:  # its device is full
        flat_bits = as_bits(copied_to_host(tensor)).reshape(-1)
    for start in range(0, len(flat_bits), _PIECE_NUMEL):
        piece = flat_bits[start : start + _PIECE_NUMEL]
        hasher.update(byte_view(piece.cpu().contiguous()).numpy().data)
    return hasher.digest()


def _update_carefully(hasher: xxhash.xxh3_128, lazy: LazyCapture, row: int, nbytes: int) -> None:
    """Hash the row through a buffer that fits in the processor's cache.

    The tensor's own memory may be freed meanwhile.
    """
    buffer = np.empty(min(nbytes, _PIECE_NBYTES), np.uint8)
    for start in range(0, nbytes, len(buffer)):
        piece = buffer[: nbytes - start]
        lazy.read(row, start, start + len(piece), piece.ctypes.data, disarm=False)
        hasher.update(piece.data)
