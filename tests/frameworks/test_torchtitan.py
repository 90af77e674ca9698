"""torchtitan's own parts, with their checkpoints in Holdfast."""

from __future__ import annotations

import dataclasses
import json
import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import documented, run_job
from support.rank_processes import RankProcesses

import holdfast

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make frameworks", allow_module_level=True)

from support import torchtitan_job as job

# torchtitan's own, and those of what it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

ANYWHERE = {"exclude_from_loading": ["dataloader"]}
"""torchtitan's data loaders know one number of ranks."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Two ranks, which import torchtitan once."""
    with RankProcesses(2) as made:
        yield made


@pytest.fixture(scope="module")
def uninterrupted(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """The losses of a job that never stopped."""
    folder = str(tmp_path_factory.mktemp("uninterrupted"))
    losses: dict[int, float] = ranks.run(job.train, folder, {"enable": False}, world=2)[0]
    assert len(losses) == job.STEPS
    return losses


def saved(folder: Path | str) -> list[int | None]:
    """The steps of the checkpoints there are."""
    return [c.step for c in holdfast.list_checkpoints(folder)]


def test_a_job_killed_in_mid_save_goes_on_from_the_checkpoint_before(
    ranks: RankProcesses, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """Killed while a lazy save of step 8 writes, it goes on from step 6, with the data that would
    have come next, and computes the same losses to the last bit."""
    lazily = {"async_mode": "async_with_pinned_mem"}
    killed = run_job(Path(job.__file__), tmp_path, json.dumps(lazily), "8", world=2)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    checkpoints = tmp_path / "checkpoint"
    assert any(path.is_file() for path in (checkpoints / "step-8").rglob("*"))
    assert saved(checkpoints) == [2, 4, 6]
    resumed = ranks.run(job.train, str(tmp_path), lazily, world=2)
    for losses in resumed:
        assert losses == {step: uninterrupted[step] for step in range(7, 13)}
    assert saved(checkpoints) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("disabled", 1, 2),
        ("async", 2, 1),
        ("async_with_pinned_mem", 1, 2),
        pytest.param("disabled", 2, 1, marks=pytest.mark.nightly(30)),
        pytest.param("async", 1, 2, marks=pytest.mark.nightly(30)),
        pytest.param("async_with_pinned_mem", 2, 1, marks=pytest.mark.nightly(30)),
    ],
)
def test_a_job_goes_on_with_another_number_of_ranks(
    ranks: RankProcesses,
    uninterrupted: dict[int, float],
    tmp_path: Path,
    mode: str,
    before: int,
    after: int,
) -> None:
    """Model, optimizers, schedules and counters come back into the new layout; what keep_latest_k
    does not keep is gone."""
    config = {"async_mode": mode, "keep_latest_k": 2, **ANYWHERE}
    first = ranks.run(job.train, str(tmp_path), config, 7, world=before)[0]
    assert saved(tmp_path / "checkpoint") == [6, 7]
    second = ranks.run(job.train, str(tmp_path), config, world=after)[0]
    assert first | second == uninterrupted
    assert min(second) == 8


def test_a_folder_may_be_any_uri(ranks: RankProcesses, uninterrupted: dict[int, float]) -> None:
    """Nothing is asked of fsspec, which has a memory of its own."""
    config = {"folder": "memory://run?op_timeout_s=60", "storage_options": {"retries": "1"}}
    first = ranks.run(job.train, "", config, 4, world=1)[0]
    assert first | ranks.run(job.train, "", config, world=1)[0] == uninterrupted


def test_the_model_goes_out_and_in(ranks: RankProcesses, tmp_path: Path) -> None:
    """Alone, in the wanted dtype; in Hugging Face's format; and from a checkpoint of DCP's."""
    assert ranks.run(job.export_and_load, str(tmp_path), world=2) == [None, None]
    with holdfast.open(tmp_path / "alone" / "step-4") as c:
        assert {(t.name, t.dtype) for t in c.tensors.values()} == {
            (name, "bfloat16") for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        }
    hf = [path.name for path in (tmp_path / "hf" / "step-4").glob("*.safetensors")]
    assert hf == ["model-00001-of-00001.safetensors"]
    assert saved(tmp_path / "hf") == [2]


def test_a_step_that_is_named_is_loaded_and_errors_are_raised(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A step, or a name, that is not there is an error; so is a save that fails."""
    assert ranks.run(job.load_steps, str(tmp_path), world=1) == [None]


def test_the_how_to_does_what_it_says(
    ranks: RankProcesses, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """Its code, block by block: switch, switch back, load the model elsewhere."""
    names: dict[str, Any] = {"model": job.network(sharded=False)}
    for number, block in enumerate(documented("use-with-torchtitan.md")):
        code = block.replace("500", "2").replace("/scratch", str(tmp_path))
        (tmp_path / "block.py").write_text(code)
        names = runpy.run_path(str(tmp_path / "block.py"), names)
        if number == 0:
            config = dataclasses.asdict(names["checkpoint"])
            ranks.run(job.train, str(tmp_path), config, 3, world=2)
    back = ranks.run(job.train_with_dcp, str(tmp_path), {"folder": "back", **ANYWHERE}, world=1)
    assert back == [{step: uninterrupted[step] for step in range(3, 13)}]
    state = holdfast.load(tmp_path / "run" / "step-2")
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(state[name], tensor), name
