"""The checkpoints that Lightning's Trainer leaves behind, with the plugin and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="not installed: make frameworks")

from support.lightning_matrix import CASES, PLUGINS, left, outcome, outcomes, train  # noqa: E402
from support.rank_processes import RankProcesses  # noqa: E402

import holdfast  # noqa: E402
from holdfast.storage.integrations.lightning import HoldfastCheckpointIO  # noqa: E402
from holdfast.storage.integrations.newest import newest_checkpoint  # noqa: E402

# Warnings of Lightning and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PARTS = 11


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Run two ranks, which import lightning once."""
    with RankProcesses(2) as made:
        yield made


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.nightly(1)] if number % 57 else [])
        for number in range(0, len(CASES), 3)
    ],
)
def test_same_checkpoints_are_left_as_by_lightning(tmp_path: Path, number: int) -> None:
    """The plugin keeps the same checkpoints, and computes the same losses."""
    stock, ours = (
        outcome(tmp_path / str(is_stock), CASES[number], "auto", is_stock)
        for is_stock in (True, False)
    )
    assert ours == stock


def repaired(stock: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an outcome without the checkpoints that Lightning saves through the link to another:
    a resumed run with save_last="link" replaces the best checkpoint."""
    before, after, *losses = stock
    named = {name: int(name[5:-5].partition("-")[0]) for name in after if name[:5] == "step="}
    return before, after | named, *losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.nightly(15)] if part else []) for part in range(PARTS)],
)
def test_same_checkpoints_are_left_by_two_ranks(
    ranks: RankProcesses, tmp_path: Path, part: int, strategy: str
) -> None:
    """The plugin and the strategy keep the same checkpoints, and compute the same losses."""
    numbers = list(range(part * 7, len(CASES), PARTS * 7))
    found: list[dict[int, Any]] = ranks.run(
        outcomes, str(tmp_path), numbers, strategy, timeout_s=250
    )
    assert [
        (CASES[number], stock, ours)
        for of_rank in found
        for number, (stock, ours) in of_rank.items()
        if ours != (repaired(stock) if strategy == "fsdp2" else stock)
    ] == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_run_that_has_gone_back_stays_on_its_branch(tmp_path: Path, plugin: str) -> None:
    """The newest checkpoint is one that leads to the last save."""
    options = {"save_top_k": -1, "plugin": plugin}
    train(tmp_path, 8, **options)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=8.ckpt")
    train(tmp_path, 6, str(tmp_path / "step=4.ckpt"), **options)
    newest = newest_checkpoint(tmp_path)
    assert newest == str(tmp_path / "step=6-v1.ckpt")
    assert train(tmp_path, 8, newest, **options).losses.keys() == {6, 7}


def test_a_run_of_lightning_is_continued(tmp_path: Path) -> None:
    """Lightning's own file is loaded by Lightning; the next checkpoint is ours."""
    train(tmp_path / "whole", 8, save_top_k=-1)
    expected = train(tmp_path / "whole", 12, str(tmp_path / "whole" / "step=8.ckpt"), save_top_k=-1)
    train(tmp_path / "run", 8, save_top_k=1)
    file = tmp_path / "run" / "step=8.ckpt"
    net = train(tmp_path / "run", 12, str(file), plugin="sync", save_top_k=1)
    assert net.losses == expected.losses
    assert newest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "step=12.ckpt")
    assert list(left(tmp_path / "run")) == [
        "step=12.ckpt",
        "step=8.ckpt",
    ]  # Lightning keeps that, too


class OfTheUser:
    """A class that no library knows."""


def test_a_file_that_needs_pickle_is_opened_only_if_allowed(tmp_path: Path) -> None:
    """Loading a pickle can run any code."""
    file = tmp_path / "step=2.ckpt"
    torch.save({"global_step": 2, "more": OfTheUser()}, file)
    io = HoldfastCheckpointIO()
    with pytest.raises(holdfast.UsageError, match="weights_only=False to fit"):
        io.load_checkpoint(file)
    assert io.load_checkpoint(file, weights_only=False)["global_step"] == 2
