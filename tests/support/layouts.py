"""A type of tensor with a layout that the package does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece


class Halves(torch.Tensor):
    """Some rows of a larger matrix, from row ``at`` on."""

    rows: int
    at: int

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, *, rows: int, at: int) -> Any:
        made = data.as_subclass(cls)
        made.rows = rows
        made.at = at
        return made

    class Adapter:
        """Reads them."""

        def local(self, tensor: Halves) -> torch.Tensor:
            return tensor.as_subclass(torch.Tensor)

        def layout(
            self, tensor: Halves, local: torch.Tensor, path: Callable[[], str]
        ) -> MeshLayout:
            columns = local.shape[1]
            piece = Piece(Box((tensor.at, 0), tuple(local.shape)), 0, tuple(local.shape))
            return MeshLayout((tensor.rows, columns), (piece,), tuple(local.shape), (0,), 2)

        def recorded(self, tensor: Halves) -> None:
            return None
