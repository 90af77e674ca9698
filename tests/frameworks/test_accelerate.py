"""Accelerate itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import SIGKILLED, documented, losses, run_job
from torch import nn

import holdfast

if find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed: make frameworks", allow_module_level=True)

JOB = Path(__file__).parents[1] / "support" / "accelerate_job.py"
# Those of accelerate itself, and of what it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.mark.nightly(55)
@pytest.mark.parametrize(
    ("world", "sharded"),
    [
        pytest.param(1, None, marks=pytest.mark.nightly(30)),
        (2, None),
        pytest.param(2, "zero1", marks=pytest.mark.nightly(30)),
        pytest.param(2, "zero2", marks=pytest.mark.nightly(30)),
        pytest.param(2, "zero3", marks=pytest.mark.nightly(30)),
        pytest.param(2, "fsdp1", marks=pytest.mark.nightly(30)),
        pytest.param(2, "fsdp2", marks=pytest.mark.nightly(30)),
    ],
)
def test_a_killed_job_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, world: int, sharded: str | None
) -> None:
    """Killed at step 7 and resumed from step 6, each rank computes the same losses to the last
    bit, with dropout, a schedule, and an object of the user's that counts; also where the engine
    shards the model."""
    options = ("--sharded", sharded) if sharded else ()
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    done = run_job(JOB, "--out", tmp_path / "whole", *options, world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = run_job(JOB, "--out", tmp_path / "cut", "--die-at", "7", *options, world=world)
    assert killed.returncode == (SIGKILLED if world == 1 else 1), killed.stderr[-3000:]
    listed = holdfast.list_checkpoints(tmp_path / "cut" / "checkpoints")
    assert [c.step for c in listed] == [2, 4, 6]
    done = run_job(JOB, "--out", tmp_path / "cut", *options, world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(world):
        found = losses(tmp_path / "cut", rank)
        assert sorted(found) == list(range(12))
        assert found == losses(tmp_path / "whole", rank)
    files = {path.name for path in (tmp_path / "cut").rglob("*") if path.is_file()}
    assert not {name for name in files if name.endswith((".bin", ".pkl", ".pt"))}


@pytest.mark.nightly(30)
@pytest.mark.parametrize(("before", "after"), [("zero3", "fsdp2"), ("fsdp1", "zero2")])
def test_what_one_engine_has_saved_another_one_resumes(
    tmp_path: Path, before: str, after: str
) -> None:
    """The step that both compute has the same loss, and the job ends."""
    killed = run_job(JOB, "--out", tmp_path, "--die-at", "7", "--sharded", before, world=2)
    assert killed.returncode == 1, killed.stderr[-3000:]
    assert holdfast.list_checkpoints(tmp_path / "checkpoints")[-1].step == 6
    before_kill = [losses(tmp_path, rank) for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"losses-{rank}.jsonl").unlink()
    done = run_job(JOB, "--out", tmp_path, "--sharded", after, world=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = losses(tmp_path, rank)
        assert sorted(found) == list(range(6, 12))
        assert found[6] == pytest.approx(before_kill[rank][6], rel=1e-4)


def prepared(width: int = 2) -> tuple[Any, Any, Any]:
    """An accelerator with a model and a stateful loader."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, loader = accelerator.prepare(nn.Linear(width, 2), loader)
    return accelerator, model, loader


def test_a_stateful_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    """Where use_stateful_dataloader is set."""
    from holdfast.storage.integrations.accelerate import load_state, save_state

    accelerator, model, loader = prepared()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    save_state(accelerator, tmp_path / "c", step=3)
    following = next(batches)
    other, other_model, other_loader = prepared()
    load_state(other, tmp_path / "c")
    assert torch.equal(next(iter(other_loader))[0], following[0])
    assert torch.equal(other_model.weight, model.weight)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A model of another shape, before anything is loaded; an object whose state is no value."""
    from holdfast.storage.integrations.accelerate import load_state, save_state

    class Odd:
        """Its state is a function."""

        def state_dict(self) -> dict[str, Any]:
            return {"act": torch.relu}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError(state_dict)

    accelerator, _, _ = prepared()
    save_state(accelerator, tmp_path / "c")
    with pytest.raises(holdfast.MismatchError, match=r"models.*weight.*shape"):
        load_state(prepared(width=3)[0], tmp_path / "c")
    accelerator.register_for_checkpointing(Odd())
    with pytest.raises(holdfast.StateError, match=r'state\["objects"\]\[0\]\["act"\]'):
        save_state(accelerator, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_the_how_to_does_what_it_says(tmp_path: Path) -> None:
    """Its code, block by block."""
    accelerator = prepared()[0]
    names: dict[str, Any] = {"accelerator": accelerator, "step": 500}
    for block in documented("use-with-accelerate.md"):
        (tmp_path / "block.py").write_text(block.replace("/scratch", str(tmp_path)))
        names = runpy.run_path(str(tmp_path / "block.py"), names)
    assert [c.path for c in holdfast.list_checkpoints(tmp_path / "run")] == ["step-500"]
    assert (tmp_path / "back").is_dir()
