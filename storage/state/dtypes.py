"""Torch's dtypes by name, and the kinds of tensors and arrays that cannot be stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...errors import StateError, UnsupportedFormatError, UsageError


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its module: ``torch.bfloat16`` → ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str, itemsize: int) -> torch.dtype:
    """Return the dtype of that name.

    Raises UnsupportedFormatError if this torch has none, or one of another size.
    """
    dtype = vars(torch).get(name)  # getattr would import modules for some names
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != itemsize:
        raise UnsupportedFormatError(
            f"this torch ({torch.__version__}) has no dtype {name!r} of {itemsize} bytes",
            advice="Load with a newer torch, or leave these tensors out.",
        )
    return dtype


def empty(shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return uninitialized host memory for a stored tensor. Raises UsageError if there is not
    enough."""
    try:
        return torch.empty(
            tuple(shape), dtype=dtype, device="cpu"
        )  # regardless of the caller's default device
    except RuntimeError as error:  # raised by torch when out of memory
        raise UsageError(
            f"no memory for tensor {name!r} of shape {list(shape)} and dtype {dtype_name(dtype)}",
            advice="Read a slice of it, or load it sharded.",
        ) from error


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why this tensor has no bytes that could be stored; None if it has."""
    if type(tensor) not in _PLAIN and isinstance(tensor, _UNINITIALIZED):
        return "not initialised yet: it has no shape"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_meta:
        return "a meta tensor without data"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    if tensor.is_nested:
        return "a nested tensor"
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    is_wrapper = dispatches or hasattr(tensor, "__tensor_flatten__")
    if type(tensor) not in _PLAIN and is_wrapper:
        return (
            f"a {type(tensor).__module__}.{type(tensor).__qualname__}, whose bytes are in "
            f"other tensors"
        )
    return None


_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)


def is_plain_array(array: np.ndarray) -> bool:
    """Return whether ``array`` is fully described by a plain array. A ``memmap`` is one in a
    file."""
    return type(array) in (np.ndarray, np.memmap)


def numpy_to_torch(array: np.ndarray, path: str) -> torch.Tensor:
    """Return a tensor over the array's memory.

    Raises StateError for arrays of objects, strings or dates.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise StateError(
            f"{path} is a masked array, whose mask would be lost",
            advice="Save its data and its mask.",
        )
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        raise StateError(f"{path} is an array of dtype {array.dtype}, which cannot be saved")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = np.array(array)  # torch has no read-only tensors and no negative strides
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise StateError(
            f"{path} is an array of dtype {array.dtype}, which torch does not have"
        ) from error


Bytes = npt.NDArray[np.uint8]

FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Target dtypes: torch's names, and bytes per element."""


@functools.cache
def is_convertible(source: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether this torch copies elements of one dtype to another, by trying it."""
    ours = torch.zeros(source.itemsize, dtype=torch.uint8).view(source)
    try:
        torch.empty(1, dtype=wanted).copy_(ours)
    except RuntimeError:  # NotImplementedError is a subclass
        return False
    return True


def convert(source: Bytes, kind: tuple[str, int], into: Bytes, dtype: str, name: str) -> None:
    """Convert elements of dtype ``kind`` (name, itemsize) to ``dtype``, one of ``FLOATS``.

    Raises UsageError, naming the tensor, if a finite number would become infinite.
    """
    ours = torch.from_numpy(source).view(dtype_of(*kind))
    theirs = torch.from_numpy(into).view(dtype_of(dtype, FLOATS[dtype]))
    theirs.copy_(ours)
    infinite = theirs.isinf()
    if infinite.any() and not ours.to(torch.float64)[infinite].isinf().all():
        raise UsageError(
            f"tensor {name!r} has numbers that are too large for {dtype}",
            advice="Choose another dtype.",
        )
