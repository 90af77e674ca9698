"""Compare states to the last bit, and make tensors of any bits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import holdfast

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_counter = itertools.count()


def fresh_uri() -> str:
    """Return the URI of a store in memory that nobody else uses."""
    return f"memory://test-{next(_counter)}"


def saved(state: Any) -> str:
    """Return a new checkpoint of ``state``, in memory."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    return uri


def image_in(folder: Path) -> Path:
    """Return the only image of a checkpoint in a folder."""
    (image,) = folder.glob("data/*/0.safetensors")
    return image


def flip(file: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@st.composite
def flipped_bits(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw these bytes with one bit flipped."""
    data = bytearray(whole)
    data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


def containers(
    keys: st.SearchStrategy[Any],
) -> Callable[[st.SearchStrategy[Any]], st.SearchStrategy[Any]]:
    """Return a function that makes strategies for dicts, lists and tuples of items."""
    return lambda items: (
        st.dictionaries(keys, items, max_size=4)
        | st.lists(items, max_size=3)
        | st.lists(items, max_size=3).map(tuple)
    )


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_INTS[plain.dtype.itemsize]).contiguous().numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of exactly these bytes."""
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        target = tensor.view(_INTS[dtype.itemsize])
        target.copy_(torch.frombuffer(bytearray(data), dtype=_INTS[dtype.itemsize]).reshape(shape))
    return tensor


def random_bits(
    rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor of random bits, which may be any NaN, infinity or denormal."""
    return from_bytes(rng.bytes(math.prod(shape) * dtype.itemsize), dtype, shape)


def difference(a: Any, b: Any, path: str = "state") -> str | None:
    """Return where two states differ in type, structure or a single bit; None if nowhere. The order
    of dict keys does not matter."""
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b, path)
    if isinstance(a, np.ndarray):
        same = (
            type(b) is np.ndarray
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
        return None if same else f"{path}: {a!r} is not {b!r}"
    if isinstance(a, Mapping):
        if type(b) not in (dict, type(a)) or {(type(k), repr(k)) for k in a} != {
            (type(k), repr(k)) for k in b
        }:
            return f"{path}: {a!r} is not {b!r}"
        theirs = {(type(k), repr(k)): v for k, v in b.items()}
        return _first(
            difference(v, theirs[type(k), repr(k)], f"{path}[{k!r}]") for k, v in a.items()
        )
    if type(a) is not type(b):
        return f"{path}: {type(a)} is not {type(b)}"
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} items are not {len(b)}"
        return _first(
            difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    return None if _same_value(a, b) else f"{path}: {a!r} is not {b!r}"


def _first(found: Any) -> str | None:
    return next((text for text in found if text is not None), None)


def _tensor_difference(a: torch.Tensor, b: Any, path: str) -> str | None:
    if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return (
            f"{path}: {a.dtype} {list(a.shape)} is not {getattr(b, 'dtype', type(b))} "
            f"{list(getattr(b, 'shape', ()))}"
        )
    return None if raw(a) == raw(b) else f"{path}: the bits differ"


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return _same_value(a.real, b.real) and _same_value(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def plain(value: Any) -> Any:
    """Convert columns and dataclasses to nested lists, for comparison."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return sorted(value) if isinstance(value, set) else repr(value)
