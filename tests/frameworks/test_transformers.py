"""Hugging Face's Trainer itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.framework_jobs import SIGKILLED, documented, killed_in_clean_up, losses, run_job

import holdfast
from holdfast.cli import app

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: make frameworks", allow_module_level=True)

JOB = Path(__file__).parents[1] / "support" / "trainer_job.py"
# Those of transformers itself, and of what it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def folder_of(path: Path, name: str) -> Path:
    """An empty folder."""
    (path / name).mkdir()
    return path / name


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the folder of a job that has never stopped."""
    done: dict[tuple[Any, ...], Path] = {}

    def run(world: int, *options: str) -> Path:
        if "--asynchronous" in options:  # which changes no loss
            options = ()
        if (world, *options) not in done:
            folder = tmp_path_factory.mktemp("whole")
            ended = run_job(JOB, "--out", folder, *options, world=world)
            assert ended.returncode == 0, ended.stderr[-3000:]
            done[world, *options] = folder
        return done[world, *options]

    return run


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, (), marks=pytest.mark.nightly(30)),
        pytest.param(2, (), marks=pytest.mark.nightly(30)),
        pytest.param(1, ("--lora",), marks=pytest.mark.nightly(30)),
        (1, ("--asynchronous", "yes")),
        pytest.param(2, ("--asynchronous", "lazy"), marks=pytest.mark.nightly(30)),
        pytest.param(2, ("--sharded", "zero3"), marks=pytest.mark.nightly(30)),
        pytest.param(2, ("--sharded", "fsdp2"), marks=pytest.mark.nightly(30)),
    ],
)
def test_a_killed_job_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, whole_run: Callable[..., Path], world: int, options: tuple[str, ...]
) -> None:
    """Killed at step 7 and resumed from its newest checkpoint, each rank computes the same losses
    to the last bit, with dropout and a schedule, and past the end of an epoch. The log of the
    trainer has each step once; the last two checkpoints are left, and no file of Trainer's own."""
    whole = whole_run(world, *options)
    cut = folder_of(tmp_path, "cut")
    checkpoints = cut / "checkpoints"
    common = ("--out", cut, "--checkpoints", checkpoints, *options)
    killed = run_job(JOB, *common, "--die-at", "7", world=world)
    assert killed.returncode == (SIGKILLED if world == 1 else 1), killed.stderr[-3000:]
    left = killed_in_clean_up(checkpoints)
    newest = holdfast.list_checkpoints(checkpoints)[-1].step
    assert newest == 6 or (newest == 4 and "--asynchronous" in options)
    done = run_job(JOB, *common, "--resume", world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(world):
        assert losses(cut, rank) == losses(whole, rank)
    outcome = json.loads((cut / "done.json").read_text())
    assert outcome["steps"] == list(range(1, 13))
    assert outcome["best"] == str(checkpoints / "checkpoint-12")
    listed = {c.path: c.world for c in holdfast.list_checkpoints(checkpoints)}
    assert listed.keys() - left == {"checkpoint-10", "checkpoint-12"}
    assert set(listed.values()) == {world}
    files = {path.name for path in checkpoints.rglob("*") if path.is_file()}
    files.discard("attempt.json")  # of the save that was killed
    assert not {name for name in files if name.endswith((".bin", ".pt", ".pth", ".json"))}


@pytest.mark.nightly(30)
def test_what_zero_has_saved_is_resumed_without_sharding(
    tmp_path: Path, whole_run: Callable[..., Path]
) -> None:
    """Under DDP: the step that both compute has the same loss to the last bit, and all losses are
    near those of a job under DDP from its beginning."""
    common = ("--out", tmp_path, "--checkpoints", tmp_path / "checkpoints")
    killed = run_job(JOB, *common, "--die-at", "7", "--sharded", "zero2", world=2)
    assert killed.returncode == 1, killed.stderr[-3000:]
    assert holdfast.list_checkpoints(tmp_path / "checkpoints")[-1].step == 6
    done = run_job(JOB, *common, "--resume", world=2)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = whole_run(2)
    for rank in range(2):
        assert losses(tmp_path, rank) == pytest.approx(losses(whole, rank), rel=1e-4)


def trainer(folder: Path, **options: Any) -> Any:
    """A trainer of a tiny model, that saves to ``folder``."""
    import transformers
    from support.trainer_job import model, samples

    from holdfast.storage.integrations.transformers import HoldfastTrainerMixin

    class Trainer(HoldfastTrainerMixin, transformers.Trainer):
        """The one of the how-to."""

    checkpoints = options.pop("checkpoints", None)
    asynchronous = options.pop("asynchronous", False)
    settings = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "report_to": [], **options}
    arguments = transformers.TrainingArguments(str(folder), **settings)
    data: Any = samples()
    return Trainer(
        model(lora=False),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        checkpoints=checkpoints,
        asynchronous=asynchronous,
    )


@pytest.mark.parametrize(
    "asynchronous", [pytest.param(False, marks=pytest.mark.nightly(30)), "lazy"]
)
def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(
    tmp_path: Path, asynchronous: bool | str
) -> None:
    """Also beyond the limit, and from a URI."""
    made = trainer(
        tmp_path / "out",
        checkpoints=f"file://{tmp_path}/checkpoints?threads=2",
        asynchronous=asynchronous,
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


def test_an_asynchronous_save_that_fails_ends_training_and_deletes_nothing(tmp_path: Path) -> None:
    """Its error is raised by train(), and the checkpoint that it was to replace is there to resume
    from; that is deleted when a newer one is committed, at the latest when training ends."""
    import transformers

    class Obstruct(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 2:
                (tmp_path / "checkpoint-4").touch()

    made = trainer(tmp_path, asynchronous=True, save_total_limit=1)
    made.add_callback(Obstruct)
    with pytest.raises(holdfast.StorageError):
        made.train()
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [2]
    (tmp_path / "checkpoint-4").unlink()
    trainer(tmp_path, asynchronous=True, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [4]


def test_the_best_checkpoint_stays_until_a_better_one_is_committed(tmp_path: Path) -> None:
    """Step 6 is better than step 2, which the checkpoint of step 4 names as the best: so that of
    step 2 stays while that of step 6 is being saved."""
    import transformers

    seen: dict[int, set[int | None]] = {}

    class Look(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            listed = holdfast.list_checkpoints(tmp_path)
            seen[state.global_step] = {c.step for c in listed}

    made = trainer(
        tmp_path,
        asynchronous=True,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        metric_for_best_model="loss",
    )
    made.evaluate = lambda **_: {"eval_loss": {2: 1.0, 4: 2.0, 6: 0.5}[made.state.global_step]}
    made.add_callback(Look)
    made.train()
    assert seen[6] >= {2, 4}
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [6]


def test_what_cannot_be_resumed_or_saved_is_refused(tmp_path: Path) -> None:
    """Nothing to resume from; a checkpoint of another model; files that are not there to be
    pushed; trials that would share a folder; what torch_xla shards."""
    made = trainer(tmp_path)
    with pytest.raises(holdfast.NotACheckpointError, match="no whole checkpoint to resume from"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(holdfast.UsageError, match="trials"):
        made._save_checkpoint(made.model, {"lr": 1})
    with pytest.raises(holdfast.UsageError, match="pushes its own files"):
        trainer(tmp_path, push_to_hub=True, hub_token="none")
    with pytest.raises(holdfast.UsageError, match="torch_xla"):
        trainer(tmp_path, fsdp=True, fsdp_config={"xla": True})
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
    *blocks, _, _ = documented("use-with-hugging-face.md")
    for block in blocks:
        code = block.replace("/scratch", str(tmp_path)).replace("checkpoint-500", "checkpoint-6")
        (tmp_path / "block.py").write_text(code)
        names = runpy.run_path(str(tmp_path / "block.py"), names)
        arguments.max_steps = 6
    assert names["trainer"].state.global_step == 6
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, tensor in made.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


@pytest.mark.parametrize("block", [-2, -1])
def test_adapters_are_loaded_into_a_fresh_model_without_the_base(
    tmp_path: Path, block: int
) -> None:
    """By the code of the how-to: saved alone, and out of a checkpoint of the whole model. The
    frozen weights of the fresh model stay as they are."""
    from support.trainer_job import model

    trained = model(lora=True)
    fresh = model(lora=True)
    base = {name: p.clone() for name, p in fresh.named_parameters() if not p.requires_grad}
    for p in trained.parameters():
        p.data.uniform_(-1, 1)
    holdfast.save(tmp_path / "run" / "checkpoint-500", {"model": trained})
    code = documented("use-with-hugging-face.md")[block].replace("/scratch", str(tmp_path))
    (tmp_path / "block.py").write_text(code)
    runpy.run_path(
        str(tmp_path / "block.py"), {"model": trained, "fresh": fresh, "holdfast": holdfast}
    )
    for (name, p), q in zip(trained.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(q, base.get(name, p)), name
    if block == -2:
        with holdfast.open(tmp_path / "adapters") as c:
            assert len(c.tensors) == 8
            assert all(".lora_" in name for name in c.tensors)


@pytest.mark.parametrize(("shard", "files"), [("5GB", 1), ("20KB", 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_opens_what_is_exported(
    tmp_path: Path, dtype: torch.dtype, shard: str, files: int
) -> None:
    """Bit for bit, in one file and in several; converted, as torch converts. Embeddings that are
    tied are tied again."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    optim = torch.optim.AdamW(model.parameters())
    holdfast.save(tmp_path / "c", {"model": model, "optim": optim, "step": 3})
    names = ["--only", "model.*", "--rename", "model.*=*"]
    form = ["--dtype", str(dtype).removeprefix("torch."), "--shard", shard]
    folder = tmp_path / "hf"
    assert app.run(["export", str(tmp_path / "c"), str(folder), *names, *form]) == 0
    assert len(list(folder.glob("*.safetensors"))) >= files
    config.save_pretrained(folder)
    found, problems = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    assert not any(problems.values())
    assert difference(dict(model.to(dtype).state_dict()), dict(found.state_dict())) is None
    assert found.lm_head.weight is found.model.embed_tokens.weight
