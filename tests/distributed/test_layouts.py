"""A checkpoint of one parallel layout loads into any other, bit for bit."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.jobs import fsdp_evaluated, fsdp_load, fsdp_save, fsdp_tied, fsdp_train, one_memory
from support.rank_processes import RankProcesses
from support.rank_tasks import expert_state, load_around, marked_experts, save_around

import holdfast


@pytest.fixture(scope="module")
def trained(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a checkpoint of each layout on four ranks, and its contents."""
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
    """FSDP2 leaves the root's parameters gathered after a forward without a backward."""
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
    """Each rank allocates its own shards for an existing optimizer, and training continues."""
    uri, _ = trained[layout]
    for found in ranks.run(fsdp_load, uri, layout, 2, True, "meta", world=world):
        assert difference(ranks.run(fsdp_load, uri, layout, 2, world=world)[0], found) is None


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_model_is_sharded_and_loaded_from_one_of_its_names(
    device: str, stored: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Neither name is missing, also on a rank that has no row of the weight."""
    weight = torch.arange(8.0).view(2, 4)
    holdfast.save(tmp_path / "c", {stored: weight, "head.bias": torch.ones(2)})
    for strict in (True, False):
        found = ranks.run(fsdp_tied, str(tmp_path / "c"), device, strict, world=3)
        assert difference([[weight, weight, True]] * 3, found) is None


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
    whole = ranks.run(fsdp_train, "loose", 5)[0]
    resumed = ranks.run(fsdp_load, str(tmp_path / "c"), "loose", 2)[0]
    assert difference(whole, resumed) is None


def test_a_sharded_job_is_read_without_any_process_group(trained: Any) -> None:
    """On one machine, whole tensors are read by name."""
    for uri, expected in trained.values():
        built = holdfast.load(uri)
        assert difference(expected["model"], built["model"]) is None
        assert difference(expected["optim"]["state"], built["optim"]["state"]) is None
        assert built["step"] == 3


@pytest.mark.parametrize("lazy", [False, True])
def test_a_local_tensor_around_another_is_stored_as_that(
    lazy: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """It keeps its own name, as do weights that are gathered in another dtype."""
    uri = str(tmp_path / "c")
    ranks.run(save_around, uri, lazy, world=2)
    for world in (2, 3):
        assert ranks.run(load_around, uri, world=world) == [[True] * 3] * world


def test_what_lies_in_one_memory_is_tied_only_if_it_is_the_same_part(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Meshes in another order place the same local tensor elsewhere."""
    assert ranks.run(one_memory, str(tmp_path / "c"), world=2) == [True, True]


def test_experts_whose_shape_is_that_of_a_group_are_loaded_into_other_groups(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A DTensor may be a box of a larger tensor: other groups of ranks load other boxes."""
    uri = str(tmp_path / "c")
    ranks.run(partial(expert_state, save=True), uri, (2, 2), world=4)
    assert torch.equal(holdfast.load(uri)["experts"], torch.arange(72.0).reshape(4, 6, 3))
    for shape in ((4, 1), (1, 2), (2, 1)):
        ranks.run(partial(expert_state, save=False), uri, shape, world=shape[0] * shape[1])


@pytest.mark.parametrize("saved", [(1, 1), (2, 2), (4, 1)])
def test_marked_experts_and_their_moments_are_loaded_into_other_groups(
    saved: tuple[int, int], ranks: RankProcesses, tmp_path: Path
) -> None:
    """A module's experts, and the optimizer's state of them, are boxes of whole tensors."""
    uri = str(tmp_path / "c")
    (_, expected), *_ = ranks.run(
        partial(marked_experts, save=True), str(tmp_path / "whole"), (1, 1), world=1
    )
    ranks.run(partial(marked_experts, save=True), uri, saved, world=math.prod(saved))
    with holdfast.open(uri) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    assert shapes["model.experts"] == shapes["optim.state.experts.exp_avg"] == (4, 6, 3)
    for shape in ((1, 1), (2, 1), (1, 2), (2, 2)):
        load = partial(marked_experts, save=False)
        for start, found in ranks.run(load, uri, shape, world=math.prod(shape)):
            assert torch.equal(found, expected[start : start + len(found)])
