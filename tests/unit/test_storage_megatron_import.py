"""Importing folders of Megatron-core, built by hand: what of ``common.pt`` and of objects comes over,
where it lies then, and what is refused. With Megatron itself: tests/frameworks."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference, fresh_uri
from support.dcp_tasks import in_order
from support.importing import imported
from torch.distributed.checkpoint import FileSystemWriter

import holdfast
from holdfast.drivers.memory import MemoryDriver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHT = "decoder.layers.weight"
OBJECT = "decoder.layers._extra_state/shard_0.1_1.2"
GROUP = {"lr": 0.5, "betas": (0.9, 0.95), "wd_mult": 1.0, "step": 3.0}


def optimizer(**changed: Any) -> dict[str, Any]:
    """What a distributed optimizer gives, without its tensors."""
    return {
        "optimizer": {"param_groups": [GROUP]},
        "grad_scaler": {"scale": 4.0},
        "param_state_sharding_type": "fully_reshardable",
    } | changed


def written(folder: Path, common: object, **items: object) -> Path:
    """A folder as Megatron lays it out: items by their keys, in no dicts."""
    state = {WEIGHT: torch.arange(6.0).view(2, 3), OBJECT: [None], **items}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def test_what_all_ranks_have_in_common_comes_over(tmp_path: Path) -> None:
    """Values at their paths, tensors among them; what an optimizer has is where a job that loads
    looks for it, and the value of an object where one that Holdfast has saved would be."""
    common = {
        "iteration": 7,
        "optimizer": optimizer(),
        "scheduler": {"steps": [1, 2], "none": {}},
        "scale": torch.tensor([2.0, 3.0]),
    }
    expected = {
        WEIGHT: torch.arange(6.0).view(2, 3),
        OBJECT: {"data": None},
        "iteration": 7,
        "scheduler": {"steps": [1, 2], "none": {}},
        "scale": torch.tensor([2.0, 3.0]),
        "optim": {"common": {"0": {"groups": [GROUP], "step": 3, "scaler": {"scale": 4.0}}}},
    }
    assert difference(in_order(expected), in_order(imported(written(tmp_path, common)))) is None


def test_tensors_alone(tmp_path: Path) -> None:
    """Where nothing is in common."""
    assert sorted(imported(written(tmp_path, {}))) == [OBJECT, WEIGHT]


def test_a_chain_of_optimizers_comes_over(tmp_path: Path) -> None:
    """By number."""
    folder = written(tmp_path, {"optimizer": {0: optimizer(), 1: optimizer()}})
    assert sorted(imported(folder)["optim"]["common"]) == ["0", "1"]


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": optimizer(param_state_sharding_type="dp_reshardable")},
        {"optimizer": {0: optimizer(), 1: {"lr": 1.0}}},
        {"optimizer": optimizer(), "optim": 1},
        {"optimizer": optimizer(optimizer=[1])},
        {"optimizer": 5},
        {"optimizer": {}},
    ],
)
def test_other_optimizers_stay_as_they_are(tmp_path: Path, other: dict[str, Any]) -> None:
    """Those of which nothing would be found by the names of parameters."""
    found = imported(written(tmp_path, other))
    assert difference(in_order(other), in_order({name: found[name] for name in other})) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), "object of argparse.Namespace"),
        ([1, argparse.Namespace(lr=1)], "object of argparse.Namespace"),
        (io.BytesIO(b"x"), "object of _io.BytesIO"),
        (torch.float16, "torch.float16"),
        ([torch.ones(1)], "a tensor at 0"),
    ],
)
def test_values_that_are_objects_are_refused_by_name_or_skipped(
    tmp_path: Path, value: object, message: str
) -> None:
    """The error says how to leave them out."""
    folder = written(tmp_path, {"iteration": 7, "odd": {"one": value}})
    with pytest.raises(holdfast.UnsupportedFormatError, match=message) as caught:
        imported(folder)
    assert "--skip 'odd.one'" in str(caught.value)
    assert "common.pt" in str(caught.value)
    assert imported(folder, skip=["odd.*"])["iteration"] == 7
    found = imported(folder, only=[WEIGHT])
    assert difference({WEIGHT: torch.arange(6.0).view(2, 3)}, found) is None


def test_a_key_that_is_an_object_is_refused(tmp_path: Path) -> None:
    """By the name of its class."""
    folder = written(tmp_path, {"odd": {argparse.ArgumentError(None, "x"): 1}})
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"argparse\.ArgumentError"):
        imported(folder)


def test_objects_that_need_pickle_are_refused_by_name_or_skipped(tmp_path: Path) -> None:
    """As older versions of Transformer Engine have them."""
    extra = f"{OBJECT}0"
    folder = written(tmp_path, {"iteration": 7}, **{extra: [io.BytesIO(b"x")]})
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"_io\.BytesIO") as caught:
        imported(folder)
    assert f"--skip '{extra}'" in str(caught.value)
    assert OBJECT in imported(folder, skip=[extra])


class Canary:
    """Pickled as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("place", ["value", "list", "all of it", "key"])
def test_a_file_that_asks_for_anything_is_refused(tmp_path: Path, place: str) -> None:
    """Megatron unpickles it; the import does not, and makes nothing."""
    trace = tmp_path / "trace"
    common: dict[str, Any] = {
        "value": {"bad": Canary(trace)},
        "list": {"bad": [Canary(trace)]},
        "all of it": Canary(trace),
        "key": {Canary(trace): 1},
    }
    folder = written(tmp_path / "folder", common[place])
    uri = fresh_uri()
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"posix\.system|not a dict of names"):
        holdfast.import_(folder, uri)
    assert not trace.exists()
    assert not MemoryDriver(uri.removeprefix("memory://")).objects
    function, arguments = Canary(trace).__reduce__()
    function(*arguments)
    assert trace.exists()  # it would be seen


def cyclic() -> dict[str, Any]:
    """Contains itself."""
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    return state


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ([1], "not a dict of names"),
        (cyclic(), "contains itself"),
        ({"a.b": 1, "a": {"b": 2}}, "have the same dotted path"),
        ({WEIGHT: 1}, "is in common.pt and elsewhere in the folder"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, common: object, message: str) -> None:
    """Before a tensor is read."""
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        imported(written(tmp_path, common))


def test_a_file_that_was_cut_is_damage(tmp_path: Path) -> None:
    """As every file of a folder."""
    folder = written(tmp_path, {"iteration": 7})
    whole = (folder / "common.pt").read_bytes()
    (folder / "common.pt").write_bytes(whole[:-40])
    with pytest.raises((holdfast.DamagedError, holdfast.UnsupportedFormatError)):
        imported(folder)
