"""``Checkpoint.read_shares``: tensors one after the other, whole or divided, within a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import difference, saved

import holdfast


def state() -> dict[str, Any]:
    """Matrices, vectors, a scalar, and tied tensors."""
    embed = torch.arange(70.0).view(10, 7)
    layers = {
        str(i): {"q": torch.arange(24.0).view(6, 4) + i, "o": torch.arange(20).view(4, 5)}
        for i in range(3)
    }
    return {
        "model": {"embed": embed, "head": embed, "layers": layers, "scale": torch.tensor(2.0)},
        "step": 1,
    }


@pytest.mark.parametrize("budget_nbytes", [0, 200, 1 << 20])
def test_whole_tensors_come_in_the_order_of_the_state(budget_nbytes: int) -> None:
    """All of them, or those that are chosen; tied ones by each of their names."""
    with holdfast.open(saved(state())) as c:
        found = dict(c.read_shares(budget_nbytes=budget_nbytes))
        assert list(found) == list(c.tensors)
        expected = {name: c.read(name) for name in c.tensors}
        assert difference(expected, found) is None
        assert [name for name, _ in c.read_shares(["*.q"])] == [
            f"model.layers.{i}.q" for i in range(3)
        ]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_shares_are_those_of_torch_chunk(world: int) -> None:
    """Shares follow patterns or a function; tensors without a rule are whole on every rank."""
    rules = {"*.q": 0, "*.o": -1, "model.embed": 0}
    with holdfast.open(saved(state())) as c:
        for rank in range(world):
            for split in (
                rules,
                lambda name, shape: {"q": 0, "o": 1, "embed": 0}.get(name.split(".")[-1]),
            ):
                for name, tensor in c.read_shares(rank=rank, world=world, split=split):
                    whole = c.read(name)
                    dim = {"q": 0, "o": 1, "embed": 0}.get(name.split(".")[-1])
                    if dim is not None:
                        chunks = whole.chunk(world, dim)
                        whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
                    assert difference(whole, tensor) is None, (name, rank)


def test_what_cannot_be_is_refused_at_once() -> None:
    """Before anything is read."""
    with holdfast.open(saved(state())) as c:
        with pytest.raises(holdfast.UsageError, match="rank 2 is not one of 2"):
            c.read_shares(rank=2, world=2)
        with pytest.raises(
            holdfast.UsageError, match=r"'model\.scale' of shape \[\] has no dimension 0"
        ):
            c.read_shares(split={"*": 0})
        with pytest.raises(holdfast.UsageError, match="no tensor has a name like 'x'"):
            c.read_shares(["x"])
