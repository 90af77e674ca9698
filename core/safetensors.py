"""Headers of safetensors files: eight bytes of length, a JSON object with an entry for each tensor,
and spaces up to a multiple of some alignment. (https://huggingface.co/docs/safetensors)

Scope: the text of headers. What is in a file, and whether it may be believed, is for those who
write and read it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from .units import round_up

__all__ = [
    "DTYPES",
    "LENGTH_NBYTES",
    "entry",
    "entry_prefix",
    "framed",
    "framed_nbytes",
    "length_in",
]

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""Codes of dtypes that every reader since safetensors 0.4.3 knows. One unknown code makes a reader
refuse the whole file, so dtypes that came later (C64, F8_E8M0) are not here."""

_LENGTH = struct.Struct("<Q")
LENGTH_NBYTES = _LENGTH.size


def entry(code: str, shape: Iterable[int], start: int, stop: int) -> str:
    """The JSON text of a tensor's entry. Bytes are counted from the end of the header."""
    return f"{entry_prefix(code, shape)}[{start},{stop}]}}"


def entry_prefix(code: str, shape: Iterable[int]) -> str:
    """An entry up to its offsets: what all tensors of one dtype and shape have in common."""
    return f'{{"dtype":"{code}","shape":[{",".join(map(str, shape))}],"data_offsets":'


def framed_nbytes(text_nbytes: int, alignment: int) -> int:
    """The least size, a multiple of ``alignment``, of the length and a text of ``text_nbytes``."""
    return round_up(LENGTH_NBYTES + text_nbytes, alignment)


def framed(text: bytes, nbytes: int) -> bytes:
    """The first ``nbytes`` of a file: the length, the text, and spaces."""
    return _LENGTH.pack(nbytes - LENGTH_NBYTES) + text.ljust(nbytes - LENGTH_NBYTES)


def length_in(first: bytes | memoryview) -> int:
    """The length of the header that follows these first bytes of a file. Raises ValueError where
    there are fewer than eight."""
    if len(first) < LENGTH_NBYTES:
        raise ValueError(f"{len(first)} bytes are no length")
    (length,) = _LENGTH.unpack(first[:LENGTH_NBYTES])
    return int(length)
