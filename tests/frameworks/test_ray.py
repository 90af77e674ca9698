"""Ray Train itself, with its checkpoints in Holdfast."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.framework_jobs import check_page, losses, run_job

import holdfast

pytest.importorskip("ray", reason="not installed: make frameworks")

import pyarrow.fs
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer

from holdfast.storage.integrations.ray import load_reported, save_and_report, uri_of

# Warnings of Ray and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PAGE = "use-with-ray-train.md"


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(20))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """In Ray's local mode, the page's function is killed, and resumes with other workers."""
    check_page(PAGE, tmp_path, worlds=worlds)
    listed = holdfast.list_checkpoints(tmp_path / "run")
    assert [(c.path, c.world) for c in listed] == [
        (f"checkpoint-{4 * number}", world) for number, world in enumerate(worlds, 1)
    ]


@pytest.mark.nightly(60)
def test_how_to_on_a_cluster(tmp_path: Path) -> None:
    """Ray restarts the workers if one is killed, which continue from the checkpoint reported last.
    A later run of the same name does, too, with another number of workers."""
    run_job("page", tmp_path, PAGE, "--kind", "2", "--total", "8", "--die-at", "6")
    run_job("page", tmp_path, PAGE, "--kind", "1")
    assert sorted(losses(tmp_path)) == list(range(1, 13))
    assert sorted(losses(tmp_path, 1)) == list(range(1, 9))
    listed = holdfast.list_checkpoints(tmp_path / "run")
    assert [(c.step, c.world) for c in listed] == [(4, 2), (8, 2), (12, 1)]


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


def test_local_mode_needs_a_folder() -> None:
    """Without one, nothing could be found again, nor saved."""

    def loop() -> None:
        with pytest.raises(holdfast.UsageError, match="folder="):
            load_reported({})
        with pytest.raises(holdfast.UsageError, match="folder="):
            save_and_report({}, {"x": 1}, step=1)

    TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=0)).fit()
