"""Accelerate itself, with its checkpoints in Holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.framework_jobs import check_losses, check_page, losses, run_job
from torch import nn

import holdfast
from holdfast.storage.integrations.newest import newest_checkpoint

pytest.importorskip("accelerate", reason="not installed: make frameworks")

# Warnings of accelerate and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def sharded_by(name: str | None) -> tuple[str, ...]:
    """Return the options of a job whose engine shards the model."""
    return ("--sharded", name) if name else ()


@pytest.mark.nightly(55)
@pytest.mark.parametrize(
    ("world", "sharded"),
    [
        (2, None),
        pytest.param(2, "zero1", marks=pytest.mark.nightly(30)),
        pytest.param(2, "zero3", marks=pytest.mark.nightly(30)),
        pytest.param(2, "fsdp1", marks=pytest.mark.nightly(30)),
        pytest.param(2, "fsdp2", marks=pytest.mark.nightly(30)),
    ],
)
def test_killed_job_resumes(tmp_path: Path, world: int, sharded: str | None) -> None:
    """A job killed at step 7 resumes to exactly the losses of an uninterrupted one."""
    options = sharded_by(sharded)
    cut = tmp_path / "cut"
    run_job("accelerate", tmp_path / "whole", *options, world=world)
    run_job("accelerate", cut, "--die-at", "7", *options, world=world, is_killed=True)
    assert [c.step for c in holdfast.list_checkpoints(cut / "checkpoints")] == [2, 4, 6]
    run_job("accelerate", cut, *options, world=world)
    assert sorted(losses(cut)) == list(range(12))
    check_losses(cut, tmp_path / "whole", world)
    files = {path.name for path in cut.rglob("*") if path.is_file()}
    assert not {name for name in files if name.endswith((".bin", ".pkl", ".pt"))}


@pytest.mark.nightly(30)
@pytest.mark.parametrize(
    ("before", "after"), [("zero3", "fsdp2"), ("fsdp1", "zero2"), ("fsdp2", None), (None, "zero1")]
)
def test_job_resumes_under_another_engine(
    tmp_path: Path, before: str | None, after: str | None
) -> None:
    """The job resumes with the loss that the other engine computed at that step."""
    options = ("--die-at", "7", *sharded_by(before))
    run_job("accelerate", tmp_path, *options, world=2, is_killed=True)
    before_kill = [losses(tmp_path, rank) for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"losses-{rank}.jsonl").unlink()
    run_job("accelerate", tmp_path, *sharded_by(after), world=2)
    for rank in range(2):
        found = losses(tmp_path, rank)
        assert sorted(found) == list(range(6, 12))
        assert found[6] == pytest.approx(before_kill[rank][6], rel=1e-4)


def prepared(width: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    """Return an accelerator with a model and a stateful loader."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        **options,
    )
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, loader = accelerator.prepare(nn.Linear(width, 2), loader)
    return accelerator, model, loader


def test_stateful_loader_resumes_with_the_next_batch(tmp_path: Path) -> None:
    """A loader with use_stateful_dataloader continues where it was saved."""
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


@pytest.mark.parametrize("lazy", [None, False, True])
def test_a_step_back_abandons_later_checkpoints(tmp_path: Path, lazy: bool | None) -> None:
    """This also holds if Accelerate itself began the run. Accelerate loads its own folders."""
    from holdfast.storage.integrations.accelerate import async_save_state, load_state, save_state

    accelerator, model, _ = prepared()

    def save(step: int) -> None:
        model.weight.data.fill_(step)
        if lazy is None:
            save_state(accelerator, tmp_path / f"step-{step}", step=step)
        else:
            async_save_state(accelerator, tmp_path / f"step-{step}", step=step, lazy=lazy)

    model.weight.data.fill_(1)
    accelerator.save_state(tmp_path / "step-1")
    for step in (2, 4, 6):
        save(step)
    load_state(accelerator, tmp_path / "step-4")  # waits for the saves
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-6")
    assert model.weight.eq(4).all()
    save(5)
    load_state(accelerator, tmp_path / "step-5")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-5")
    load_state(accelerator, tmp_path / "step-1")
    assert model.weight.eq(1).all()
    save(2)
    load_state(accelerator, tmp_path / "step-2")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-2")


def test_project_names_checkpoints() -> None:
    """Without a URI, a project names them, also below a URI. With one checkpoint at most, an
    asynchronous save also keeps the previous one."""
    from accelerate.utils import ProjectConfiguration

    from holdfast.storage.integrations.accelerate import async_save_state, load_state, save_state

    accelerator, _, _ = prepared()
    for function in (save_state, async_save_state, load_state):
        with pytest.raises(holdfast.UsageError, match="names no checkpoints"):
            function(accelerator)
    uri = fresh_uri()
    project = ProjectConfiguration(uri, automatic_checkpoint_naming=True, total_limit=1)
    accelerator, model, _ = prepared(project_config=project)
    with pytest.raises(holdfast.NotACheckpointError):
        load_state(accelerator)
    with pytest.raises(holdfast.UsageError, match="step is given"):
        save_state(accelerator, step=1)
    for number in range(3):
        model.weight.data.fill_(number)
        async_save_state(accelerator, storage_options={"retries": 1}).wait()
    model.weight.data.zero_()
    assert load_state(accelerator) == 2
    assert model.weight.eq(2).all()
    assert [c.step for c in holdfast.list_checkpoints(uri)] == [1, 2]
    save_state(accelerator)
    assert [c.path for c in holdfast.list_checkpoints(uri)] == ["checkpoints/checkpoint_3"]


def test_mismatch_is_refused(tmp_path: Path) -> None:
    """A model of another shape, and an object whose state cannot be stored, are errors."""
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
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(holdfast.UsageError, match="hooks"):
        save_state(accelerator, tmp_path / "hooked")
    hook.remove()
    accelerator.register_for_checkpointing(Odd())
    with pytest.raises(holdfast.StateError, match=r'state\["objects"\]\[0\]\["act"\]'):
        save_state(accelerator, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(25))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """The page's script is killed, and resumes on another number of ranks."""
    check_page("use-with-accelerate.md", tmp_path, worlds=worlds)
    listed = holdfast.list_checkpoints(tmp_path / "run")
    assert [(c.path, c.world) for c in listed] == [
        (f"step-{4 * number}", world) for number, world in enumerate(worlds, 1)
    ]
    assert (tmp_path / "back").is_dir()
