"""Hugging Face's Trainer itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.bits import difference
from support.framework_jobs import (
    check_losses,
    check_page,
    documented,
    killed_in_clean_up,
    losses,
    run_block,
    run_job,
)

import holdfast
from holdfast.cli import app

transformers = pytest.importorskip("transformers", reason="not installed: make frameworks")

# Warnings of transformers and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the folder of a job that has never stopped."""
    done: dict[tuple[Any, ...], Path] = {}

    def run(world: int, *options: str) -> Path:
        if "--asynchronous" in options:  # changes no loss
            options = ()
        if (world, *options) not in done:
            folder = done[world, *options] = tmp_path_factory.mktemp("whole")
            run_job("trainer", folder, *options, world=world)
        return done[world, *options]

    return run


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, ("--lora",), marks=pytest.mark.nightly(30)),
        (1, ("--asynchronous", "yes")),
        pytest.param(2, ("--asynchronous", "lazy"), marks=pytest.mark.nightly(30)),
        pytest.param(2, ("--sharded", "zero3"), marks=pytest.mark.nightly(30)),
        pytest.param(2, ("--sharded", "fsdp2"), marks=pytest.mark.nightly(30)),
    ],
)
def test_killed_job_resumes(
    tmp_path: Path, whole_run: Callable[..., Path], world: int, options: tuple[str, ...]
) -> None:
    """A job killed at step 7 resumes to exactly the losses of an uninterrupted one.

    Only two checkpoints are left, and none of Trainer's own files.
    """
    checkpoints = tmp_path / "checkpoints"
    common = ("--checkpoints", checkpoints, *options)
    run_job("trainer", tmp_path, *common, "--die-at", "7", world=world, is_killed=True)
    left = killed_in_clean_up(checkpoints)
    newest = holdfast.list_checkpoints(checkpoints)[-1].step
    assert newest == 6 or (newest == 4 and "--asynchronous" in options)
    run_job("trainer", tmp_path, *common, "--resume", world=world)
    check_losses(tmp_path, whole_run(world, *options), world)
    outcome = json.loads((tmp_path / "done.json").read_text())
    assert outcome["steps"] == list(range(1, 13))
    assert outcome["best"] == str(checkpoints / "checkpoint-12")
    listed = {c.path: c.world for c in holdfast.list_checkpoints(checkpoints)}
    assert listed.keys() - left == {"checkpoint-10", "checkpoint-12"}
    assert set(listed.values()) == {world}
    files = {path.name for path in checkpoints.rglob("*") if path.is_file()}
    files.discard("attempt.json")  # of the save that was killed
    assert not {name for name in files if name.endswith((".bin", ".pt", ".pth", ".json"))}


@pytest.mark.nightly(25)
@pytest.mark.parametrize(("sharded", "mode"), [("fsdp1", "no"), ("zero1", "yes")])
def test_killed_job_resumes_without_sharding(tmp_path: Path, sharded: str, mode: str) -> None:
    """The job has one rank, so the samples of a step differ, and so do the losses."""
    checkpoints = tmp_path / "checkpoints"
    common = ("--checkpoints", checkpoints, "--asynchronous", mode)
    options = ("--sharded", sharded, "--die-at", "7")
    run_job("trainer", tmp_path, *common, *options, world=2, is_killed=True)
    newest = holdfast.list_checkpoints(checkpoints)[-1].step
    assert newest in (4, 6)
    for path in tmp_path.glob("losses-*.jsonl"):
        path.unlink()
    run_job("trainer", tmp_path, *common, "--resume")
    assert sorted(losses(tmp_path)) == list(range(newest, 12))
    assert {c.world for c in holdfast.list_checkpoints(checkpoints) if c.step == 12} == {1}


def trainer(
    folder: Path, checkpoints: str | None = None, asynchronous: Any = False, **settings: Any
) -> Any:
    """Return a trainer of a tiny model that saves to ``folder``."""
    from support.trainer_job import Trainer, model, samples

    settings = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "report_to": [], **settings}
    data: Any = samples()
    return Trainer(
        model(lora=False),
        transformers.TrainingArguments(str(folder), **settings),
        train_dataset=data,
        eval_dataset=data,
        checkpoints=checkpoints,
        asynchronous=asynchronous,
    )


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


def test_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    """The best checkpoint may be at a URI. With a limit of one, it alone is left, as by Trainer."""
    made = trainer(
        tmp_path / "out",
        checkpoints=f"file://{tmp_path}/checkpoints?threads=2",
        asynchronous="lazy",
        max_steps=6,
        save_total_limit=1,
        load_best_model_at_end=True,
        greater_is_better=True,  # so the best is the first
        **EVALUATED,
    )
    made.train()
    assert made.state.best_global_step == 2
    paths = [c.path for c in holdfast.list_checkpoints(tmp_path / "checkpoints")]
    assert paths == ["checkpoint-2"]
    stored = holdfast.load(tmp_path / "checkpoints" / "checkpoint-2", only="model")
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(stored[name], tensor), name


def test_best_checkpoint_stays_until_a_better_one_is_committed(tmp_path: Path) -> None:
    """While step 6 is being saved, the checkpoint of step 4 still names step 2 as the best."""
    seen: dict[int, set[int | None]] = {}

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            listed = holdfast.list_checkpoints(tmp_path)
            seen[state.global_step] = {c.step for c in listed}

    made = trainer(tmp_path, asynchronous=True, max_steps=6, save_total_limit=1, **EVALUATED)
    made.evaluate = lambda **_: {"eval_loss": {2: 1.0, 4: 2.0, 6: 0.5}[made.state.global_step]}
    made.add_callback(Look)
    made.train()
    assert seen[6] >= {2, 4}
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [6]


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    """Nothing to resume from, another state, trials, pushes to the Hub and torch_xla are errors."""
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


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(30))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """The page's script is killed, resumes on another number of ranks, and exports the model."""
    check_page("use-with-hugging-face.md", tmp_path, worlds=worlds)
    run = tmp_path / "run"
    assert [c.world for c in holdfast.list_checkpoints(run)] == [*worlds]
    if worlds[-1] == 1:
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        stored = holdfast.load(run / "checkpoint-4", only="model")
        assert difference(stored, dict(exported.state_dict())) is None


@pytest.mark.parametrize("block", [-3, -2])
def test_how_to_loads_adapters_alone(tmp_path: Path, block: int) -> None:
    """Adapters are loaded from a checkpoint of their own, and from one of the whole model; the
    frozen weights stay as they are."""
    from support.trainer_job import model

    trained = model(lora=True)
    fresh = model(lora=True)
    base = {name: p.clone() for name, p in fresh.named_parameters() if not p.requires_grad}
    for p in trained.parameters():
        p.data.uniform_(-1, 1)
    holdfast.save(tmp_path / "run" / "checkpoint-500", {"model": trained})
    names = {"model": trained, "fresh": fresh, "holdfast": holdfast}
    run_block(documented("use-with-hugging-face.md")[block], tmp_path, names)
    for (name, p), q in zip(trained.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(q, base.get(name, p)), name
    if block == -3:
        with holdfast.open(tmp_path / "adapters") as c:
            assert len(c.tensors) == 8
            assert all(".lora_" in name for name in c.tensors)


ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


def with_adapters(kind: str) -> Any:
    """Return a PEFT model with two adapters, whose tensors are random."""
    import peft
    from support.trainer_job import model

    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTERS[kind])
    made = peft.get_peft_model(model(lora=False), config)
    made.add_adapter("other", config)
    for name, p in made.named_parameters():
        if ".default" in name or ".other" in name:
            p.data.uniform_(-1, 1)
    return made


def adapter_in(folder: Path) -> dict[str, Any]:
    """Return what PEFT opens in the folder of an adapter; fail for other files."""
    import peft
    from support.trainer_job import model

    files = {file.name for file in folder.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    opened = peft.PeftModel.from_pretrained(model(lora=False), folder)
    return peft.get_peft_model_state_dict(opened)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("adapter", ["default", "other"])
def test_how_to_exports_adapters(tmp_path: Path, kind: str, adapter: str) -> None:
    """PEFT opens the folder. It has one adapter alone, as PEFT would have written it."""
    import peft

    trained = with_adapters(kind)
    holdfast.save(tmp_path / "run" / "checkpoint-500", {"model": trained, "step": 1})
    expected = peft.get_peft_model_state_dict(trained, adapter_name=adapter)
    block = documented("use-with-hugging-face.md")[-1]
    names = {"model": with_adapters(kind).to("meta")}
    run_block(block, tmp_path, names, {'"default"': f'"{adapter}"'})
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert difference(expected, written) is None
    assert difference(expected, adapter_in(tmp_path / "adapter")) is None


def test_command_exports_adapters_of_linear_layers(tmp_path: Path) -> None:
    """The rule of the page names them as PEFT does."""
    import peft

    trained = with_adapters("linear")
    holdfast.save(tmp_path / "c", {"model": trained, "step": 1})
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    rule = ["--only", "model.*.default", "--rename", "model.*.default.*=*.*"]
    command = ["export", str(tmp_path / "c"), str(file), "--format", "safetensors", *rule]
    assert app.run(command) == 0
    trained.peft_config["default"].save_pretrained(tmp_path / "adapter")
    expected = peft.get_peft_model_state_dict(trained)
    assert difference(expected, adapter_in(tmp_path / "adapter")) is None


@pytest.mark.parametrize(
    ("dtype", "shard", "files"), [(torch.float32, "20KB", 3), (torch.bfloat16, "5GB", 1)]
)
def test_from_pretrained_opens_an_export(
    tmp_path: Path, dtype: torch.dtype, shard: str, files: int
) -> None:
    """Files and dtypes are as asked, bits are the same, and tied embeddings are tied again."""
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
