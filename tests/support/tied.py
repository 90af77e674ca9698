"""Tasks for rank processes: load untied weights into tied and sharded ones, and partial loads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

__all__ = ["partial_loads", "tied_loads"]


class LM(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def sharded(tied: bool) -> LM:
    """Over all ranks."""
    model = LM(tied)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def tied_loads(uri: str) -> dict[str, Any]:
    """Save an untied model with two different values, then with equal ones, and load each into a
    tied one.

    Return the errors or the loaded weights.
    """
    found: dict[str, Any] = {}
    for name, values in (("differ", (1.0, 2.0)), ("agree", (3.0, 3.0))):
        saved = sharded(False)
        for parameter, value in zip((saved.emb.weight, saved.head.weight), values, strict=True):
            nn.init.constant_(parameter, value)
        holdfast.save(f"{uri}-{name}", {"model": saved})
        for strict in (True, "state"):
            model = sharded(True)
            nn.init.constant_(model.emb.weight, 0.0)
            try:
                holdfast.load(f"{uri}-{name}", into={"model": model}, strict=strict)  # type: ignore[call-overload]
            except holdfast.MismatchError as error:
                found[f"{name} {strict}"] = str(error.differences)
            else:
                weight = model.emb.weight
                assert isinstance(weight, DTensor)
                found[f"{name} {strict}"] = weight.full_tensor().unique().tolist()
    return found


def partial_loads(uri: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load on each rank one stored name of its own and one that was not stored.

    Return the missing and unexpected names in the report.
    """
    rank = dist.get_rank()
    holdfast.save(uri, {"all": torch.ones(3), f"of{rank}": torch.ones(2), "extra": 1})
    into = {"all": torch.zeros(3), f"of{rank}": torch.zeros(2), f"new{rank}": torch.zeros(2)}
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, strict=False, on_report=reports.append)
    return reports[0].missing, reports[0].unexpected
