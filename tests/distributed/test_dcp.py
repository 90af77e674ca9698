"""The door into torch's distributed checkpoint (DCP), on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from support.bits import difference
from support.dcp_tasks import (
    accepts,
    arranged_full,
    cached_plans,
    dcp_load,
    dcp_save,
    each_alone,
    of_some_ranks,
    one_refused,
    refused_without_collectives,
    several_boxes,
    two_uris,
    without_collectives,
)
from support.framework_jobs import run_job
from support.jobs import fsdp_load, fsdp_save
from support.rank_processes import RankProcesses, errors
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.errors import NotACheckpointError, RankFailedError, StateError, UsageError

needs_no_collectives = pytest.mark.skipif(
    not accepts(dcp.save, "use_collectives"), reason="this torch has no such option"
)
needs_no_dist = pytest.mark.skipif(
    not accepts(dcp.save, "no_dist"), reason="this torch has no such option"
)
needs_processes = pytest.mark.skipif(
    not accepts(dcp.async_save, "async_checkpointer_type"), reason="this torch has no such option"
)


@pytest.mark.parametrize(
    ("stored", "stored_world", "layout", "world"),
    [("fsdp", 2, "fsdp", 1), ("tp", 4, "fsdp", 2), ("hsdp", 4, "tp", 4)],
)
def test_what_dcp_saves_dcp_and_holdfast_load_in_any_layout(
    stored: str, stored_world: int, layout: str, world: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """A trained model and its optimizer load into another layout, bit for bit."""
    uri = str(tmp_path / "c")
    saved, *_ = ranks.run(dcp_save, uri, stored, 2, world=stored_world)
    for load in (dcp_load, fsdp_load):
        args = (uri, layout, 0, False) if load is fsdp_load else (uri, layout)
        for loaded in ranks.run(load, *args, world=world):
            assert difference(saved, loaded) is None
    with holdfast.open(uri) as c:
        assert (c.step, c.world) == (2, stored_world)
        assert c.verify().ok
        values = dict(c.values())
    assert values['state["betas"][1][0]'] == 1


def test_folders_that_dcp_has_written_are_imported(ranks: RankProcesses, tmp_path: Path) -> None:
    """An imported DCP folder loads as objects in another layout, bit for bit."""
    saved, *_ = ranks.run(dcp_save, str(tmp_path / "dcp"), "hsdp", 2, True, world=4)
    uri = str(tmp_path / "c")
    holdfast.import_(tmp_path / "dcp", uri, step=2)
    for loaded in ranks.run(fsdp_load, uri, "tp", 0, False, world=2):
        assert difference(saved, loaded) is None
    with holdfast.open(uri) as c:
        assert c.verify().ok
        assert max(t.shards for t in c.tensors.values()) == 2
        assert dict(c.values())['state["betas"][1][0]'] == 1


def test_folders_that_are_exported_dcp_loads_in_any_layout(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """DCP's own reader loads an export of objects that two ranks saved."""
    saved, _ = ranks.run(fsdp_save, str(tmp_path / "c"), "fsdp", 2, world=2)
    holdfast.export(tmp_path / "c", tmp_path / "dcp", format="dcp")
    for loaded in ranks.run(dcp_load, str(tmp_path / "dcp"), "tp", True, world=4):
        assert difference(saved, loaded) is None


def test_what_holdfast_saves_dcp_loads_in_any_layout(ranks: RankProcesses, tmp_path: Path) -> None:
    """DCP loads a checkpoint of objects into its own state dicts."""
    uri = str(tmp_path / "c")
    saved, _ = ranks.run(fsdp_save, uri, "fsdp", 2, world=2)
    for loaded in ranks.run(dcp_load, uri, "tp", world=2):
        assert difference(saved, loaded) is None


def test_plans_may_be_cached(ranks: RankProcesses, tmp_path: Path) -> None:
    """DCP sends the plans only with the first save."""
    ranks.run(cached_plans, str(tmp_path), world=2)
    for number, step in (("0", 3), ("1", 1), ("2", 2)):
        assert difference(arranged_full(step), holdfast.load(tmp_path / number)) is None
        assert len(list((tmp_path / number / "data").iterdir())) == 1
        for loaded in ranks.run(several_boxes, str(tmp_path / number), world=3):
            assert difference(arranged_full(step), loaded) is None


def test_a_value_of_one_rank_that_cannot_be_stored_fails_the_save_of_all(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Every rank learns which value it is, and where. The previous checkpoint is untouched."""
    uri = tmp_path / "0"
    ranks.run(cached_plans, str(tmp_path), world=2)
    failed = errors(ranks.outcomes(ranks.begin(one_refused, str(uri), world=2)))
    for error in failed:
        assert isinstance(error, CheckpointException)
        ((cause, _),) = error.failures.values()
        assert isinstance(cause, StateError)
        assert 'state["hook"] is a builtins.builtin_function_or_method' in str(cause)
        assert list(error.failures) == [1]
    assert difference(arranged_full(3), holdfast.load(uri)) is None
    ranks.run(cached_plans, str(tmp_path), world=2)
    assert len(list((uri / "data").iterdir())) == 1


def test_ranks_that_save_to_different_places_are_told(ranks: RankProcesses, tmp_path: Path) -> None:
    """The error names both places, and nothing is committed at either."""
    first, second = errors(ranks.outcomes(ranks.begin(two_uris, str(tmp_path), world=2)))
    for error in (first, second):
        assert isinstance(error, CheckpointException)
        assert isinstance(error.failures[1][0], UsageError)
        assert "rank 1 saves to" in str(error.failures[1][0])
    for rank in "01":
        with pytest.raises(NotACheckpointError):
            holdfast.load(tmp_path / rank)


def test_some_ranks_save_in_a_process_group_of_their_own(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """The ranks outside of it take no part."""
    ranks.run(of_some_ranks, str(tmp_path / "c"), world=3)
    with holdfast.open(tmp_path / "c") as c:
        assert c.world == 2


@needs_no_dist
def test_each_rank_may_save_alone(ranks: RankProcesses, tmp_path: Path) -> None:
    """With no_dist, each rank saves to its own location."""
    ranks.run(each_alone, str(tmp_path), world=2)


@pytest.mark.nightly(25)
@needs_processes
def test_an_asynchronous_save_may_run_in_a_process(tmp_path: Path) -> None:
    """Under torchrun, DCP saves from an additional process per rank."""
    run_job("dcp", tmp_path, world=2)
    for name, step in (("process-1", 1), ("process-2", 2), ("thread-3", 3)):
        assert difference(arranged_full(step), holdfast.load(tmp_path / name)) is None


@needs_no_collectives
def test_without_collectives_the_ranks_meet_by_other_means(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """The result is one checkpoint."""
    uri = tmp_path / "c"
    ranks.run(without_collectives, str(uri), world=3)
    assert difference(arranged_full(5), holdfast.load(uri)) is None
    for loaded in ranks.run(several_boxes, str(uri), world=2):
        assert difference(arranged_full(5), loaded) is None
    with holdfast.open(uri) as c:
        assert (c.world, c.step) == (3, 5)
        assert c.verify().ok
        assert c.tensors["replicated"].ranks != c.tensors["plain"].ranks


@needs_no_collectives
def test_without_collectives_a_failure_is_known_everywhere(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """They learn of it at once. Nothing changes, and the next save works."""
    uri = tmp_path / "c"
    ranks.run(without_collectives, str(uri), world=2)
    first, second = errors(
        ranks.outcomes(ranks.begin(refused_without_collectives, str(uri), world=2))
    )
    assert isinstance(first, RankFailedError)
    assert "rank 1" in str(first)
    assert isinstance(second, StateError)
    assert difference(arranged_full(5), holdfast.load(uri)) is None
    assert len(list((uri / "data").iterdir())) == 1
    ranks.run(without_collectives, str(uri), world=2)
