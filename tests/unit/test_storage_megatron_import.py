"""Imports of Megatron-core's folders, built by hand: ``common.pt``, objects, and refusals. With Megatron
itself: tests/frameworks."""

from __future__ import annotations

import argparse
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference
from support.importing import Canary, imported
from torch.distributed.checkpoint import FileSystemWriter

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHT = "decoder.layers.weight"
OBJECT = "decoder.layers._extra_state/shard_0.1_1.2"
GROUP = {"lr": 0.5, "betas": (0.9, 0.95), "wd_mult": 1.0, "step": 3.0}


def optimizer(**changed: Any) -> dict[str, Any]:
    """Return the state of a distributed optimizer without its tensors."""
    return {
        "optimizer": {"param_groups": [GROUP]},
        "grad_scaler": {"scale": 4.0},
        "param_state_sharding_type": "fully_reshardable",
    } | changed


def written(folder: Path, common: object, **items: object) -> Path:
    """Return a folder as Megatron lays it out: items by their keys, in no dicts."""
    state = {WEIGHT: torch.arange(6.0).view(2, 3), OBJECT: [None], **items}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def test_common_state_is_imported(tmp_path: Path) -> None:
    """Values and tensors keep their paths; an optimizer and objects go where a job loads them."""
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
    assert difference(expected, imported(written(tmp_path, common))) is None


def test_chain_of_optimizers(tmp_path: Path) -> None:
    """Chained optimizers are imported by number."""
    folder = written(tmp_path, {"optimizer": {0: optimizer(), 1: optimizer()}})
    assert sorted(imported(folder)["optim"]["common"]) == ["0", "1"]


@pytest.mark.parametrize("step", [math.inf, math.nan, 2.5, None])
def test_a_step_that_is_no_whole_number_is_ignored(tmp_path: Path, step: float | None) -> None:
    """Only the other groups' step counts, and the group itself is unchanged."""
    groups = [GROUP, GROUP | {"step": step}]
    common = {"optimizer": optimizer(optimizer={"param_groups": groups})}
    found = imported(written(tmp_path, common))["optim"]["common"]["0"]
    assert found["step"] == 3
    assert difference(groups, found["groups"]) is None


def cyclic() -> dict[str, Any]:
    """Return a state that contains itself."""
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    return state


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
def test_other_optimizers_are_unchanged(tmp_path: Path, other: dict[str, Any]) -> None:
    """State that does not follow the names of parameters keeps its path."""
    found = imported(written(tmp_path, other))
    assert difference(other, {name: found[name] for name in other}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), "object of argparse.Namespace"),
        ([Canary(Path("trace"))], r"posix\.system"),
        (torch.float16, "torch.float16"),
        ([torch.ones(1)], "a tensor at 0"),
    ],
)
def test_objects_are_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, message: str
) -> None:
    """The error says how to leave an object out; Megatron unpickles the file, the import does not."""
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path, {"iteration": 7, "odd": {"one": value}})
    with pytest.raises(holdfast.UnsupportedFormatError, match=message) as caught:
        imported(folder)
    assert "--skip 'odd.one'" in str(caught.value)
    assert "common.pt" in str(caught.value)
    assert imported(folder, skip=["odd.*"])["iteration"] == 7
    assert not (tmp_path / "trace").exists()


def test_pickled_items_are_refused_or_skipped(tmp_path: Path) -> None:
    """Older versions of Transformer Engine write such items."""
    extra = f"{OBJECT}0"
    folder = written(tmp_path, {"iteration": 7}, **{extra: [io.BytesIO(b"x")]})
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"_io\.BytesIO") as caught:
        imported(folder)
    assert f"--skip '{extra}'" in str(caught.value)
    assert OBJECT in imported(folder, skip=[extra])


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ([1], "not a dict of names"),
        ({"odd": {argparse.ArgumentError(None, "x"): 1}}, r"argparse\.ArgumentError"),
        (cyclic(), "contains itself"),
        ({"a.b": 1, "a": {"b": 2}}, "have the same dotted path"),
        ({WEIGHT: 1}, "is in common.pt and elsewhere in the folder"),
    ],
)
def test_impossible_common_state_is_refused(tmp_path: Path, common: object, message: str) -> None:
    """Cycles, colliding names and anything but a dict of names are errors."""
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        imported(written(tmp_path, common))
