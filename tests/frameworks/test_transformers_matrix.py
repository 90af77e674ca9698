"""The checkpoints that Hugging Face's Trainer leaves behind, with the mixin and without."""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

transformers = pytest.importorskip("transformers", reason="not installed: make frameworks")

from holdfast.storage.integrations.newest import newest_checkpoint  # noqa: E402
from holdfast.storage.integrations.transformers import HoldfastTrainerMixin  # noqa: E402

# Warnings of transformers and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

CASES = itertools.product(
    [None, 1, 2, 3],  # save_total_limit
    [None, 2, 10],  # the best step
    [None, 4],  # the step to go back to
    [False, True, "lazy"],
)


class Losses:
    """Records the loss of each step, and rates one step best."""

    best: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, float] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses[self.state.global_step] = float(loss)  # type: ignore[attr-defined]
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": float(self.state.global_step != self.best)}  # type: ignore[attr-defined]


class Stock(Losses, transformers.Trainer):  # type: ignore[misc]
    """Trainer itself."""


class Ours(Losses, HoldfastTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Trainer with the mixin."""


def killed(*args: Any, **kwargs: Any) -> None:
    """End the training before its next step."""
    raise KeyboardInterrupt


def train(
    kind: type[Any],
    folder: Path,
    until: int,
    resume: Any = None,
    limit: int | None = None,
    best: int | None = None,
    **options: Any,
) -> Any:
    """Train a tiny model until a step, with a checkpoint every two steps; return the trainer."""
    from support.trainer_job import model, samples

    data: Any = samples()
    rated = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    made = kind(
        model(lora=False),
        transformers.TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            max_steps=until,
            save_steps=2,
            save_total_limit=limit,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            lr_scheduler_type="constant",
            **({} if best is None else rated),
        ),
        train_dataset=data,
        eval_dataset=data[:4],
        **options,
    )
    made.best = best
    made.train(resume_from_checkpoint=resume)
    return made


def left(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@functools.cache
def begun(kind: type[Any], parent: Path) -> Path:
    """Return the folder of a run of eight steps, with all its checkpoints."""
    train(kind, parent / kind.__name__, until=8)
    return parent / kind.__name__


@functools.cache
def continued(
    kind: type[Any],
    parent: Path,
    limit: int | None,
    best: int | None,
    back: int | None,
    mode: Any = None,
) -> tuple[list[str], dict[int, float], Any]:
    """Continue a run until step 12 from the newest checkpoint, or from step ``back``; return the
    checkpoints left behind, the losses, and the best step."""
    folder = parent / f"{kind.__name__}-{limit}-{best}-{back}-{mode}"
    shutil.copytree(begun(kind, parent), folder)
    resume = True if back is None else str(folder / f"checkpoint-{back}")
    options = {} if mode is None else {"asynchronous": mode}
    made = train(kind, folder, 12, resume, limit, best, **options)
    marked = made.state.best_model_checkpoint
    return left(folder), made.losses, marked and Path(marked).name


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the runs that several tests continue."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    ("limit", "best", "back", "mode"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly(2)] if number % 11 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_same_checkpoints_are_left_as_by_trainer(
    parent: Path, limit: int | None, best: int | None, back: int | None, mode: Any
) -> None:
    """The mixin keeps the same checkpoints, computes the same losses, and marks the same best
    one."""
    ours = continued(Ours, parent, limit, best, back, mode)
    assert ours == continued(Stock, parent, limit, best, back)


@pytest.mark.parametrize("mode", [False, pytest.param("lazy", marks=pytest.mark.nightly(2))])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_run_that_has_gone_back_stays_on_its_branch(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, mode: Any
) -> None:
    """Trainer itself takes the highest number, abandoned or not. A new run in the same folder has
    also gone back. Within the limit, abandoned checkpoints are deleted first."""
    folder = tmp_path / "run"
    shutil.copytree(begun(Ours, parent), folder)
    common = {"limit": limit, "asynchronous": mode}
    with monkeypatch.context() as patch:
        patch.setattr(Losses, "training_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(Ours, folder, 6, str(folder / "checkpoint-4"), **common)
    assert train(Ours, folder, 6, True, **common).losses.keys() == {4, 5}
    assert newest_checkpoint(folder) == str(folder / "checkpoint-6")
    if limit is not None:
        assert left(folder) == ["checkpoint-4", "checkpoint-6"]
    assert train(Ours, folder, 8, True, **common).losses.keys() == {6, 7}
    train(Ours, folder, 2, **common)
    assert newest_checkpoint(folder) == str(folder / "checkpoint-2")
    assert train(Ours, folder, 4, True, **common).losses.keys() == {2, 3}


@pytest.mark.parametrize("back", [None, 4])
def test_a_run_of_trainer_is_continued(parent: Path, tmp_path: Path, back: int | None) -> None:
    """Trainer's own checkpoints are loaded by Trainer; the next ones are ours, and newer, also in
    the folder of one of Trainer itself."""
    folder = tmp_path / "run"
    shutil.copytree(begun(Stock, parent), folder)
    resume = True if back is None else str(folder / f"checkpoint-{back}")
    made = train(Ours, folder, 10 if back is None else 6, resume)
    expected = continued(Stock, parent, None, None, back)[1]
    assert made.losses == {step: expected[step] for step in made.losses}
    assert [c.step for c in holdfast.list_checkpoints(folder)] == [made.state.global_step]
    for stale in folder.glob(f"checkpoint-{made.state.global_step}/model.safetensors"):
        stale.write_bytes(b"")
    again = train(Ours, folder, 12, True)
    assert made.losses | again.losses == expected
