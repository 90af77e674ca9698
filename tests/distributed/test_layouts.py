"""What was saved in one parallel layout is loaded into any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.around import load_around, save_around
from support.bits import difference
from support.jobs import (
    fsdp_evaluated,
    fsdp_load,
    fsdp_save,
    fsdp_train,
    layouts_load,
    layouts_save,
    one_memory,
)
from support.rank_processes import RankProcesses

import holdfast

SHAPES = [(7, 5), (8, 4), (3,), (1, 9), (2, 3, 6), (0, 4), ()]


@pytest.fixture(scope="module")
def trained(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, dict[str, Any]]]:
    """A checkpoint of each layout on four ranks, and what is in it."""
    made = {}
    for layout in ("fsdp", "hsdp", "tp"):
        uri = str(tmp_path_factory.mktemp("trained") / layout)
        made[layout] = (uri, ranks.run(fsdp_save, uri, layout, 3)[0])
    return made


@pytest.mark.nightly(14)
@pytest.mark.parametrize(
    ("layout", "world"),
    [("fsdp", 4), ("fsdp", 3), ("fsdp", 2), ("fsdp", 1), ("hsdp", 4), ("tp", 4), ("tp", 2)],
)
@pytest.mark.parametrize("stored", ["fsdp", "hsdp", "tp"])
def test_a_training_job_is_loaded_into_another_layout(
    stored: str, layout: str, world: int, ranks: RankProcesses, trained: Any
) -> None:
    """FSDP2, replicas of shards, and FSDP over tensor parallel, with AdamW, on 4, 3, 2 and 1 ranks."""
    uri, expected = trained[stored]
    for found in ranks.run(fsdp_load, uri, layout, world=world):
        assert difference(expected, found) is None


@pytest.mark.parametrize("lazy", [False, True])
def test_parameters_that_an_evaluation_has_gathered_are_saved_and_loaded_in_their_shards(
    lazy: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """FSDP2 leaves those of its root gathered after a forward without a backward."""
    uri = str(tmp_path / "c")
    for expected, found in ranks.run(fsdp_evaluated, uri, lazy, world=2):
        assert difference(expected, found) is None
    assert "head.weight" in holdfast.load(uri)["optim"]["state"]


@pytest.mark.nightly(7)
@pytest.mark.parametrize(
    ("layout", "world"), [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.drill), ("tp", 4)]
)
def test_a_model_that_was_sharded_on_meta_is_given_memory_by_a_load(
    layout: str, world: int, ranks: RankProcesses, trained: Any
) -> None:
    """Each rank allocates its own shards. The optimizer was made before, and training goes on."""
    uri, _ = trained[layout]
    for found in ranks.run(fsdp_load, uri, layout, 2, True, "meta", world=world):
        assert difference(ranks.run(fsdp_load, uri, layout, 2, world=world)[0], found) is None


@pytest.mark.nightly(6)
def test_layers_that_tensor_parallel_left_alone_are_stored_once(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """FSDP shards them over one line of the mesh, and every line holds the same."""
    expected = ranks.run(fsdp_save, str(tmp_path / "c"), "loose", 3)[0]
    for layout in ("loose", "fsdp"):
        assert all(
            difference(expected, found) is None
            for found in ranks.run(fsdp_load, str(tmp_path / "c"), layout)
        )
    assert (
        difference(
            ranks.run(fsdp_train, "loose", 5)[0],
            ranks.run(fsdp_load, str(tmp_path / "c"), "loose", 2)[0],
        )
        is None
    )


def test_a_sharded_job_is_read_without_any_process_group(trained: Any) -> None:
    """On one machine, by name: whole tensors."""
    for uri, expected in trained.values():
        built = holdfast.load(uri)
        assert difference(expected["model"], built["model"]) is None
        assert difference(expected["optim"]["state"], built["optim"]["state"]) is None
        assert built["step"] == 3


LINE = [((4,), ("S0",)), ((4,), ("R",)), ((4,), ("F",))]
SQUARE = [
    ((2, 2), ("S0", "R")), ((2, 2), ("R", "S0")), ((2, 2), ("R", "R")), ((2, 2), ("S0", "S0")), ((2, 2), ("T0/2", "S0")), ((4, 1), ("S0", "R")), ((2, 2), ("F", "R")),
]  # fmt: skip
COLUMNS = [
    ((4,), ("S1",)),
    ((2, 2), ("S0", "S1")),
    ((2, 2), ("S1", "S0")),
    ((2, 2), ("T1/2", "S1")),
    ((2, 2), ("S1", "R")),
]


def test_every_placement_is_loaded_into_every_other(ranks: RankProcesses, tmp_path: Path) -> None:
    """All placements over one and two dimensions, with uneven and empty parts."""
    flat = [shape for shape in SHAPES if len(shape) >= 1]
    ranks.run(layouts_save, str(tmp_path / "rows"), LINE + SQUARE, flat)
    assert (
        ranks.run(layouts_load, str(tmp_path / "rows"), LINE + SQUARE, LINE + SQUARE, flat)
        == [[]] * 4
    )
    deep = [shape for shape in SHAPES if len(shape) >= 2]
    ranks.run(layouts_save, str(tmp_path / "all"), LINE + SQUARE + COLUMNS, deep)
    assert (
        ranks.run(
            layouts_load,
            str(tmp_path / "all"),
            LINE + SQUARE + COLUMNS,
            LINE + SQUARE + COLUMNS,
            deep,
        )
        == [[]] * 4
    )
    ranks.run(layouts_save, str(tmp_path / "none"), [LINE[1], SQUARE[2]], SHAPES)
    assert (
        ranks.run(layouts_load, str(tmp_path / "none"), [LINE[1], SQUARE[2]], [LINE[1]], SHAPES)
        == [[]] * 4
    )


def test_what_several_ranks_hold_is_divided_evenly_among_them(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Replicas, whole or of shards, in one large tensor or many small ones."""
    for layout, shapes in (
        (((4,), ("R",)), [(1000, 1000)]),
        (((2, 2), ("R", "S0")), [(999, 1001)]),
        (((2, 2), ("S1", "R")), [(1000, 1002)]),
        (((2, 2), ("F", "R")), [(999, 1001)]),
        (((2, 2), ("R", "R")), [(i, 300) for i in range(100, 140)]),
    ):
        uri = tmp_path / str(len(list(tmp_path.iterdir())))
        nbytes = ranks.run(layouts_save, str(uri), [layout], shapes)
        total = sum(4 * a * b for a, b in shapes)
        assert total <= sum(nbytes) <= total * 1.03 + 4 * 16384
        assert max(nbytes) <= 1.03 * total / 4 + 16384
        assert sorted(p.stat().st_size for p in uri.rglob("data/*/*.safetensors")) == sorted(nbytes)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_local_tensor_around_another_is_stored_as_that(
    lazy: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Under its own name, as weights that are gathered in another dtype."""
    uri = str(tmp_path / "c")
    ranks.run(save_around, uri, lazy, world=2)
    for world in (2, 3):
        assert ranks.run(load_around, uri, world=world) == [[True] * 3] * world


def test_what_lies_in_one_memory_is_tied_only_if_it_is_the_same_part(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Meshes in another order place the same local tensor elsewhere."""
    assert ranks.run(one_memory, str(tmp_path / "c"), world=2) == [True, True]
