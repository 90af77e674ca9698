"""Copies of tensors that are made at the call, of those for which nothing better is known.

In host memory these are tensors that are not contiguous. Other threads may write to them, or free
them, even now. So the memory is read with care, and :meth:`HostClone.is_still` reads it again when
all else is copied: if it has not changed, there was a moment at which all was as it is in the
copies.
"""

from __future__ import annotations

import torch

from .compat import neg_view
from .memory_digests import digests_of
from .process_memory import GoneError

__all__ = ["HostClone"]


class HostClone:
    """A contiguous copy of ``tensor``, which is in host memory. Raises GoneError."""

    def __init__(self, tensor: torch.Tensor) -> None:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((length - 1) * stride for length, stride in steps)
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        span = torch.empty(elements, dtype=dtype, device="cpu")
        self._memory = [(tensor.data_ptr(), span.nbytes)]
        self._digests = digests_of(self._memory, span.data_ptr())
        # A copy of bools would make any byte but 0 a 1.
        self.copy = _laid_out_like(tensor, span).view(tensor.dtype)
        """The elements in row-major order, without lazy bits."""

    def is_still(self) -> bool:
        """Whether the memory holds the same as when it was copied."""
        try:
            return digests_of(self._memory) == self._digests
        except GoneError:
            return False


def _laid_out_like(tensor: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    view = span.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    if tensor.is_neg():
        view = neg_view(view)
    return view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
