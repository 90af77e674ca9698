"""Tensors as bits: copies that keep every bit, whatever the dtype means (NaN payloads, float8, bool
above one)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence

import torch

__all__ = [
    "SHORT_NBYTES",
    "address_of",
    "as_bits",
    "copy_memory",
    "mark_written",
    "pack",
    "typed",
    "typed_storage",
    "writable",
]

SHORT_NBYTES = 256 << 10
"""Copied in some 20 to 50 µs."""
_move_with_gil = ctypes.PyDLL(None).memmove
_move_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_with_gil.restype = ctypes.c_void_p

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, of a dtype that every kernel can copy. Lazy conjugation and negation are
    resolved first."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.dtype.itemsize])


def typed(data: torch.Tensor, itemsize: int, lengths: Sequence[int]) -> torch.Tensor:
    """A 1-D uint8 tensor, seen as bits of ``itemsize`` bytes in an array of shape ``lengths``."""
    return data.view(_BITS[itemsize]).view(tuple(lengths))


def typed_storage(memory: memoryview, itemsize: int) -> torch.Tensor:
    """All whole elements in ``memory``, as a 1-D tensor of bits of ``itemsize`` bytes."""
    return torch.frombuffer(memory, dtype=_BITS[itemsize], count=len(memory) // itemsize)


def pack(windows: Iterable[torch.Tensor], to: torch.Tensor) -> None:
    """Copy the elements of ``windows``, which are bits, to ``to``, 1-D and uint8: each window in
    row-major order, one behind the other."""
    position = 0
    for window in windows:
        end = position + window.nbytes
        into = typed(to[position:end], window.itemsize, window.shape)
        into.copy_(window, non_blocking=True)
        position = end


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the elements lie in row-major order in this process's memory, bit for bit; None if they
    do not."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.data_ptr()
    return None


def copy_memory(to: int, source: int, nbytes: int) -> None:
    """memcpy between addresses of this process. The caller makes sure that both ranges are mapped.

    A short copy keeps the GIL. To release it costs as much as the copy where other threads want it,
    and to get it back takes up to 5 ms beside one that computes in Python.
    """
    if nbytes <= SHORT_NBYTES:
        _move_with_gil(to, source, nbytes)
    else:
        ctypes.memmove(to, source, nbytes)


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` are written to, which it cannot see: a backward that needs
    their old values then fails, as after any operation in place. Inference tensors have no
    version."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def writable(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Inference tensors can be written to in inference mode alone: their owner may be in it, this
    thread is not."""
    if tensor.is_inference():
        return torch.inference_mode()
    return contextlib.nullcontext()
