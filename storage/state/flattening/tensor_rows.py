"""Adds tensors to a flat state, one row at a time, and finds the earlier row each is tied to.

Tied tensors have the same bytes in memory and the same layout. Only one of them is stored.
"""

from __future__ import annotations

import numpy as np
import torch

from ....planner.layout import Layout
from ..adapters.tensors import TensorLike
from ..flat_state import FlatState

__all__ = ["TensorRows"]


class TensorRows:
    """Adds rows to ``flat``."""

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._first: dict[int, int] = {}  # by address: the first row that begins there
        self._sharing: dict[int, list[int]] = {}  # by address: rows with different views

    def add(
        self,
        local: torch.Tensor,
        layout: Layout,
        origin: TensorLike,
        container: int,
        name: str,
        *,
        may_be_tied: bool = True,
    ) -> None:
        """Add a row for a tensor, or for one of its parts."""
        flat = self._flat
        row = len(flat.names)
        flat.names.append(name)
        flat.containers.append(container)
        flat.shapes.append(layout.shape)
        flat.dtypes.append(local.dtype)
        flat.locals.append(local.detach() if local.requires_grad else local)
        flat.origins.append(origin)
        flat.layouts.append(layout)
        flat.alias.append(self._alias_of(local, layout, row) if may_be_tied else -1)

    def _alias_of(self, item: torch.Tensor, layout: Layout, row: int) -> int:
        """Return the earlier row that ``item`` is tied to, or -1."""
        address = item.data_ptr()
        if not address or not item.numel():
            return -1
        first = self._first.setdefault(address, row)
        if first == row:
            return -1
        rows = self._sharing.setdefault(address, [first])
        same = (
            r
            for r in rows
            if self._flat.layouts[r] == layout
            and self._flat.shapes[r] == self._flat.shapes[row]
            and _same_bytes(self._flat.locals[r], item)
        )
        root = next(same, -1)
        if root < 0 and row not in rows:
            rows.append(row)
        return root

    def store_first_by_name(self) -> None:
        """Store the first by name of each set of tied tensors.

        Ranks that walk their state in another order then agree.
        """
        flat = self._flat
        alias = np.array(flat.alias, np.int64)
        for root in sorted({row for row in flat.alias if row >= 0}):
            tied = [root, *np.flatnonzero(alias == root).tolist()]
            first = min(tied, key=flat.names.__getitem__)
            alias[tied] = first
            alias[first] = -1
        flat.alias = alias.tolist()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors at the same address have the same elements in the same order."""
    return (
        (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
