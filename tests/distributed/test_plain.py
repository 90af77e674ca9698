"""Test plain tensors and values on several ranks: equal ones are stored once, others per rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_processes import RankProcesses
from support.rank_tasks import (
    meshes_of_one_name,
    own_lists,
    partial_loads,
    plain_load,
    plain_save,
    random_load,
    random_save,
    recorded_save,
)

import holdfast


@pytest.fixture(scope="module")
def saved(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[tuple[int, list[str]]]]:
    """A checkpoint of plain tensors on four ranks, and what each rank wrote."""
    uri = str(tmp_path_factory.mktemp("plain") / "c")
    return uri, ranks.run(plain_save, uri)


def test_each_rank_gets_back_what_it_saved(
    saved: tuple[str, list[tuple[int, list[str]]]], ranks: RankProcesses
) -> None:
    """Shared, own, partial and tied tensors, arrays and values are restored."""
    assert ranks.run(plain_load, saved[0], 4) == [[]] * 4


def test_fewer_ranks_get_what_the_ranks_of_their_number_saved(
    saved: tuple[str, list[tuple[int, list[str]]]], ranks: RankProcesses
) -> None:
    """Rank 1 of a smaller job loads the values of rank 1."""
    assert ranks.run(plain_load, saved[0], 4, world=3) == [[]] * 3


def test_what_all_have_alike_is_stored_once(saved: tuple[str, list[tuple[int, list[str]]]]) -> None:
    """Divided among them; what differs is stored by each, what one rank has by that one."""
    names = [images for _, images in saved[1]]
    for rank, there in enumerate(names):
        assert "own" in there
        assert ("only.t" in there) == (rank == 1)
        assert any(name.startswith("same[") for name in there)
    total = 30_000 * 4
    assert total < sum(nbytes for nbytes, _ in saved[1]) < total + 4 * 16384
    assert max(nbytes for nbytes, _ in saved[1]) < total / 4 * 1.05 + 16384
    for name in ("a.second", "z.first", "some", "array", "turned"):
        assert sum(
            any(there.partition("[")[0] == name for there in images) for images in names
        ) in range(5)
    assert sum("z.first" in "".join(images) for images in names) == 0


def test_what_ranks_have_of_their_own_can_be_read_by_rank(
    saved: tuple[str, list[tuple[int, list[str]]]],
) -> None:
    """The checkpoint says which ranks own a tensor, and gives each one's."""
    with holdfast.open(saved[0]) as c:
        assert c.world == 4
        assert c.tensors["own"].owners == (0, 1, 2, 3)
        assert c.tensors["same"].owners == ()
        assert c.tensors["same"].ranks == (0, 1, 2, 3)
        assert c.tensors["only.t"].ranks == (1,)
        assert [c.read("own", rank=rank).tolist() for rank in range(4)] == [
            [float(rank)] * 5 for rank in range(4)
        ]
        assert torch.equal(c.read("same"), torch.arange(30_000.0))
        assert [dict(c.values(rank))['state["who"]'] for rank in range(4)] == [0, 1, 2, 3]
        assert dict(c.values(3))['state["parity"]'] == "odd"
        assert c.verify().ok


def test_lists_of_other_lengths_come_back_as_each_rank_had_them(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Nothing of another rank is added."""
    assert ranks.run(own_lists, str(tmp_path / "c")) == [[]] * 4


def test_random_states_are_each_ranks_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """Every rank goes on drawing what it would have drawn."""
    drawn = ranks.run(random_save, str(tmp_path / "c"))
    assert ranks.run(random_load, str(tmp_path / "c")) == [
        [*numbers, rank] for rank, numbers in enumerate(drawn)
    ]
    assert len({str(numbers) for numbers in drawn}) == 4


@pytest.mark.parametrize("how", ["alike", "one line"])
def test_a_tensor_on_several_meshes_is_stored_once(
    how: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Where each of them holds the same; and where only one has it, it is that one's."""
    found = ranks.run(meshes_of_one_name, str(tmp_path / "c"), how)
    for rank, state in enumerate(found):
        assert torch.equal(state["v"], torch.arange(9.0))
        assert ("w" in state) == (how == "alike" or rank < 2)
        assert all(
            torch.equal(t, torch.arange(35.0).reshape(7, 5))
            for t in [state.get("w", torch.arange(35.0).reshape(7, 5))]
        )
    assert sum(p.stat().st_size for p in tmp_path.rglob("data/*/*.safetensors")) < 44 * 4 + 4 * 8300


def test_no_collective_is_called(ranks: RankProcesses, tmp_path: Path) -> None:
    """Saves and loads use no process group."""
    assert ranks.run(recorded_save, str(tmp_path / "c")) == [[]] * 4


def test_what_is_left_is_told_of_all_ranks_on_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each rank reports the names that any rank misses, and those that no rank has a place for."""
    for missing, unexpected in ranks.run(partial_loads, str(tmp_path / "c"), world=2):
        assert missing == ("new0", "new1")
        assert unexpected == ("extra",)
