"""Headers of safetensors files: reads and writes their text.

A header is eight bytes of length, a JSON object with an entry per tensor, and spaces up to a
multiple of some alignment. (https://huggingface.co/docs/safetensors)

Scope: the text of headers. The callers decide on a file's contents, and whether to trust it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .decoded_json import object_from
from .units import round_up

HEADER_NBYTES_MAX = 100_000_000
"""Size limit of headers; readers of safetensors refuse longer ones."""

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
"""Codes of dtypes known to every reader since safetensors 0.4.3. One unknown code makes a reader
refuse the whole file, so later dtypes are not here."""

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
"""Bits per element for each code that safetensors defines."""

NDIM_MAX = 64
"""Maximum number of dimensions, as in torch."""

METADATA = "__metadata__"
"""A header's only key that names no tensor. It holds the file's own metadata as strings."""
_INTS = frozenset([int])  # no bool
_COUNT_MAX = 1 << 62
_LENGTH = struct.Struct("<Q")
LENGTH_NBYTES = _LENGTH.size


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. Byte offsets are relative to the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a header: tensors, and the file's metadata."""

    entries: list[Entry]
    metadata: Mapping[str, str]


def header(entries: Iterable[Entry], metadata: Mapping[str, str], alignment: int) -> bytes:
    """Return the first bytes of a file with these tensors, padded to a multiple of
    ``alignment``."""
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
    """Return the names as JSON strings.

    One call encodes all of them: JSON strings contain no bare line break, so they can be split
    again.
    """
    if not names:
        return []
    return json.dumps(names, separators=("\n", ":"))[1:-1].split("\n")


def from_torch(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the code and shape of a tensor, given a dtype in ``EXPORTED_DTYPES`` and torch's
    shape.

    For fp4, torch counts bytes of two values, and safetensors counts values. Raises ValueError for
    a zero-dimensional pair of values.
    """
    if dtype != _FP4:
        return EXPORTED_DTYPES[dtype], tuple(shape)
    if not shape:
        raise ValueError("of no dimension")
    return EXPORTED_DTYPES[dtype], (*shape[:-1], 2 * shape[-1])


def to_torch(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return torch's dtype and shape for a tensor in a file.

    If torch has no such dtype, return ``code`` and ``shape`` unchanged.
    """
    dtype = _TORCH_DTYPES.get(code, code)
    if dtype != _FP4:
        return dtype, shape
    if not shape or shape[-1] % 2:
        return code, shape  # a row ends within a byte
    return dtype, (*shape[:-1], shape[-1] // 2)


def parsed(text: bytes, data_nbytes: int) -> Header:
    """Parse the header ``text``: its tensors in the order of their bytes, and its metadata.

    The tensors must cover all of the ``data_nbytes`` that follow. The size of a tensor with an
    unknown code is not checked. Raises ValueError for a malformed header.
    """
    names = object_from(text.decode())
    metadata = names.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
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
    return Header(entries, {name: str(text) for name, text in metadata.items()})


def _entry_of(name: str, given: object) -> Entry:
    if not isinstance(given, dict):
        raise ValueError(f"{name!r} is not a tensor")
    code = given.get("dtype")
    if not isinstance(code, str):
        raise ValueError(f"tensor {name!r} has a dtype that is not a string")
    shape = _counts(name, given.get("shape"))
    offsets = _counts(name, given.get("data_offsets"))
    if len(shape) > NDIM_MAX:
        raise ValueError(f"tensor {name!r} has {len(shape):,} dimensions")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!r} has data_offsets that are not a range")
    if code in BITS and 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[code]:
        raise ValueError(f"tensor {name!r} does not fill its data_offsets")
    return Entry(name, code, shape, *offsets)


def _counts(name: str, given: object) -> tuple[int, ...]:
    if (
        isinstance(given, list)
        and _INTS.issuperset(map(type, given))
        and (not given or 0 <= min(given) <= max(given) < _COUNT_MAX)
    ):
        return tuple(given)
    raise ValueError(f"tensor {name!r} has a shape or data_offsets that are not counts")


def entry(code: str, shape: Iterable[int], start: int, stop: int) -> str:
    """Return the JSON text of a tensor's entry, with offsets relative to the end of the header."""
    return f"{entry_prefix(code, shape)}[{start},{stop}]}}"


def entry_prefix(code: str, shape: Iterable[int]) -> str:
    """Return an entry's text up to its offsets, which is equal for all tensors of a dtype and
    shape."""
    return f'{{"dtype":"{code}","shape":[{",".join(map(str, shape))}],"data_offsets":'


def framed_nbytes(text_nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that fits the length field and the text."""
    return round_up(LENGTH_NBYTES + text_nbytes, alignment)


def framed(text: bytes, nbytes: int) -> bytes:
    """Return the first ``nbytes`` of a file: the length, the text, and spaces."""
    return _LENGTH.pack(nbytes - LENGTH_NBYTES) + text.ljust(nbytes - LENGTH_NBYTES)


def length_in(first: bytes | memoryview) -> int:
    """Return the length of the header after these first bytes of a file.

    Raises ValueError if there are fewer than eight.
    """
    if len(first) < LENGTH_NBYTES:
        raise ValueError(f"{len(first)} bytes are too few for a length")
    (length,) = _LENGTH.unpack(first[:LENGTH_NBYTES])
    return int(length)
