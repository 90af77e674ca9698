"""Tasks for rank processes: read samples through torchdata's StatefulDataLoader, in an epoch
that outlasts jobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import holdfast

from .bits import difference

__all__ = ["dealt_lists", "own_bytes", "part_of_an_epoch", "save_lists"]

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
        """What is left."""
        return {"left": self.left.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.left = state["left"]


def part_of_an_epoch(
    load: str | None, save: str | None, samples: int, batches: int
) -> tuple[list[int], float]:
    """Go on from a checkpoint, or begin: read some batches (-1: all that is left) of this rank's
    share, and save. Returns the samples that were read, and a random number, of a generator that
    each rank seeds by itself."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(Samples(order[rank::world]), batch_size=3)
    dice = random.Random(rank)
    state = {"data": holdfast.PerRank(loader, "split"), "dice": holdfast.PerRank(dice), "step": 0}
    if load:
        holdfast.load(load, into=state)
    seen: list[int] = []
    batch = iter(loader)
    while batches and (found := next(batch, None)) is not None:
        seen += found.tolist()
        batches -= 1
        state["step"] += 1
    drawn = dice.random()
    if save:
        holdfast.save(save, state)
    return seen, drawn


def own_bytes(uri: str, value: Any) -> tuple[bool, int]:
    """Save and load a tensor of this rank's own, or a dict with one: whether it came back, and the
    bytes that were wanted for that."""
    own: Any = torch.full((10_000,), float(dist.get_rank()))
    if value is dict:
        own = {"t": own, "nothing": []}
    holdfast.save(uri, {"own": holdfast.PerRank(own)})
    into = {"own": holdfast.PerRank(None)}
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, on_report=reports.append)
    return difference(own, into["own"].value) is None, reports[0].bytes_wanted


def save_lists(uri: str) -> None:
    """Save a list for each rule: rank r has r + 1 files left. Beside them, a list of lists that is
    longer on each rank than on the one before."""
    rank = dist.get_rank()
    files = [f"{rank}.{number}" for number in range(rank + 1)]
    state: dict[str, Any] = {rule: holdfast.PerRank(files, rule) for rule in RULES}
    holdfast.save(uri, state | {"lists": [[name] for name in files]})


def dealt_lists(uri: str) -> dict[str, list[str]]:
    """What this rank gets of them by each rule."""
    state = {rule: holdfast.PerRank([], rule) for rule in RULES}
    holdfast.load(uri, into=state, strict="state")
    return {rule: per_rank.value for rule, per_rank in state.items()}
