"""The door into torch's distributed checkpoint (DCP), in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.errors import DamagedError, MismatchError, ReplacedError
from holdfast.storage.integrations.dcp import HoldfastReader

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model = torch.nn.Linear(5, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optim.step()
    return model, optim


def full_state() -> dict[str, Any]:
    """Tensors of all sorts and values of all kinds, as deep as DCP and Holdfast differ in how they
    name them."""
    model, optim = trained()
    t = torch.arange(12.0).reshape(3, 4)
    return {
        "model": dict(model.state_dict()),
        "optim": optim.state_dict(),
        "plain": [1, 2, (3,)],
        "mixed": [t, {"a": 1}, t + 1],
        "tuple": (t + 2, 5, {"x": None}),
        "array": np.arange(3),
        "none": None,
        "text": "x",
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "turned": (t + 4).T,
        "half": t.bfloat16(),
        "nested": [[1], [2.5, True]],
        "no_items": [],
        "bytes": b"\x00\x01",
        "dtype": torch.float16,
    }


def emptied(value: Any) -> Any:
    """The same tensors and containers, with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [emptied(item) for item in value]
    return "nothing yet"


def built(uri: Path, keys: set[str] | None = None, **options: Any) -> dict[str, Any]:
    """A state that DCP makes from the checkpoint alone."""
    made: dict[str, Any] = {}
    _load_state_dict(
        made,
        HoldfastReader(uri, **options),
        no_dist=True,
        planner=_EmptyStateDictLoadPlanner(keys=keys),
    )
    return made


def cause_of(call: Callable[[], object]) -> BaseException:
    """What a call of DCP fails of."""
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    return error


def test_dcp_loads_what_holdfast_has_saved(tmp_path: Path) -> None:
    """Into a state: tensors in place, and values, of every kind and in every container."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    into = emptied(state)
    weight = into["model"]["weight"]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference(state, into) is None
    assert into["model"]["weight"] is weight


def test_dcp_builds_the_whole_state(tmp_path: Path) -> None:
    """Without a state to load into, by the names and paths in the metadata; DCP's keys are text."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    made = built(tmp_path / "c")
    expected = copy.deepcopy(state)
    expected["optim"]["state"] = {
        str(key): item for key, item in expected["optim"]["state"].items()
    }
    expected["turned"] = expected["turned"].contiguous()
    assert difference(expected, made) is None


def test_a_part_of_the_state_is_loaded_by_its_keys(tmp_path: Path) -> None:
    """A prefix, and a single name."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    made = built(tmp_path / "c", {"model", "text"})
    assert difference({"text": "x", "model": state["model"]}, made) is None


def test_a_partial_load_leaves_what_is_not_stored(tmp_path: Path) -> None:
    """DCP's own rule: a name that is not in the checkpoint is an error, unless it is allowed."""
    holdfast.save(tmp_path / "c", {"a": torch.ones(2), "unused": 1})
    into = {"a": torch.zeros(2), "b": torch.zeros(2)}
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=reader))
    assert "Missing key in checkpoint state_dict: b" in str(error)
    dcp.load(into, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert difference({"a": torch.ones(2), "b": torch.zeros(2)}, into) is None


class RenamingPlanner(DefaultLoadPlanner):
    """Loads ``old.x`` as ``x``."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        names = self.metadata.state_dict_metadata
        renamed = {name.removeprefix("old."): each for name, each in names.items()}
        self.metadata = Metadata(renamed, self.metadata.planner_data)
        plan = super().create_local_plan()
        for number, item in enumerate(plan.items):
            index = type(item.storage_index)(
                f"old.{item.storage_index.fqn}", item.storage_index.offset
            )
            plan.items[number] = type(item)(
                item.type,
                item.dest_index,
                item.dest_offsets,
                index,
                item.storage_offsets,
                item.lengths,
            )
        return plan


def test_a_planner_may_rename(tmp_path: Path) -> None:
    """What is read is what the plan's storage index names."""
    holdfast.save(tmp_path / "c", {"old": {"w": torch.arange(6.0), "lr": 0.5}})
    into = {"w": torch.zeros(6), "lr": 0.0}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"), planner=RenamingPlanner())
    assert difference({"w": torch.arange(6.0), "lr": 0.5}, into) is None


def test_tensors_that_are_not_contiguous_are_filled_in_place(tmp_path: Path) -> None:
    """A transposed tensor, and a part of a larger one."""
    t = torch.arange(12.0).reshape(3, 4)
    holdfast.save(tmp_path / "c", {"t": t, "u": t + 1})
    whole = torch.zeros(3, 8)
    into = {"t": torch.zeros(4, 3).T, "u": whole[:, 2:6]}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference({"t": t, "u": t + 1}, {k: v.contiguous() for k, v in into.items()}) is None
    assert whole.sum() == (t + 1).sum()


def test_another_dtype_is_refused_unless_cast(tmp_path: Path) -> None:
    """DCP's own reader casts without a word; 1e20 would become infinity."""
    holdfast.save(tmp_path / "c", {"w": torch.tensor([0.5, 1e20])})
    into = {"w": torch.zeros(2, dtype=torch.float16)}
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=reader))
    assert isinstance(error, MismatchError)
    assert "w: dtype float32 in the checkpoint, float16 in the state" in str(error)
    assert into["w"].tolist() == [0, 0]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c", cast=True))
    assert into["w"].tolist() == [0.5, float("inf")]


def test_a_flipped_byte_is_an_error_for_dcp_too(tmp_path: Path) -> None:
    """And not a wrong value."""
    holdfast.save(tmp_path / "c", {"w": torch.zeros(1000)})
    (image,) = tmp_path.glob("c/data/*/0.safetensors")
    data = bytearray(image.read_bytes())
    data[data.index(b"}") + 3000] ^= 1
    image.write_bytes(data)
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load({"w": torch.zeros(1000)}, storage_reader=reader))
    assert isinstance(error, DamagedError)


def test_a_checkpoint_that_is_replaced_meanwhile_is_never_mixed(tmp_path: Path) -> None:
    """Between metadata and data, and between two ranks."""
    holdfast.save(tmp_path / "c", {"w": torch.zeros(10)})
    reader = HoldfastReader(tmp_path / "c")
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(10)}, reader.read_metadata(), True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    holdfast.save(tmp_path / "c", {"w": torch.ones(10)})
    with pytest.raises(ReplacedError, match="while it was being read"):
        reader.read_data(plan, planner)
    other = HoldfastReader(tmp_path / "c")
    with pytest.raises(ReplacedError, match="while ranks began"):
        reader.prepare_global_plan([plan, other.prepare_local_plan(LoadPlan([]))])


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """The message says where nothing was found."""
    reader = HoldfastReader("memory://nowhere")
    error = cause_of(
        lambda: dcp.load(
            {"w": torch.zeros(1)}, storage_reader=reader, checkpoint_id=str(tmp_path / "gone")
        )
    )
    assert "nothing is committed here" in str(error)
    assert "gone" in str(error)
    assert HoldfastReader.validate_checkpoint_id("s3://bucket/run")
    assert not HoldfastReader.validate_checkpoint_id("s3:/bucket")


def test_tied_tensors_that_are_stored_apart_are_not_mixed(tmp_path: Path) -> None:
    """One tensor of the state under two names: their values agree, or that is an error."""
    holdfast.save(tmp_path / "c", {"a": torch.arange(4.0), "b": torch.arange(4.0) + 0})
    holdfast.save(tmp_path / "d", {"a": torch.zeros(4), "b": torch.ones(4)})
    one = torch.zeros(4)
    dcp.load({"a": one, "b": one}, storage_reader=HoldfastReader(tmp_path / "c"))
    assert one.tolist() == [0, 1, 2, 3]
    error = cause_of(
        lambda: dcp.load({"a": one, "b": one}, storage_reader=HoldfastReader(tmp_path / "d"))
    )
    assert isinstance(error, MismatchError)
