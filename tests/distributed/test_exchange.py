"""Test four ranks that want the same bytes: each is read from storage once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exchanging import CHUNK_NBYTES, exchanging_load, halting_load, replicated_save
from support.rank_processes import RankProcesses, errors
from support.shelves import until

import holdfast

pytestmark = pytest.mark.clocked

CHUNKS = 5


@pytest.fixture(scope="module")
def uri(ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a checkpoint of tensors that are equal on four ranks; return its URI."""
    folder = str(tmp_path_factory.mktemp("replicated") / "c")
    ranks.run(replicated_save, folder, CHUNKS)
    return folder


ONE_HOST, TWO_HOSTS, FOUR_HOSTS = [0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3]


@pytest.mark.nightly(7)
@pytest.mark.parametrize(
    ("exchange", "hosts", "cannot", "copies", "manifests"),
    [
        ("auto", ONE_HOST, (), 1, [1, 0, 0, 0]),
        (True, FOUR_HOSTS, (), 1, [1, 1, 1, 1]),
        (True, TWO_HOSTS, (), 1, [1, 1, 0, 0]),
        ("auto", TWO_HOSTS, (), 2, [1, 1, 0, 0]),
        ("auto", FOUR_HOSTS, (), 4, [1, 1, 1, 1]),
        (True, ONE_HOST, (0,), 4, [1, 1, 1, 1]),
    ],
    ids=["default", "four hosts", "two hosts", "within hosts", "alone on a host", "no memory"],
)
def test_ranks_read_for_each_other(
    exchange: Any,
    hosts: list[int],
    cannot: tuple[int, ...],
    copies: int,
    manifests: list[int],
    uri: str,
    ranks: RankProcesses,
) -> None:
    """The ranks together read as few copies of all bytes as they can, and one manifest per host."""
    found = ranks.run(exchanging_load, uri, CHUNKS, exchange, hosts, cannot)
    assert [rank["wrong"] for rank in found] == [None] * 4
    assert [rank["left"] for rank in found] == [0] * 4
    wanted = found[0]["wanted"]
    assert copies * wanted <= sum(rank["read"] for rank in found) <= 1.01 * copies * wanted
    assert max(rank["read"] for rank in found) <= copies * wanted / 4 + CHUNK_NBYTES
    assert all(rank["read"] + rank["received"] >= wanted for rank in found)
    assert [rank["manifests"] for rank in found] == [rank["checked"] for rank in found] == manifests


def test_compressed_images_are_exchanged_as_they_are_unpacked(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Each byte of a compressed image is read once."""
    folder = str(tmp_path / "c")
    ranks.run(replicated_save, folder, 3, "lz4")
    found = ranks.run(exchanging_load, folder, 3, "auto")
    assert [rank["wrong"] for rank in found] == [None] * 4
    assert sum(rank["read"] for rank in found) <= 1.01 * found[0]["wanted"]
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.safetensors.lz4")]
    assert len(sizes) == 4
    assert sum(sizes) < 0.8 * found[0]["wanted"]


def test_without_a_checkpoint_each_rank_says_so(ranks: RankProcesses, tmp_path: Path) -> None:
    """This includes the ranks that wait for another one to read the manifest."""
    raised = errors(ranks.outcomes(ranks.begin(exchanging_load, str(tmp_path / "none"), 1, "auto")))
    assert [type(error) for error in raised] == [holdfast.NotACheckpointError] * 4


def test_damage_that_one_rank_reads_for_others_is_an_error_on_all(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """The rank that reads the flipped byte names the file, and no rank uses the data."""
    ranks.run(replicated_save, str(tmp_path / "c"), CHUNKS)
    image = max(tmp_path.rglob("*.safetensors"), key=lambda path: (path.stat().st_size, path.name))
    with image.open("r+b") as file:
        file.seek(1_000_000)
        old = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([old[0] ^ 1]))
    raised = errors(ranks.outcomes(ranks.begin(exchanging_load, str(tmp_path / "c"), CHUNKS, True)))
    kinds = [type(e) for e in raised]
    assert sorted(kinds, key=str) == [holdfast.DamagedError, *[holdfast.RankFailedError] * 3]
    assert all("not what was written" in str(e) for e in raised)


@pytest.mark.nightly(11)
@pytest.mark.parametrize("how", ["killed", "halted"])
def test_a_rank_that_dies_while_others_wait_for_what_it_reads_is_named(
    how: str, uri: str, tmp_path: Path
) -> None:
    """A kill is noticed at once, a halt within the deadline."""
    sign = tmp_path / "sign"
    with RankProcesses(3) as doomed:
        doomed.begin(halting_load, uri, CHUNKS, 2, str(sign), 60.0 if how == "killed" else 3.0)
        until(sign.exists, "it halted", 60)
        if how == "killed":
            doomed.kill(2)
        raised = errors(doomed.outcomes(2))
    kind = holdfast.RankFailedError if how == "killed" else holdfast.DeadlineError
    assert [(type(e), e.rank) for e in raised] == [(kind, 2)] * 2
    assert all("rank 2" in str(e) and e.took_s < 45 for e in raised)
