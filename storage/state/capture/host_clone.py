"""Clones, made at the call, of host tensors that no other method can copy.

These are tensors that are not contiguous. Other threads may write to them or free them during the
copy, so their memory is read in a way that survives both. :meth:`HostClone.is_still` reads it again
after everything else is copied: if it has not changed, all clones were valid at one single moment.
"""

from __future__ import annotations

import torch

from ..compat import neg_view
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
        # A copy of bools would turn any byte but 0 into 1.
        self.copy = _laid_out_like(tensor, span).view(tensor.dtype)
        """The elements in row-major order, with lazy bits resolved."""

    def is_still(self) -> bool:
        """Return whether the memory still holds the copied bytes."""
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
