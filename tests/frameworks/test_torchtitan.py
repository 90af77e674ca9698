"""torchtitan's own parts, with their checkpoints in Holdfast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.framework_jobs import check_page, run_job
from support.rank_processes import RankProcesses

import holdfast

pytest.importorskip("torchtitan", reason="not installed: make frameworks")

from support import torchtitan_job as job

# Warnings of torchtitan and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

ANYWHERE = {"exclude_from_loading": ["dataloader"]}
"""torchtitan's data loaders know one number of ranks."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Run two ranks, which import torchtitan once."""
    with RankProcesses(2) as made:
        yield made


@pytest.fixture(scope="module")
def uninterrupted(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """Return the losses of a job that never stopped."""
    folder = str(tmp_path_factory.mktemp("uninterrupted"))
    losses: dict[int, float] = ranks.run(job.train, folder, {"enable": False}, world=2)[0]
    assert len(losses) == job.STEPS
    return losses


def saved(folder: Path | str) -> list[int | None]:
    """Return the steps of the existing checkpoints."""
    return [c.step for c in holdfast.list_checkpoints(folder)]


def test_killed_job_resumes(
    ranks: RankProcesses, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """A job killed in a lazy save of step 8 resumes from step 6 with the next data, and computes
    the same losses to the last bit."""
    lazily = {"async_mode": "async_with_pinned_mem"}
    run_job("torchtitan", tmp_path, json.dumps(lazily), "8", world=2, is_killed=True)
    checkpoints = tmp_path / "checkpoint"
    assert any(path.is_file() for path in (checkpoints / "step-8").rglob("*"))
    assert saved(checkpoints) == [2, 4, 6]
    resumed = ranks.run(job.train, str(tmp_path), lazily, world=2)
    for losses in resumed:
        assert losses == {step: uninterrupted[step] for step in range(7, 13)}
    assert saved(checkpoints) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [("disabled", 1, 2), ("async", 2, 1)],
)
def test_job_resumes_with_another_number_of_ranks(
    ranks: RankProcesses,
    uninterrupted: dict[int, float],
    tmp_path: Path,
    mode: str,
    before: int,
    after: int,
) -> None:
    """Model, optimizers, schedules and counters come back into the new layout. Apart from the last
    step's, only keep_latest_k checkpoints are left."""
    config = {"async_mode": mode, "keep_latest_k": 2, **ANYWHERE}
    first = ranks.run(job.train, str(tmp_path), config, 7, world=before)[0]
    assert saved(tmp_path / "checkpoint") == [4, 6, 7]
    second = ranks.run(job.train, str(tmp_path), config, world=after)[0]
    assert first | second == uninterrupted
    assert min(second) == 8


def test_folder_may_be_a_uri(ranks: RankProcesses, uninterrupted: dict[int, float]) -> None:
    """Checkpoints go through Holdfast's drivers, not through fsspec, which has a memory of its own."""
    config = {"folder": "memory://run?op_timeout_s=60", "storage_options": {"retries": "1"}}
    first = ranks.run(job.train, "", config, 4, world=1)[0]
    assert first | ranks.run(job.train, "", config, world=1)[0] == uninterrupted


def test_model_is_exported_and_loaded(ranks: RankProcesses, tmp_path: Path) -> None:
    """The model is saved alone, in a dtype, and in Hugging Face's format; DCP's is loaded."""
    assert ranks.run(job.export_and_load, str(tmp_path), world=2) == [None, None]
    with holdfast.open(tmp_path / "alone" / "step-4") as c:
        assert {(t.name, t.dtype) for t in c.tensors.values()} == {
            (name, "bfloat16") for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        }
    hf = [path.name for path in (tmp_path / "hf" / "step-4").glob("*.safetensors")]
    assert hf == ["model-00001-of-00001.safetensors"]
    assert saved(tmp_path / "hf") == [2]


def test_named_step_is_loaded_and_errors_are_raised(ranks: RankProcesses, tmp_path: Path) -> None:
    """A missing step, a missing name, and a failed save are errors."""
    assert ranks.run(job.load_steps, str(tmp_path), world=1) == [None]


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(25))]
)
def test_how_to(
    ranks: RankProcesses,
    uninterrupted: dict[int, float],
    tmp_path: Path,
    worlds: tuple[int, ...],
) -> None:
    """The page's script is killed, resumes on another number of ranks, switches back, and loads the
    model elsewhere."""
    losses = check_page("use-with-torchtitan.md", tmp_path, worlds=worlds)
    assert losses == pytest.approx(uninterrupted, rel=1e-4)
    if worlds[-1] == 1:
        config = {"folder": "back", **ANYWHERE}
        back = ranks.run(job.train_with_dcp, str(tmp_path), config, world=1)
        assert back == [{step: uninterrupted[step] for step in range(5, 13)}]
