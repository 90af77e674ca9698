"""Test values, objects and process groups of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bits import difference
from support.importing import built_by_dcp
from support.jobs import fsdp_train
from support.rank_processes import RankProcesses
from support.rank_tasks import (
    actor_and_critic,
    copies_of_one,
    dealt_lists,
    part_of_an_epoch,
    partial_loads,
    random_load,
    random_save,
    recorded_save,
    runs_of_groups,
    save_lists,
)
from support.wrapped import (
    WRAPPERS,
    factored,
    local_states,
    own_optimizer,
    sharded_of_an_object,
    wrapped_load,
    wrapped_save,
)
from torch.distributed.checkpoint import FileSystemReader

import holdfast
from holdfast.storage.integrations.dcp import HoldfastReader


def test_random_states_are_each_ranks_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """Every rank continues its own random sequences."""
    drawn = ranks.run(random_save, str(tmp_path / "c"))
    assert ranks.run(random_load, str(tmp_path / "c")) == [
        [*numbers, rank] for rank, numbers in enumerate(drawn)
    ]
    assert len({str(numbers) for numbers in drawn}) == 4


def test_no_collective_is_called(ranks: RankProcesses, tmp_path: Path) -> None:
    """Saves and loads use no process group."""
    assert ranks.run(recorded_save, str(tmp_path / "c")) == [[]] * 4


def test_what_is_left_is_told_of_all_ranks_on_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each rank reports names that some rank misses, and names without a place on any rank."""
    for missing, unexpected in ranks.run(partial_loads, str(tmp_path / "c"), world=2):
        assert missing == ("new0", "new1")
        assert unexpected == ("extra",)


def test_two_groups_save_a_checkpoint_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each group saves a checkpoint of two ranks, numbered from 0, without waiting for the other."""
    found = ranks.run(actor_and_critic, str(tmp_path))
    assert [one["world"] for one in found] == [2] * 4
    assert all(one["whole"] for one in found)
    assert [one["own"] for one in found] == [0.0, 1.0, 2.0, 3.0]
    assert [one["data"] for one in found] == [{"at": rank} for rank in range(4)]
    assert sorted(path.name for path in (tmp_path / "half-1" / "data").glob("*/*.safetensors")) == [
        "0.safetensors",
        "1.safetensors",
    ]


def test_two_groups_train_with_a_checkpointer_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """They save and resume at steps of their own."""
    assert ranks.run(runs_of_groups, str(tmp_path)) == [2, 2, 3, 3]


def test_a_rank_alone_saves_what_it_has_whole(ranks: RankProcesses, tmp_path: Path) -> None:
    """It saves a replicated tensor; a sharded one is refused by name."""
    for said in ranks.run(copies_of_one, str(tmp_path), world=2):
        assert "w: [3:5,0:3] is missing" in said or "w: [0:3,0:3] is missing" in said


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLES = 103


def test_each_sample_of_an_epoch_is_read_once_by_four_then_two_then_three_ranks(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Each job stops in the middle of the epoch."""
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    read = ranks.run(part_of_an_epoch, None, first, SAMPLES, 3, world=4)
    assert [len(samples) for samples in read] == [9] * 4
    read += ranks.run(part_of_an_epoch, first, second, SAMPLES, 5, world=2)
    read += ranks.run(part_of_an_epoch, second, None, SAMPLES, -1, world=3)
    assert sorted(sample for samples in read for sample in samples) == list(range(SAMPLES))


def test_lists_of_all_ranks_are_dealt_out_anew(ranks: RankProcesses, tmp_path: Path) -> None:
    """Lists of other lengths on each rank, given by every rule to fewer ranks and to more."""
    uri = str(tmp_path / "c")
    ranks.run(save_lists, uri, world=3)
    saved = [["0.0"], ["1.0", "1.1"], ["2.0", "2.1", "2.2"]]
    joined = [name for names in saved for name in names]
    for world in (2, 4):
        dealt = ranks.run(dealt_lists, uri, world=world)
        assert [each["keep"] for each in dealt] == [saved[rank % 3] for rank in range(world)]
        assert [each["broadcast"] for each in dealt] == [saved[0]] * world
        for rule in ("split", "merge"):
            assert [name for each in dealt for name in each[rule]] == joined
        assert sorted({len(each["split"]) for each in dealt}) in ([3], [1, 2])
    everyone = {str(rank): names for rank, names in enumerate(saved)}
    assert holdfast.load(uri)["split"]["of"] == everyone
    holdfast.export(uri, tmp_path / "dcp", format="dcp")
    for reader in (HoldfastReader(uri), FileSystemReader(tmp_path / "dcp")):
        found = built_by_dcp(reader)
        assert found["split"]["of"] == everyone
        assert found["lists"] == [["0.0"]]


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
