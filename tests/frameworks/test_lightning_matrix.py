"""The checkpoints that Lightning's Trainer leaves behind, with the plugin and without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="not installed: make frameworks")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

import holdfast  # noqa: E402
from holdfast.storage.integrations.lightning import (  # noqa: E402
    HoldfastAsyncCheckpointIO,
    HoldfastCheckpointIO,
)
from holdfast.storage.integrations.newest import newest_checkpoint  # noqa: E402

# Warnings of Lightning and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PLUGINS: dict[str, Any] = {
    "sync": HoldfastCheckpointIO,
    "async": HoldfastAsyncCheckpointIO,
    "lazy": lambda: HoldfastAsyncCheckpointIO(lazy=True),
}
CASES = itertools.product(
    [(0, None), (1, None), (-1, None), (1, "score"), (2, "score")],  # save_top_k, monitor
    [None, True, "link"],  # save_last
    [None, 6],  # the step to go back to
    [None, 11],  # the step at which a batch fails, with save_on_exception
    PLUGINS,
)


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A layer whose steps are rated by a score."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)
        self.fails_at = fails_at
        self.losses: dict[int, float] = {}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = self.layer(batch[0]).pow(2).mean()
        self.losses[self.global_step] = float(loss.detach())
        self.log("score", float(self.global_step * 7 % 5))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(
    folder: Path, until: int, resume: str | None = None, plugin: Any = None, **options: Any
) -> Net:
    """Train a tiny model until a step, with a checkpoint every two steps."""
    net = Net(options.pop("fails_at", None))
    rows = torch.arange(96.0).reshape(24, 4) / 96
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, **options)
    trainer = lightning.Trainer(
        max_steps=until,
        accelerator="cpu",
        callbacks=[keep],
        plugins=None if plugin is None else [PLUGINS[plugin]()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(net, data, ckpt_path=resume)
    except ZeroDivisionError:
        trainer.strategy.teardown()
    return net


def left(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in folder.glob("*.ckpt"))


def checkpoint_of(folder: Path, step: int | None) -> str | None:
    """Return the checkpoint of that step, or else the newest; None if there is none."""
    by_step = {int(path.stem.partition("=")[2]): path for path in folder.glob("step=*.ckpt")}
    found = by_step.get(step or -1) or by_step.get(max(by_step, default=-1))
    return None if found is None else str(found)


def outcome(
    folder: Path, plugin: str | None, back: int | None, fails_at: int | None, **options: Any
) -> tuple[list[str], list[str], dict[int, float]]:
    """Train a run in two parts; return the checkpoints after each, and the losses of the second."""
    train(folder, 8, plugin=plugin, **options)
    before = left(folder)
    resume = checkpoint_of(folder, back)
    on_failure = {"save_on_exception": fails_at is not None}
    net = train(folder, 12, resume, plugin, fails_at=fails_at, **on_failure, **options)
    return before, left(folder), net.losses


@pytest.mark.parametrize(
    ("top", "last", "back", "fails_at", "plugin"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly(1)] if number % 17 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_same_checkpoints_are_left_as_by_lightning(
    tmp_path: Path, top: Any, last: Any, back: int | None, fails_at: int | None, plugin: str
) -> None:
    """The plugin keeps the same checkpoints, and computes the same losses."""
    options = {"save_top_k": top[0], "monitor": top[1], "save_last": last}
    stock = outcome(tmp_path / "stock", None, back, fails_at, **options)
    assert outcome(tmp_path / "ours", plugin, back, fails_at, **options) == stock


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
    assert left(tmp_path / "run") == ["step=12.ckpt", "step=8.ckpt"]  # Lightning keeps that, too


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
