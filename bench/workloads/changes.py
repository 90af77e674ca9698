"""Changes of a state between two saves, in different ways of training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Change: TypeAlias = "Callable[[Sequence[torch.Tensor]], None]"
"""Changes some of the tensors in place."""
TABLE_ROW_NBYTES = 4096


def _some(tensors: Sequence[torch.Tensor], share: float) -> Iterator[torch.Tensor]:
    """Yield tensors from the last to the first, up to this share of all bytes."""
    left = share * sum(tensor.nbytes for tensor in tensors)
    for tensor in reversed(tensors):
        if tensor.nbytes <= left:
            left -= tensor.nbytes
            yield tensor


def _of_share(tensors: Sequence[torch.Tensor], share: float) -> None:
    for tensor in _some(tensors, share):
        tensor.add_(1)


def _every_other(tensors: Sequence[torch.Tensor]) -> None:
    """Change the weights and moments of every second matrix, as of the experts that got tokens."""
    for number, tensor in enumerate(tensors):
        if number % 9 < 4:
            tensor.add_(1)


def _rows(tensors: Sequence[torch.Tensor]) -> None:
    """Change 1 % of the rows of one half of the state, in places that vary."""
    for tensor in _some(tensors, 0.5):
        rows = tensor.view(-1)
        width = max(1, TABLE_ROW_NBYTES // tensor.itemsize)
        count = len(rows) // width
        for row in random.choices(range(count), k=max(1, count // 100)) if count else ():
            rows[row * width : (row + 1) * width].add_(1)


CHANGES: dict[str, Change] = {
    "lora": partial(_of_share, share=0.02),
    "partial": partial(_of_share, share=0.37),
    "moe": _every_other,
    "sparse-table": _rows,
    "nothing": lambda tensors: None,
    "everything": partial(_of_share, share=1.0),
}
