"""Columns in a safetensors file: named numpy arrays, a JSON header, and a checksum over all of it.

Integers are stored in the narrowest unsigned type that holds the column's largest entry; the header
says which. The file ends with the column ``checksum``: 16 bytes, the xxh3-128 digest of every byte
before them. Any safetensors reader opens it.

Reading trusts nothing: sizes are checked against the bytes at hand before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import DamagedError, SaveError
from ...planner.image import DIGEST_NBYTES
from .digest import digest

__all__ = [
    "decode_columns",
    "encode_columns",
    "header_length",
    "narrowed",
    "parse_columns",
    "parse_header",
]

_DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
_CODES = {np.dtype(t): code for code, t in _DTYPES.items()}
_MARK = b'"holdfast"'
"""The name of our metadata, in the header of every file of columns."""
_HEADER_NBYTES_MAX = 256 << 20
"""Parsed, JSON takes up to thirty times its size: a header is not to take the host's memory."""

Array = npt.NDArray[Any]


def narrowed(column: Array) -> Array:
    """The same non-negative integers in the narrowest unsigned type."""
    return column.astype(np.min_scalar_type(int(column.max(initial=0))), copy=False)


def encode_columns(columns: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """One safetensors file. Columns are unsigned integers; wide ones come first, so that all are
    aligned.

    Raises SaveError where the header would be longer than readers accept.
    """
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, column in ordered:
        header[name] = _entry(_CODES[column.dtype], column.shape, position, column.nbytes)
        position += column.nbytes
    header["checksum"] = _entry("U8", (DIGEST_NBYTES,), position, DIGEST_NBYTES)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_NBYTES_MAX:
        raise SaveError(
            f"small values and containers take {len(text):,} bytes as JSON, of "
            f"{_HEADER_NBYTES_MAX:,} at most",
            advice="Save long lists of numbers as tensors or arrays.",
        )
    body = b"".join(
        [
            struct.pack("<Q", len(text)),
            text,
            *(np.ascontiguousarray(c).tobytes() for _, c in ordered),
        ]
    )
    return body + digest(body)


def _entry(code: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def header_length(first8: bytes | memoryview, what: str) -> int:
    """The header's length in bytes, from the first eight bytes of a safetensors file."""
    if len(first8) < 8 or (length := struct.unpack("<Q", first8[:8])[0]) > _HEADER_NBYTES_MAX:
        raise DamagedError(f"{what} does not begin as a safetensors file does")
    return int(length)


def decode_columns(data: bytes, what: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Columns (views of ``data``, in their stored types) and metadata. ``what`` names the file in
    errors.

    Raises DamagedError for a wrong checksum, and for anything that is not exactly of the form
    written here.
    """
    if (
        len(data) < 8 + DIGEST_NBYTES
        or digest(memoryview(data)[:-DIGEST_NBYTES]) != data[-DIGEST_NBYTES:]
    ):
        raise DamagedError(f"{what} {_damage(data)}")
    return parse_columns(data, what)


def _damage(data: bytes) -> str:
    """What is wrong with a file whose checksum is not right: as far as a look at it tells."""
    if not data:
        return "is empty"
    if data.count(0) == len(data):
        return f"holds {len(data):,} zeros, and nothing else"
    if _MARK not in data:
        return "was not written by Holdfast: it is another program's file, or nothing of it is left"
    return "does not match its own checksum"


def parse_columns(data: bytes | memoryview, what: str) -> tuple[dict[str, Array], dict[str, str]]:
    """As :func:`decode_columns`, of bytes whose checksum is known to be right."""
    length = header_length(data, what)
    header = parse_header(bytes(data[8 : 8 + length]), what)
    body = memoryview(data)[8 + length :]
    columns = {
        name: _column(body, entry, f"column {name!r} of {what}")
        for name, entry in header.items()
        if name != "__metadata__"
    }
    columns.pop("checksum", None)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{what} has no metadata")
    return columns, metadata


def parse_header(text: bytes | str, what: str) -> dict[str, Any]:
    """JSON object without duplicate keys. Raises DamagedError."""
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the header of {what} is not proper JSON") from error
    if not isinstance(header, dict):
        raise DamagedError(f"the header of {what} is not a JSON object")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate key")
    return made


def _column(body: memoryview, entry: Any, what: str) -> Array:
    try:
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        shape = tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"{what} is malformed") from error
    count = 1
    for n in shape:
        count *= n
    inside = 0 <= start <= stop <= len(body) and len(shape) <= 2
    if not inside or min(shape, default=0) < 0 or count * dtype.itemsize != stop - start:
        raise DamagedError(f"{what} lies outside of the file")
    return np.frombuffer(body[start:stop], dtype).reshape(shape)
