"""Test DeepSpeed: a checkpoint of any ZeRO stage equals one of any other layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.deepspeed_jobs import (
    Job,
    load_and_go_on,
    load_and_save_with_deepspeed,
    load_into_new,
    load_model_alone,
    load_with_deepspeed_and_save,
    refused,
    save_and_go_on,
    save_lazily,
    save_with_deepspeed,
)
from support.framework_jobs import check_page
from support.rank_processes import RankProcesses

import holdfast

pytest.importorskip("deepspeed", reason="not installed: make frameworks")

# Warnings of DeepSpeed and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

BF16 = torch.bfloat16
FORMS = {
    "1": Job(1),
    "2, bf16": Job(2, dtype=BF16),
    "3, bf16": Job(3, dtype=BF16),
    "3, with persistent parameters": Job(3, persistent=6),
    "1, bf16, accumulated in fp32": Job(1, dtype=BF16, accumulated="fp32"),
    "2, bf16, offloaded": Job(2, dtype=BF16, offloaded=True),
    "3, bf16, offloaded": Job(3, dtype=BF16, offloaded=True),
}


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on the ranks of a new job: DeepSpeed cannot start twice in a process."""
    with RankProcesses(world, preload=["deepspeed"]) as ranks:
        return ranks.run(function, *args)


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Save ZeRO-3 on two ranks in bf16; return the URI, the job's tensors and further losses."""
    uri = str(tmp_path_factory.mktemp("zero") / "c")
    return uri, run(2, save_and_go_on, uri, FORMS["3, bf16"])[0]


@pytest.mark.parametrize("form", FORMS)
def test_job_resumes_from_its_checkpoint(form: str, tmp_path: Path) -> None:
    """A job of any stage resumes with the same bits, as DeepSpeed gathers them, and losses."""
    uri = str(tmp_path / "c")
    held, expected = run(2, save_and_go_on, uri, FORMS[form])[0]
    for found, found_losses in run(2, load_and_go_on, uri, FORMS[form]):
        assert difference(held, found) is None
        assert found_losses == expected


@pytest.mark.parametrize(
    ("job", "world"),
    [
        (Job(1, dtype=BF16), 3),
        (Job(3, dtype=BF16), 3),
        (Job(2, dtype=BF16), 1),
        pytest.param(Job(1, dtype=BF16, accumulated="fp32"), 2, marks=pytest.mark.nightly(30)),
        (Job(3), 2),
        (Job(other="FSDP2"), 2),
        (Job(other="FULL_SHARD"), 2),
        (Job(other="DDP"), 2),
        (Job(), 1),
    ],
    ids=str,
)
def test_any_layout_loads_a_checkpoint_of_zero(
    job: Job, world: int, saved: tuple[str, Any]
) -> None:
    """Other stages, ranks, dtypes and frameworks load the same bits, with nearly the same losses."""
    uri, (held, expected) = saved
    near = pytest.approx(expected, rel=1e-5 if job.dtype == BF16 else 0.02)
    for found, found_losses in run(world, load_and_go_on, uri, job):
        assert difference(held, found) is None
        assert found_losses == near


def test_zero_loads_a_checkpoint_of_fsdp2(tmp_path: Path) -> None:
    """Stages 1 and 3 load it on three ranks, after they have trained."""
    uri = str(tmp_path / "c")
    held, expected = run(2, save_and_go_on, uri, Job(other="FSDP2"))[0]
    for stage in (1, 3):
        for found, found_losses in run(3, load_and_go_on, uri, Job(stage)):
            assert difference(held, found) is None
            assert found_losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly(30)), 3])
def test_new_job_loads_a_checkpoint_of_one_process(stage: int, tmp_path: Path) -> None:
    """A job that has never stepped, and has no optimizer state yet, loads it."""
    uri = str(tmp_path / "c")
    _, expected = save_and_go_on(uri, Job())
    for found_losses in run(2, load_into_new, uri, Job(stage)):
        assert found_losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "other"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.nightly(30))]
)
def test_frozen_parameters_are_saved_and_loaded(stage: int, other: int, tmp_path: Path) -> None:
    """Frozen parameters have no masters; only stage 3 partitions them."""
    uri = str(tmp_path / "c")
    held, expected = run(2, save_and_go_on, uri, Job(stage, frozen=True))[0]
    for found, found_losses in run(3, load_and_go_on, uri, Job(other, frozen=True)):
        assert difference(held, found) is None
        assert found_losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_loaded_without_their_optimizer(stage: int, saved: tuple[str, Any]) -> None:
    """A load of weights alone fills the masters, so that the next step does not undo it."""
    uri, (held, _) = saved
    weights = {name: t for name, t in held.items() if name.startswith("model.")}
    for found in run(2, load_model_alone, uri, Job(stage, dtype=BF16)):
        assert difference(weights, found) is None


def test_job_switches_from_checkpoints_of_deepspeed_and_back(
    saved: tuple[str, Any], tmp_path: Path
) -> None:
    """DeepSpeed saves the loaded state, and its own checkpoint gives the same state."""
    uri, (held, expected) = saved
    job = Job(2, dtype=BF16)
    run(2, load_and_save_with_deepspeed, uri, str(tmp_path / "own"), job)
    for found in run(2, load_with_deepspeed_and_save, str(tmp_path / "own"), uri + "-back", job):
        assert difference(held, found) is None
    for found, found_losses in run(1, load_and_go_on, uri + "-back", job):
        assert difference(held, found) is None
        assert found_losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly(30)), 3])
def test_lazy_save_stores_the_state_of_the_call(stage: int, tmp_path: Path) -> None:
    """The next step writes to the masters during the save; the next save recognises the state."""
    job = Job(stage, dtype=BF16)
    for number, expected in enumerate(run(2, save_lazily, str(tmp_path), job)[0]):
        found, _ = load_and_go_on(str(tmp_path / str(number)), Job())
        assert difference(expected, found) is None


@pytest.mark.parametrize("stage", [1, 3])
def test_unknown_forms_of_deepspeed_are_refused(stage: int, tmp_path: Path) -> None:
    """A save or load names the path before any I/O.

    Below stage 3 the module alone can be saved, since its parameters are whole.
    """
    expected = {
        "module": ('state["model"]["', "the engine itself"),
        "optimizer alone": ('state["optim"]', "Put the engine into the state"),
        "wrapped optimizer": ('state["optim"]', "engine.optimizer"),
        "offloaded": ('state["model"]', "offload_states"),
        "zero_hpz_partition_size": ('state["model"]', "ZeRO++ hpZ"),
        "zero_quantized_gradients": ('state["model"]', "ZeRO++ qgZ"),
        "own making": ('state["model"]["0"]', "DeepSpeed ZeRO"),
    }
    if stage == 3:
        expected["state dict"] = ('state["model"]', "put DeepSpeed's engine itself")
    for found in run(2, refused, str(tmp_path), stage):
        assert found.keys() == expected.keys()
        for name, (path, said) in expected.items():
            tried = list(found[name])
            if name == "module" and stage == 1:
                assert tried.pop(0) == ""
            if name == "state dict":
                tried.pop()
            for text in tried:
                assert text.startswith("StateError: "), name
                assert path in text, name
                assert said in text, name
    known = {"whole"} if stage == 3 else {"whole", "module"}
    assert {path.name for path in tmp_path.iterdir()} == known


@pytest.mark.parametrize(
    ("job", "world"),
    [
        (Job(1, frozen=True), 2),
        pytest.param(Job(2, dtype=BF16, frozen=True), 3, marks=pytest.mark.nightly(15)),
        pytest.param(Job(3, frozen=True), 2, marks=pytest.mark.nightly(15)),
        (Job(3, dtype=BF16), 3),
    ],
    ids=str,
)
def test_folders_of_deepspeed_are_imported(job: Job, world: int, tmp_path: Path) -> None:
    """Imported weights and moments equal those of DeepSpeed."""
    held = run(world, save_with_deepspeed, str(tmp_path / "own"), job)[0]
    holdfast.import_(tmp_path / "own", tmp_path / "c")
    state = holdfast.load(tmp_path / "c")
    found = {f"model.{name}": tensor.float() for name, tensor in state["model"].items()}
    for name, entry in state["optim"]["state"].items():
        found |= {f"optim.{name}.{key}": torch.as_tensor(entry[key]) for key in entry}
    assert found.keys() == held.keys()
    assert [name for name in held if not torch.equal(found[name], held[name].float())] == []
    with holdfast.open(tmp_path / "c") as c:
        assert c.verify().ok


@pytest.mark.parametrize(
    ("stage", "worlds"),
    [("3", (1, 2, 1)), pytest.param("1", (2, 1, 2), marks=pytest.mark.nightly(25))],
)
def test_how_to(tmp_path: Path, stage: str, worlds: tuple[int, ...]) -> None:
    """The page's script is killed, and resumes on another number of ranks."""
    check_page("use-fsdp1-and-deepspeed.md", tmp_path, "--kind", stage, worlds=worlds)
