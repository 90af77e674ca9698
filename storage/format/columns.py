"""Columns in a safetensors file: named numpy arrays, a JSON header and a checksum.

Integers are stored in the narrowest unsigned type that holds the column's largest entry; the header
names the type. The last column is ``checksum``: 16 bytes, the xxh3-128 digest of every byte before
them. Any safetensors reader opens the file.

Readers trust nothing: they check sizes against the bytes at hand before allocating memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core import safetensors
from ...errors import DamagedError, SaveError
from ...planner.image import DIGEST_NBYTES
from .digest import digest

# Any dtype that safetensors can hold; users of a column check its content.
Column = npt.NDArray[Any]
Columns = Mapping[str, Column]
"""Columns by name."""

_DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
_CHECKSUM = "checksum"
_ALIGNMENT = 8
_MARK = b'"holdfast"'
"""Key of our metadata, present in the header of every column file."""
HEADER_NBYTES_MAX = 256 << 20
"""Largest accepted header. Parsed JSON can take thirty times its size in memory."""


def narrowed(column: Column) -> Column:
    """Return the same non-negative integers in the narrowest unsigned type."""
    return column.astype(np.min_scalar_type(int(column.max(initial=0))), copy=False)


def encode_columns(columns: Columns, metadata: Mapping[str, str]) -> bytes:
    """Encode columns of unsigned integers as one safetensors file, widest first to keep all
    aligned.

    Raises SaveError if the header would exceed the readers' limit.
    """
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    contents = [np.ascontiguousarray(column).tobytes() for _, column in ordered]
    entries = []
    end = 0
    for (name, column), content in zip(ordered, contents, strict=True):
        start = end
        end += len(content)
        code = safetensors.DTYPES[column.dtype.name]
        entries.append(safetensors.Entry(name, code, column.shape, start, end))
    entries.append(safetensors.Entry(_CHECKSUM, "U8", (DIGEST_NBYTES,), end, end + DIGEST_NBYTES))
    header = safetensors.header(entries, metadata, _ALIGNMENT)
    if len(header) - safetensors.LENGTH_NBYTES > HEADER_NBYTES_MAX:
        raise SaveError(
            f"small values and containers take {len(header):,} bytes as JSON, of "
            f"{HEADER_NBYTES_MAX:,} at most",
            advice="Save long lists of numbers as tensors or arrays.",
        )
    body = b"".join([header, *contents])
    return body + digest(body)


def decode_columns(data: bytes, what: str) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the columns (views of ``data``, in their stored types) and the metadata.

    ``what`` names the file in errors. Raises DamagedError if the checksum does not match or the
    file deviates from the layout written by :func:`encode_columns`.
    """
    is_long_enough = len(data) >= safetensors.LENGTH_NBYTES + DIGEST_NBYTES
    if not is_long_enough or digest(memoryview(data)[:-DIGEST_NBYTES]) != data[-DIGEST_NBYTES:]:
        raise DamagedError(f"{what} {_damage(data)}")
    return parse_columns(data, what)


def _damage(data: bytes) -> str:
    """Describe the likely damage of a file whose checksum does not match."""
    if not data:
        return "is empty"
    if data.count(0) == len(data):
        return f"holds {len(data):,} zeros, and nothing else"
    if _MARK not in data:
        return "was not written by Holdfast: it is another program's file, or nothing of it is left"
    return "does not match its own checksum"


def parse_columns(data: bytes | memoryview, what: str) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the columns and the metadata, without the checksum, of bytes whose checksum was
    already verified. Raises DamagedError if they are malformed."""
    try:
        end = safetensors.LENGTH_NBYTES + safetensors.length_in(data)
        if end > safetensors.LENGTH_NBYTES + HEADER_NBYTES_MAX:
            raise ValueError("its header is too long")
        header = safetensors.parsed(bytes(data[safetensors.LENGTH_NBYTES : end]), len(data) - end)
        body = memoryview(data)[end:]
        columns = {entry.name: _column(body, entry) for entry in header.entries}
    except ValueError as error:
        raise DamagedError(f"{what} is malformed: {error}") from error
    columns.pop(_CHECKSUM, None)
    return columns, dict(header.metadata)


def _column(body: memoryview, entry: safetensors.Entry) -> Column:
    if entry.code not in _DTYPES or len(entry.shape) > 2:
        raise ValueError(f"{entry.name!r} is not a column")
    return np.frombuffer(body[entry.start : entry.stop], _DTYPES[entry.code]).reshape(entry.shape)
