"""Tensors as bits: copies that keep every bit of any dtype (NaN payloads, float8, bool above
one)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...planner.box import row_strides

SHORT_NBYTES = 256 << 10
"""Largest short copy; one takes some 20 to 50 µs."""
_move_with_gil = ctypes.PyDLL(None).memmove
_move_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_with_gil.restype = ctypes.c_void_p

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as a dtype that every kernel can copy.

    Lazy conjugation and negation are resolved first.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.dtype.itemsize])


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor without lazy bits as 1-D uint8."""
    # Normalize the strides: a dimension of one element may have any stride, but viewing as another
    # dtype needs a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def typed(data: torch.Tensor, itemsize: int, lengths: Sequence[int]) -> torch.Tensor:
    """Return a 1-D uint8 tensor as an array of shape ``lengths`` with elements of ``itemsize``
    bytes."""
    return data.view(_BITS[itemsize]).view(tuple(lengths))


def typed_storage(memory: memoryview, itemsize: int) -> torch.Tensor:
    """Return all whole elements in ``memory`` as a 1-D tensor of bits of ``itemsize`` bytes."""
    return torch.frombuffer(memory, dtype=_BITS[itemsize], count=len(memory) // itemsize)


def pack(windows: Iterable[torch.Tensor], to: torch.Tensor) -> None:
    """Copy the elements of ``windows``, which are bits, back to back to ``to``, 1-D and uint8.

    Each window is copied in row-major order.
    """
    position = 0
    for window in windows:
        end = position + window.nbytes
        into = typed(to[position:end], window.itemsize, window.shape)
        into.copy_(window, non_blocking=True)
        position = end


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's address; None unless it lies in host memory in row-major order as
    stored."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.data_ptr()
    return None


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of elements that memory has from the tensor's first one to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in steps)


def copy_memory(to: int, source: int, nbytes: int) -> None:
    """Copy memory within this process, like memcpy. Both ranges must be mapped.

    A short copy keeps the GIL. Releasing it while other threads want it costs as much as the copy,
    and getting it back takes up to 5 ms next to a thread that computes in Python.
    """
    if nbytes <= SHORT_NBYTES:
        _move_with_gil(to, source, nbytes)
    else:
        ctypes.memmove(to, source, nbytes)


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` are modified, which it cannot see.

    A backward pass that needs their old values then fails, as after any in-place operation.
    Inference tensors have no version and are skipped.
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def writable(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes ``tensor`` writable.

    Inference tensors are writable in inference mode only, and this thread may not be in it.
    """
    if tensor.is_inference():
        return torch.inference_mode()
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a piece in a local tensor.

    ``start`` and ``within`` are the piece's ``local_start`` and ``local_shape``, see
    :class:`~holdfast.planner.layout.Piece`.
    """

    start: int
    within: tuple[int, ...]

    def window(
        self, local: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return a view of the box at ``offsets`` in the piece."""
        if tuple(local.shape) == self.within:
            strides: Sequence[int] = local.stride()
            first = _dot(self._offsets(), strides)
        else:  # 1-d: elements in order, at any stride
            step = local.stride(0)
            strides = [stride * step for stride in row_strides(self.within)]
            first = self.start * step
        at = local.storage_offset() + first + _dot(offsets, strides)
        return local.as_strided(tuple(lengths), tuple(strides), at)

    def element(self, offsets: Sequence[int]) -> int:
        """Return an element's index in the row-major order of the local tensor."""
        return self.start + _dot(offsets, row_strides(self.within))

    def _offsets(self) -> list[int]:
        """Return the piece's first element as indices of the local tensor."""
        offsets = []
        rest = self.start
        for stride in row_strides(self.within):
            offset, rest = divmod(rest, stride)
            offsets.append(offset)
        return offsets


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
