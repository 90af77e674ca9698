"""Tasks for rank processes: read samples through torchdata's StatefulDataLoader, in an epoch
that outlasts jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import holdfast

RULES = ("keep", "broadcast", "split", "merge")


class Samples(IterableDataset[int]):
    """The samples that a rank has yet to read; its state is just these."""

    def __init__(self, left: torch.Tensor) -> None:
        self.left = left

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not len(self.left):
            raise StopIteration
        sample, self.left = int(self.left[0]), self.left[1:]
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining samples."""
        return {"left": self.left.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.left = state["left"]


def part_of_an_epoch(load: str | None, save: str | None, samples: int, batches: int) -> list[int]:
    """Resume from a checkpoint, or begin: read some batches (-1: all that is left) of this rank's
    share, save, and return the samples that were read."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(Samples(order[rank::world]), batch_size=3)
    state = {"data": holdfast.PerRank(loader, "split"), "step": 0}
    if load:
        holdfast.load(load, into=state)
    seen: list[int] = []
    batch = iter(loader)
    while batches and (found := next(batch, None)) is not None:
        seen += found.tolist()
        batches -= 1
        state["step"] += 1
    if save:
        holdfast.save(save, state)
    return seen


def save_lists(uri: str) -> None:
    """Save a list for each rule: rank r has r + 1 files left. Beside them, a list of lists that is
    longer on each rank than on the one before."""
    rank = dist.get_rank()
    files = [f"{rank}.{number}" for number in range(rank + 1)]
    state: dict[str, Any] = {rule: holdfast.PerRank(files, rule) for rule in RULES}
    holdfast.save(uri, state | {"lists": [[name] for name in files]})


def dealt_lists(uri: str) -> dict[str, list[str]]:
    """Return this rank's list under each rule."""
    state = {rule: holdfast.PerRank([], rule) for rule in RULES}
    holdfast.load(uri, into=state, strict="state")
    return {rule: per_rank.value for rule, per_rank in state.items()}
