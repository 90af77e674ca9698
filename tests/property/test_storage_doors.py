"""Models that are exported from a checkpoint and imported into one, each time in another format."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference, fresh_uri, random_bits, saved
from support.drivers import storage_at
from support.effort import examples
from support.ranks import load_as_ranks, save_as_ranks
from torch import nn

import holdfast
from holdfast import Shard

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
RENAMES = (
    ({}, {}),
    ({"model.*": "*"}, {"*": "model.*"}),
    ({"model.*.weight": "m.*.kernel"}, {"m.*.kernel": "model.*.weight"}),
)
"""Renaming for an export, and back for the import."""


class Layer(nn.Module):
    """A weight, and the scales of its rows if it is quantized."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.zeros(rows, 3, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if dtype.itemsize == 1:
            self.register_buffer("scale", torch.zeros(rows, 1))


@dataclass(frozen=True)
class Plan:
    """A model: rows and dtype of some layers, and for each tied layer the number of its partner."""

    layers: list[tuple[int, torch.dtype]]
    tied: list[int]
    is_reversed: bool

    def build(self, device: str = "cpu") -> nn.Module:
        """Return the model, of zeros, with the tied layers in a submodule."""
        with torch.device(device):
            layers = [Layer(*each) for each in self.layers]
            tied = [Layer(1, torch.float32) for _ in self.tied]
        for layer, number in zip(tied, self.tied, strict=True):
            layer.weight = layers[number % len(layers)].weight
        parts = {"body": nn.ModuleList(layers), "tied": nn.ModuleList(tied)}
        return nn.ModuleDict(dict(reversed(parts.items())) if self.is_reversed else parts)


plans = st.builds(
    Plan,
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(DTYPES)), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), max_size=3),
    st.booleans(),
)


@dataclass(frozen=True)
class Job:
    """A job that holds the model: on one rank, perhaps on meta at first, or in rows on several."""

    world: int
    device: str

    def states(self, model: nn.Module) -> list[Any]:
        """Return the state of each rank."""
        if self.world == 1:
            return [{"model": model}]
        states: list[Any] = [{} for _ in range(self.world)]
        for name, whole in model.state_dict().items():
            rows = -(-len(whole) // self.world)
            for rank, state in enumerate(states):
                at = min(rank * rows, len(whole))
                state[name] = Shard(whole[at : at + rows], shape=whole.shape, offset=(at, 0))
        return [{"model": state} for state in states]

    def save(self, model: nn.Module) -> str:
        """Save; return the checkpoint."""
        if self.world == 1:
            return saved({"model": model})
        uri = fresh_uri()
        save_as_ranks(storage_at(uri), self.states(model))
        return uri

    def load(self, uri: str, plan: Plan, strict: Any) -> nn.Module:
        """Load into another such model; return it."""
        model = plan.build(self.device if self.world == 1 else "cpu")
        states = self.states(model)
        if self.world == 1:
            holdfast.load(uri, into=states[0], strict=strict)
        else:
            load_as_ranks(storage_at(uri), states, strict=strict)
        return model


jobs = st.builds(Job, st.integers(1, 3), st.sampled_from(["cpu", "meta"]))
doors = st.tuples(
    st.sampled_from(["hf", "torch", "dcp"]), st.sampled_from([30, 1000]), st.sampled_from(RENAMES)
)


def through(door: tuple[Any, int, Any], uri: str) -> str:
    """Export a model and import it again; return the new checkpoint."""
    form, file_nbytes, (out, back) = door
    again = fresh_uri()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt" if form == "torch" else f"{folder}/model"
        holdfast.export(uri, path, format=form, rename=out, file_nbytes=file_nbytes)
        holdfast.import_(path, again, rename=back)
    return again


@examples(60)
@given(
    plans, st.tuples(doors, doors), st.tuples(jobs, jobs, jobs), st.sampled_from([True, "state"])
)
def test_a_model_comes_back_through_two_doors(
    plan: Plan, passed: tuple[Any, Any], owners: tuple[Job, Job, Job], strict: Any
) -> None:
    """Every job in the chain loads the same bits, and no tied name counts as missing."""
    model = plan.build()
    rng = np.random.default_rng(1)
    for tensor in model.state_dict().values():
        tensor.copy_(random_bits(rng, tensor.dtype, tuple(tensor.shape)))
    first, *others = owners
    uri = first.save(model)
    for door, job in zip(passed, others, strict=True):
        found = job.load(through(door, uri), plan, strict)
        assert difference(dict(model.state_dict()), dict(found.state_dict())) is None
        assert len(list(found.parameters())) == len(plan.layers)
        uri = job.save(found)
