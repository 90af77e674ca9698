"""Headers of safetensors files: eight bytes of length, a JSON object with an entry for each tensor,
and spaces up to a multiple of some alignment. (https://huggingface.co/docs/safetensors)

Scope: the text of headers. What is in a file, and whether it may be believed, is for the code that
writes and reads it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .units import round_up

__all__ = [
    "BITS",
    "DTYPES",
    "EXPORTED_DTYPES",
    "HEADER_NBYTES_MAX",
    "LENGTH_NBYTES",
    "METADATA",
    "Entry",
    "Header",
    "entry",
    "entry_prefix",
    "framed",
    "framed_nbytes",
    "from_torch",
    "header",
    "length_in",
    "parsed",
    "quoted",
    "to_torch",
]

HEADER_NBYTES_MAX = 100_000_000
"""Readers of safetensors refuse longer headers."""

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
refuse the whole file, so dtypes that came later are not here."""

_FP4 = "float4_e2m1fn_x2"
EXPORTED_DTYPES = {
    **DTYPES,
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    _FP4: "F4",
}
"""Codes of all dtypes that an export writes. safetensors 0.7 and later know them."""

_TORCH_DTYPES = {code: dtype for dtype, code in EXPORTED_DTYPES.items()}
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of each code that safetensors defines."""

NDIM_MAX = 64
"""Torch has no tensors of more dimensions."""

METADATA = "__metadata__"
"""The key of a header that names no tensor: texts that a file says of itself."""
_INTS = frozenset([int])  # no bool
_COUNT_MAX = 1 << 62
_LENGTH = struct.Struct("<Q")
LENGTH_NBYTES = _LENGTH.size


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. Bytes are counted from the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a header: tensors, and the file's metadata."""

    entries: list[Entry]
    metadata: Mapping[str, str]


def header(entries: Iterable[Entry], metadata: Mapping[str, str], alignment: int) -> bytes:
    """The first bytes of a file with these tensors, a multiple of ``alignment``."""
    listed = list(entries)
    prefixes = {kind: entry_prefix(*kind) for kind in {(e.code, e.shape) for e in listed}}
    texts = [f'"{METADATA}":{json.dumps(metadata)}']
    texts += [
        f"{name}:{prefixes[e.code, e.shape]}[{e.start},{e.stop}]}}"
        for name, e in zip(quoted([e.name for e in listed]), listed, strict=True)
    ]
    text = f"{{{','.join(texts)}}}".encode()
    return framed(text, framed_nbytes(len(text), alignment))


def quoted(names: Sequence[str]) -> list[str]:
    """The names as JSON texts, in one call for all: JSON has no bare line break inside a string, so
    they can be told apart again."""
    if not names:
        return []
    return json.dumps(names, separators=("\n", ":"))[1:-1].split("\n")


def from_torch(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return code and shape of a tensor, for a dtype in ``EXPORTED_DTYPES`` and its shape in torch,
    which counts bytes of two values where safetensors counts the values. Raises ValueError for two
    values that have no dimension."""
    if dtype != _FP4:
        return EXPORTED_DTYPES[dtype], tuple(shape)
    if not shape:
        raise ValueError("of no dimension")
    return EXPORTED_DTYPES[dtype], (*shape[:-1], 2 * shape[-1])


def to_torch(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return torch's dtype and shape for a tensor in a file. Where torch has none, return ``code``
    and ``shape`` unchanged."""
    dtype = _TORCH_DTYPES.get(code, code)
    if dtype != _FP4:
        return dtype, shape
    if not shape or shape[-1] % 2:
        return code, shape  # a row ends within a byte
    return dtype, (*shape[:-1], shape[-1] // 2)


def parsed(text: bytes, data_nbytes: int) -> Header:
    """Return the tensors that the header ``text`` names, in the order of their bytes, and its
    metadata. The tensors take all of the ``data_nbytes`` that follow. For an unknown code, the size
    is not checked. Raises ValueError for a malformed header."""
    try:
        names = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(names, dict):
        raise ValueError("the header is no JSON object")
    metadata = names.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is no object of texts")
    entries = sorted(
        (_entry_of(name, given) for name, given in names.items()), key=lambda e: (e.start, e.stop)
    )
    end = 0
    for e in entries:
        if e.start != end:
            raise ValueError(f"the bytes of tensor {e.name!r} begin at {e.start}, not at {end}")
        end = e.stop
    if end != data_nbytes:
        raise ValueError(f"the tensors take {end:,} bytes of {data_nbytes:,}")
    return Header(entries, metadata)


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the header has a name twice")
    return found


def _entry_of(name: str, given: object) -> Entry:
    if not isinstance(given, dict):
        raise ValueError(f"{name!r} is no tensor")
    code = given.get("dtype")
    if not isinstance(code, str):
        raise ValueError(f"tensor {name!r} has a dtype that is no text")
    shape = _counts(name, given.get("shape"))
    offsets = _counts(name, given.get("data_offsets"))
    if len(shape) > NDIM_MAX:
        raise ValueError(f"tensor {name!r} has {len(shape):,} dimensions")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!r} has data_offsets that are no range")
    if code in BITS and 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[code]:
        raise ValueError(f"tensor {name!r} does not take the bytes of its data_offsets")
    return Entry(name, code, shape, *offsets)


def _counts(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not _are_counts(given):
        raise ValueError(f"tensor {name!r} has a shape or data_offsets that are no numbers")
    return tuple(given)


def _are_counts(given: list[Any]) -> bool:
    if not _INTS.issuperset(map(type, given)):
        return False
    return not given or 0 <= min(given) <= max(given) < _COUNT_MAX


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
