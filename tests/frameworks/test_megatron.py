"""Megatron-core on gloo: a small GPT with a distributed optimizer resumes under other layouts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.framework_jobs import check_page
from support.rank_processes import Gone, RankProcesses

import holdfast

pytest.importorskip("megatron", reason="not installed: make frameworks")

with warnings.catch_warnings():  # of what Megatron imports
    warnings.simplefilter("ignore")
    from support import megatron_job
    from support.megatron_job import Layout

    from holdfast.storage.integrations.megatron import HoldfastLoadStrategy, HoldfastSaveStrategy

# Megatron and the packages that it imports cause warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PRELOAD = [
    "support.megatron_on_cpu",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
]
SAVED_AFTER = 3
LAST = 6
ALONE = Layout(1)
REPLICAS = Layout(2)
TENSOR = Layout(2, tensor=2)
PIPELINE = Layout(2, pipeline=2)
ALL = Layout(4, tensor=2, pipeline=2)
TENSOR_AND_REPLICAS = Layout(4, tensor=2)
DENSE_EXPERTS = Layout(1, experts="sequential")
EXPERTS = Layout(2, expert=2, experts="sequential")
STAGES_OF_EXPERTS = Layout(4, expert=2, pipeline=2, experts="sequential")
GROUPED = Layout(2, expert=2, experts="grouped")
"""From Megatron 0.17 on, the same as EXPERTS: its grouped experts need Transformer Engine."""
ROUNDING = 1e-5
"""Relative, of losses in float32: layouts add in other orders."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Four ranks, used by one test after the other."""
    with RankProcesses(4, PRELOAD) as made:
        yield made


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (TENSOR, REPLICAS),
        (REPLICAS, PIPELINE),
        (PIPELINE, TENSOR),
        (ALL, ALONE),
        (ALONE, TENSOR_AND_REPLICAS),
        (EXPERTS, DENSE_EXPERTS),
        (DENSE_EXPERTS, EXPERTS),
        (replace(EXPERTS, world=4), replace(EXPERTS, world=4, expert_tensor=2, tensor=2)),
        (replace(EXPERTS, world=4, tensor=2), replace(EXPERTS, expert=1)),
        (STAGES_OF_EXPERTS, replace(EXPERTS, world=4, expert_tensor=2, tensor=2)),
    ],
    ids=[
        "tp-dp",
        "dp-pp",
        "pp-tp",
        "tp,pp-1",
        "1-tp,dp",
        "ep-1",
        "1-ep",
        "ep,dp-ep,tp",
        "tp,ep-dp",
        "pp,ep-ep,tp",
    ],
)
def test_a_job_goes_on_under_another_layout(
    saved: Layout, loaded: Layout, ranks: RankProcesses, tmp_path: Path
) -> None:
    """A job resumes under another layout with identical tensors and the expected losses."""
    uri = str(tmp_path / "c")
    again = str(tmp_path / "again")
    losses, *others = ranks.run(
        megatron_job.trains, saved, uri, SAVED_AFTER, LAST, world=saved.world
    )
    assert others == [losses] * (saved.world - 1)
    step, further = ranks.run(megatron_job.goes_on, loaded, uri, LAST, again, world=loaded.world)[0]
    assert step == SAVED_AFTER
    assert further == pytest.approx(losses[SAVED_AFTER:], rel=ROUNDING)
    assert not holdfast.diff(uri, again).tensors
    if saved.expert == loaded.expert:  # otherwise, Megatron forms other parameter groups
        assert difference(holdfast.load(uri), holdfast.load(again)) is None


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (TENSOR, REPLICAS),
        (STAGES_OF_EXPERTS, replace(GROUPED, world=4, tensor=2, expert_tensor=2)),
        (replace(GROUPED, world=4), STAGES_OF_EXPERTS),
    ],
    ids=["tp-dp", "pp,ep-grouped", "grouped-pp,ep"],
)
def test_a_job_in_bfloat16_goes_on_from_its_master_copies(
    saved: Layout, loaded: Layout, ranks: RankProcesses, tmp_path: Path
) -> None:
    """A bfloat16 job resumes with identical master copies, and equal losses in the same layout."""
    uri = str(tmp_path / "c")
    again = str(tmp_path / "again")
    saved = replace(saved, dtype=torch.bfloat16)
    losses = ranks.run(megatron_job.trains, saved, uri, SAVED_AFTER, LAST, world=saved.world)[0]
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.tensors["output_layer.weight"].dtype == "bfloat16"
        assert checkpoint.tensors["optimizer.state.param.output_layer.weight"].dtype == "float32"
    _, further = ranks.run(megatron_job.goes_on, saved, uri, LAST, again, world=saved.world)[0]
    assert further == losses[SAVED_AFTER:]
    loaded = replace(loaded, dtype=torch.bfloat16)
    _, further = ranks.run(megatron_job.goes_on, loaded, uri, LAST, again, world=loaded.world)[0]
    assert further == pytest.approx(losses[SAVED_AFTER:], rel=0.02)
    assert not holdfast.diff(uri, again).tensors
    if not saved.experts:
        assert difference(holdfast.load(uri), holdfast.load(again)) is None


def test_a_vocabulary_that_is_padded_otherwise_is_loaded_as_far_as_it_goes(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A padded vocabulary loads into a larger or smaller one, with moments and master copies."""
    uri = str(tmp_path / "c")
    saved = replace(ALONE, vocabulary=33)
    ranks.run(megatron_job.trains, saved, uri, SAVED_AFTER, LAST, world=1)
    for number, layout in enumerate((TENSOR, replace(REPLICAS, vocabulary=32))):
        again = str(tmp_path / f"again-{number}")
        ranks.run(megatron_job.goes_on, layout, uri, LAST, again, world=2)
        with holdfast.open(uri) as first, holdfast.open(again) as second:
            for name in first.tensors:
                rows = min(len(first.read(name)), len(second.read(name)))
                assert torch.equal(first.read(name)[:rows], second.read(name)[:rows]), name
            assert second.tensors["output_layer.weight"].shape == (layout.vocabulary, 16)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
def test_megatrons_own_save_and_load_go_through_the_strategies(
    wrapped: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """A job resumes with identical losses; before Megatron 0.17, its load finds the strategy.

    The tensors have the names and values that our own save stores. Megatron's wrappers for parallel
    saves and loads change nothing.
    """
    folder = tmp_path / "iter_0000003"
    save, load = HoldfastSaveStrategy(), HoldfastLoadStrategy()
    if not wrapped and megatron_job.FINDS_STRATEGIES:
        load = None
    losses = ranks.run(
        *(megatron_job.saves_by_megatron, TENSOR, str(folder), SAVED_AFTER, LAST, save, wrapped),
        world=2,
    )[0]
    assert {path.name for path in folder.iterdir()} >= {"common.pt", "metadata.json"}
    further = ranks.run(
        *(megatron_job.loads_by_megatron, REPLICAS, str(folder), SAVED_AFTER, LAST, load, wrapped),
        world=2,
    )[0]
    assert further == pytest.approx(losses[SAVED_AFTER:], rel=ROUNDING)
    if wrapped:
        return
    plain = ranks.run(megatron_job.plain_tensors, str(folder), world=1)[0]
    stored = holdfast.load(folder)
    assert difference(stored, {key: plain[key] for key in stored}) is None
    ours = str(tmp_path / "ours")
    ranks.run(megatron_job.trains, PIPELINE, ours, SAVED_AFTER, LAST, world=2)
    with holdfast.open(folder) as theirs, holdfast.open(ours) as direct:
        assert theirs.tensors.keys() == direct.tensors.keys()


def test_megatrons_asynchronous_save_survives_a_kill(ranks: RankProcesses, tmp_path: Path) -> None:
    """A job killed in an asynchronous save of Megatron's resumes from the previous one.

    Training continues during a save. No process of Megatron's is left behind.
    """
    losses = ranks.run(megatron_job.trains, REPLICAS, str(tmp_path / "c"), 0, LAST, world=2)[0]
    folder, killed = tmp_path / "iter_0000003", tmp_path / "iter_0000006"
    with RankProcesses(2, PRELOAD, with_children=True) as dying:
        call = (megatron_job.saves_in_the_background, TENSOR, str(folder), SAVED_AFTER, LAST)
        begun = dying.begin(*call, str(killed))
        assert dying.outcomes(begun) == [Gone(), Gone()]
    assert (folder / "metadata.json").exists()
    assert not (killed / "metadata.json").exists()
    left = [
        pid for rank in range(2) for pid in (tmp_path / f"{killed.name}-{rank}").read_text().split()
    ]
    deadline = time.monotonic() + 20
    while any(Path("/proc", pid).exists() for pid in left):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    strategy = HoldfastLoadStrategy()
    further = ranks.run(
        megatron_job.loads_by_megatron, REPLICAS, str(folder), SAVED_AFTER, LAST, strategy, world=2
    )[0]
    assert further == pytest.approx(losses[SAVED_AFTER:], rel=ROUNDING)


def test_a_failed_asynchronous_save_of_megatrons_raises_when_it_is_finalized(
    tmp_path: Path,
) -> None:
    """The error of a save is raised on all ranks, and Megatron does not recognise the folder."""
    folder = tmp_path / "c"
    with RankProcesses(2, PRELOAD, with_children=True) as made:
        errors = made.run(megatron_job.fails_in_the_background, REPLICAS, str(folder), world=2)
    assert all("data" in error for error in errors), errors
    assert not (folder / "metadata.json").exists()


def test_a_job_goes_on_from_an_imported_folder_of_megatrons(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A job resumes from an imported Megatron checkpoint.

    The import holds all tensors, with the values that Megatron itself loads. The losses are
    identical under the same layout, and equal up to rounding under another one.
    """
    folder = tmp_path / "iter_0000003"
    uri = str(tmp_path / "c")
    saved = replace(TENSOR, dtype=torch.bfloat16)
    with RankProcesses(2, PRELOAD, with_children=True) as theirs:
        losses = theirs.run(
            megatron_job.saves_by_megatron, saved, str(folder), SAVED_AFTER, LAST, world=2
        )[0]
    assert {path.name for path in folder.iterdir()} >= {"metadata.json", ".metadata"}
    holdfast.import_(folder, uri, skip=["random/*"])
    plain = ranks.run(megatron_job.plain_tensors, str(folder), world=1)[0]
    with holdfast.open(uri) as checkpoint:
        stored = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert difference(stored, {key: plain[key] for key in stored}) is None
    assert stored.keys() == plain.keys() - {"optimizer", "step"}
    for number, layout in enumerate((saved, replace(REPLICAS, dtype=torch.bfloat16))):
        again = str(tmp_path / f"again-{number}")
        step, further = ranks.run(megatron_job.goes_on, layout, uri, LAST, again, world=2)[0]
        assert step == SAVED_AFTER
        if layout == saved:
            assert further == losses[SAVED_AFTER:]
        assert further == pytest.approx(losses[SAVED_AFTER:], rel=0.02)
        assert not holdfast.diff(uri, again).tensors
        imported = holdfast.load(uri, only="optim.common")
        assert difference(imported, holdfast.load(again, only="optim.common")) is None


def test_what_would_lose_state_is_refused_by_name(ranks: RankProcesses, tmp_path: Path) -> None:
    """A load that would lose state fails, names the state and suggests a remedy."""
    layout = replace(REPLICAS, dtype=torch.bfloat16)
    told = ranks.run(megatron_job.refusals, layout, str(tmp_path / "c"), world=2)[0]
    assert "optimizer_state(" in told["masters left behind"]
    assert 'state["model"]' in told["masters left behind"]
    assert "optimizer_state(" in told["optimizer itself"]
    assert "sharded_state_dict() of all modules" in told["other parameters"]
    assert "not in the parameter's memory" in told["copied"]
    assert "HoldfastSaveStrategy" in told["copied"]


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(30))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """The page's script is killed, resumes with other tensor parallelism, and saves by Megatron's
    own function."""
    check_page("use-with-megatron.md", tmp_path, worlds=worlds)
    last = tmp_path / "run" / "step-00000012"
    with holdfast.open(last) as ours, holdfast.open(tmp_path / "described") as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
