"""Hugging Face's Trainer itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import json
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import SIGKILLED, documented, losses, run_job

import holdfast

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: make frameworks", allow_module_level=True)

JOB = Path(__file__).parents[1] / "support" / "trainer_job.py"
# Those of transformers itself, and of what it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def folder_of(path: Path, name: str) -> Path:
    """An empty folder."""
    (path / name).mkdir()
    return path / name


@pytest.mark.parametrize(("world", "options"), [(1, ()), (2, ()), (1, ("--lora",))])
def test_a_killed_job_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, world: int, options: tuple[str, ...]
) -> None:
    """Killed at step 7 and resumed from its newest checkpoint, each rank computes the same losses
    to the last bit, with dropout and a schedule, and past the end of an epoch. The log of the
    trainer has each step once; the last two checkpoints are left, and no file of Trainer's own."""
    whole = folder_of(tmp_path, "whole")
    done = run_job(JOB, "--out", whole, *options, world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    cut = folder_of(tmp_path, "cut")
    checkpoints = cut / "checkpoints"
    common = ("--out", cut, "--checkpoints", checkpoints, *options)
    killed = run_job(JOB, *common, "--die-at", "7", world=world)
    assert killed.returncode == (SIGKILLED if world == 1 else 1), killed.stderr[-3000:]
    assert holdfast.list_checkpoints(checkpoints)[-1].step == 6
    done = run_job(JOB, *common, "--resume", world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(world):
        assert losses(cut, rank) == losses(whole, rank)
    outcome = json.loads((cut / "done.json").read_text())
    assert outcome["steps"] == list(range(1, 13))
    assert outcome["best"] == str(checkpoints / "checkpoint-12")
    listed = {c.path: c.world for c in holdfast.list_checkpoints(checkpoints)}
    assert listed == {"checkpoint-10": world, "checkpoint-12": world}
    files = {path.name for path in checkpoints.rglob("*") if path.is_file()}
    assert not {name for name in files if name.endswith((".bin", ".pt", ".pth", ".json"))}


def trainer(folder: Path, **options: Any) -> Any:
    """A trainer of a tiny model, that saves to ``folder``."""
    import transformers
    from support.trainer_job import model, samples

    from holdfast.storage.integrations.transformers import HoldfastTrainerMixin

    class Trainer(HoldfastTrainerMixin, transformers.Trainer):
        """The one of the how-to."""

    checkpoints = options.pop("checkpoints", None)
    settings = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "report_to": [], **options}
    arguments = transformers.TrainingArguments(str(folder), **settings)
    data: Any = samples()
    return Trainer(
        model(lora=False),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        checkpoints=checkpoints,
    )


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    """Also beyond the limit, and from a URI."""
    made = trainer(
        tmp_path / "out",
        checkpoints=f"file://{tmp_path}/checkpoints?threads=2",
        eval_strategy="steps",
        eval_steps=2,
        max_steps=6,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so the best is the first
    )
    made.train()
    assert made.state.best_global_step == 2
    paths = [c.path for c in holdfast.list_checkpoints(tmp_path / "checkpoints")]
    assert paths == ["checkpoint-2", "checkpoint-6"]
    stored = holdfast.load(tmp_path / "checkpoints" / "checkpoint-2", only="model")
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(stored[name], tensor), name


def test_what_cannot_be_resumed_or_saved_is_refused(tmp_path: Path) -> None:
    """Nothing to resume from; a checkpoint of another model; files that are not there to be
    pushed; trials that would share a folder."""
    made = trainer(tmp_path)
    with pytest.raises(holdfast.NotACheckpointError, match="no whole checkpoint to resume from"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(holdfast.UsageError, match="trials"):
        made._save_checkpoint(made.model, {"lr": 1})
    with pytest.raises(holdfast.UsageError, match="pushes files of its own"):
        trainer(tmp_path, push_to_hub=True, hub_token="none")
    trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(holdfast.MismatchError, match="optimizer"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_the_how_to_does_what_it_says(tmp_path: Path) -> None:
    """Its code, block by block: switch, resume, load the model alone, switch back."""
    import transformers
    from support.trainer_job import model, samples

    made = model(lora=False)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=4, save_steps=2, use_cpu=True, report_to=[]
    )
    names: dict[str, Any] = {"model": made, "arguments": arguments, "data": samples()}
    for block in documented("use-with-hugging-face.md"):
        code = block.replace("/scratch", str(tmp_path)).replace("checkpoint-500", "checkpoint-6")
        (tmp_path / "block.py").write_text(code)
        names = runpy.run_path(str(tmp_path / "block.py"), names)
        arguments.max_steps = 6
    assert names["trainer"].state.global_step == 6
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, tensor in made.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
