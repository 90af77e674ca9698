"""Ray Train itself, with its checkpoints in Holdfast: in its local mode, without a cluster, which
would take a minute to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import documented, losses, run_block, run_job
from torch import nn

import holdfast

pytest.importorskip("ray", reason="not installed: make frameworks")

import pyarrow.fs
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer
from support.ray_job import fit

from holdfast.storage.integrations.ray import uri_of

# Warnings of Ray and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.mark.nightly(34)
def test_job_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    """A job resumed with more workers computes the losses of an uninterrupted one."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    fit(tmp_path / "whole", 8)
    result = fit(tmp_path / "cut", 4)
    with holdfast.open(uri_of(result.checkpoint)) as c:
        assert c.step == 4
    run_job("ray", tmp_path / "cut", "8", world=2)
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "cut") == whole
    assert losses(tmp_path / "cut", 1) == {step: whole[step] for step in range(5, 9)}
    listed = holdfast.list_checkpoints(tmp_path / "cut" / "run")
    assert [(c.path, c.world) for c in listed] == [
        ("checkpoint-2", 1),
        ("checkpoint-4", 1),
        ("checkpoint-6", 2),
        ("checkpoint-8", 2),
    ]


def test_file_systems_have_uris(tmp_path: Path) -> None:
    """Each known file system of a run's storage has a URI; others are refused by their type."""
    s3 = pyarrow.fs.S3FileSystem(access_key="a", secret_key="b", region="us-east-1")
    assert uri_of(Checkpoint("bucket/run/checkpoint-2", s3)) == "s3://bucket/run/checkpoint-2"
    google = pyarrow.fs.GcsFileSystem(anonymous=True)
    assert uri_of(Checkpoint("bucket/run", google)) == "gs://bucket/run"
    assert uri_of(Checkpoint(tmp_path.as_uri())) == str(tmp_path)
    other = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    with pytest.raises(holdfast.UsageError, match="of type 'subtree'"):
        uri_of(Checkpoint("run", other))


def test_how_to(tmp_path: Path) -> None:
    """The page's code runs in Ray's local mode, which wants a folder."""
    model = nn.Linear(2, 2)
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    names |= {"steps": 1000, "train": lambda state: float(state["step"])}
    switch, back = documented("use-with-ray-train.md")
    folder = f"folder={str(tmp_path)!r}"
    local = {'step=state["step"])': f'step=state["step"], {folder})'}
    local["(state)\n\n"] = f"(state, {folder})\n\n"

    def loop() -> None:
        names.update(run_block(switch, tmp_path, names, local))

    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=0)).fit()
    assert result.metrics == {"loss": 1000.0}
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [500, 1000]
    names["state"]["step"] = 0
    run_block(back, tmp_path, names | {"result": result})
    assert names["state"]["step"] == 1000


@pytest.mark.nightly(60)
def test_job_on_a_cluster_survives_a_killed_worker(tmp_path: Path) -> None:
    """Ray restarts the workers, which continue from the checkpoint reported last. A later run of
    the same name does, too, with another number of workers."""
    (tmp_path / "cut").mkdir()
    run_job("ray", tmp_path / "cut", "8", "--cluster", "2", "--die-at", "5")
    run_job("ray", tmp_path / "cut", "12", "--cluster", "1")
    (tmp_path / "whole").mkdir()
    fit(tmp_path / "whole", 12)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    listed = holdfast.list_checkpoints(tmp_path / "cut" / "storage" / "run")
    assert [(c.step, c.world) for c in listed] == [(8, 2), (10, 1), (12, 1)]
