"""Columns in a safetensors file: named numpy arrays, a JSON header and a checksum.

Integers are stored in the narrowest unsigned type that holds the column's largest entry; the header
names the type. The last column is ``checksum``: 16 bytes, the xxh3-128 digest of every byte before
them. Any safetensors reader opens the file.

Readers trust nothing: they check sizes against the bytes at hand before allocating memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core import safetensors
from ...core.decoded_json import Json, ints_in, object_in, str_in
from ...errors import DamagedError, SaveError
from ...planner.image import DIGEST_NBYTES
from .digest import digest

# Any dtype that safetensors can hold; users of a column check its content.
Column = npt.NDArray[Any]
Columns = Mapping[str, Column]
"""Columns by name."""

_DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
_CODES = {np.dtype(t): code for code, t in _DTYPES.items()}
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
    head = _framed_header(ordered, metadata)
    body = b"".join([head, *(np.ascontiguousarray(column).tobytes() for _, column in ordered)])
    return body + digest(body)


def _framed_header(ordered: list[tuple[str, Column]], metadata: Mapping[str, str]) -> bytes:
    """Return the framed header of a file with these columns followed by the checksum."""
    entries = [f'"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"))}']
    position = 0
    for name, column in ordered:
        end = position + column.nbytes
        entry = safetensors.entry(_CODES[column.dtype], column.shape, position, end)
        entries.append(f"{json.dumps(name)}:{entry}")
        position = end
    checksum = safetensors.entry("U8", (DIGEST_NBYTES,), position, position + DIGEST_NBYTES)
    entries.append(f'"checksum":{checksum}')
    text = f"{{{','.join(entries)}}}".encode()
    nbytes = safetensors.framed_nbytes(len(text), _ALIGNMENT)
    if nbytes - safetensors.LENGTH_NBYTES > HEADER_NBYTES_MAX:
        raise SaveError(
            f"small values and containers take {len(text):,} bytes as JSON, of "
            f"{HEADER_NBYTES_MAX:,} at most",
            advice="Save long lists of numbers as tensors or arrays.",
        )
    return safetensors.framed(text, nbytes)


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
    end = safetensors.LENGTH_NBYTES + _header_length(data, what)
    header = parse_header(bytes(data[safetensors.LENGTH_NBYTES : end]), what)
    body = memoryview(data)[end:]
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise DamagedError(f"{what} has no metadata")
    texts = {name: text for name, text in metadata.items() if isinstance(text, str)}
    if len(texts) < len(metadata):
        raise DamagedError(f"{what} has metadata that is not text")
    columns = {
        name: _column(body, entry, f"column {name!r} of {what}") for name, entry in header.items()
    }
    columns.pop("checksum", None)
    return columns, texts


def _header_length(data: bytes | memoryview, what: str) -> int:
    try:
        length = safetensors.length_in(data)
    except ValueError:
        length = HEADER_NBYTES_MAX + 1
    if length > HEADER_NBYTES_MAX:
        raise DamagedError(f"{what} does not begin like a safetensors file")
    return length


def parse_header(text: bytes | str, what: str) -> dict[str, Json]:
    """Return a JSON object without duplicate keys. Raises DamagedError."""
    try:
        header: Json = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the header of {what} is not proper JSON") from error
    if not isinstance(header, dict):
        raise DamagedError(f"the header of {what} is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate key")
    return made


def _column(body: memoryview, entry: Json, what: str) -> Column:
    try:
        fields = object_in(entry, "an entry")
        dtype = np.dtype(_DTYPES[str_in(fields["dtype"], "dtype")])
        shape = ints_in(fields["shape"], "shape")
        start, stop = ints_in(fields["data_offsets"], "data_offsets")
    except (KeyError, ValueError) as error:
        raise DamagedError(f"{what} is malformed") from error
    count = 1
    for n in shape:
        count *= n  # in Python's integers, which do not wrap
    inside = 0 <= start <= stop <= len(body) and len(shape) <= 2
    if not inside or min(shape, default=0) < 0 or count * dtype.itemsize != stop - start:
        raise DamagedError(f"{what} lies outside of the file")
    return np.frombuffer(body[start:stop], dtype).reshape(shape)
