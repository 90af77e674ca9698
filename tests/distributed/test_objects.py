"""Objects with a state of their own in jobs of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bits import difference
from support.jobs import fsdp_train
from support.rank_processes import RankProcesses
from support.wrapped import (
    WRAPPERS,
    factored,
    local_states,
    own_optimizer,
    sharded_of_an_object,
    wrapped_load,
    wrapped_save,
)


@pytest.mark.nightly(7)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_of_sharded_jobs_go_on_as_if_they_had_not_been_interrupted(
    kind: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Wrappers of sharded jobs resume as if they had not been interrupted. DTensors load as
    DTensors, and no rank holds more of a tensor than its shard."""
    uri = str(tmp_path / "c")
    ranks.run(wrapped_save, uri, kind, "fsdp", world=2)
    whole = ranks.run(fsdp_train, "fsdp", 5, world=2)[0]
    for state, largest in ranks.run(wrapped_load, uri, kind, "fsdp", 2, world=2):
        assert difference(whole, state) is None
        assert largest == 26 // 2 * 10


@pytest.mark.nightly(3)
@pytest.mark.parametrize(
    ("kind", "layout", "world"), [("app", "fsdp", 3), ("container", "tp", 4), ("plain", "hsdp", 4)]
)
def test_wrappers_are_loaded_into_another_layout(
    kind: str, layout: str, world: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Wrappers load into another layout, as modules and optimizers do."""
    uri = str(tmp_path / "c")
    saved = ranks.run(wrapped_save, uri, kind, "fsdp", world=2)[0]
    for state, _ in ranks.run(wrapped_load, uri, kind, layout, 0, world=world):
        assert difference(saved, state) is None


@pytest.mark.nightly(4)
def test_states_of_another_shape_than_their_parameter_come_back_as_they_were(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Factored moments of a sharded parameter are DTensors again."""
    uri = str(tmp_path / "c")
    (_, before), _ = ranks.run(factored, uri, "fsdp", 3, False, world=2)
    assert set(before.values()) >= {"plain", "(Replicate(),)", "(Shard(dim=0),)"}
    whole = ranks.run(factored, "", "fsdp", 5, False, world=2)[0][0]
    for state, after in ranks.run(factored, uri, "fsdp", 2, True, world=2):
        assert after == before
        assert difference(whole, state) is None


def test_plain_states_of_sharded_parameters_stay_plain(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Each rank gets back its own state of an optimizer that works on local tensors."""
    assert ranks.run(local_states, str(tmp_path / "c"), world=2) == [True, True]


def test_what_an_object_has_otherwise_or_not_at_all_is_laid_out_as_it_was(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A DTensor in another dtype, and a new one, load on the mesh of the model."""
    found = ranks.run(sharded_of_an_object, str(tmp_path / "c"), world=2)
    assert found == [["torch.float32 (Shard(dim=0),)"] * 3] * 2


def test_groups_of_all_ranks_are_matched_by_name(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each rank has parameters of its own, in two groups."""
    uri = str(tmp_path / "c")
    ranks.run(own_optimizer, uri, False, world=2)
    assert ranks.run(own_optimizer, uri, True, world=1) == [[(2.0, 4, True), (1.0, 4, True)]]
    assert ranks.run(own_optimizer, uri, True, world=4) == [[(2.0, 1, True), (1.0, 1, True)]] * 4


def test_numbers_of_parameters_are_those_of_the_rank(ranks: RankProcesses, tmp_path: Path) -> None:
    """Without modules, parameter numbers are per rank, because groups may differ in size."""
    uri = str(tmp_path / "c")
    ranks.run(own_optimizer, uri, False, False, world=2)
    assert ranks.run(own_optimizer, uri, True, False, world=2) == [
        [(1.0, 1, True), (2.0, n, True)] for n in (1, 2)
    ]
