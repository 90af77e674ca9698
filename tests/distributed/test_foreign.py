"""FSDP1 is saved and loaded without gathering; unknown layouts are refused by name."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from support.bits import difference
from support.foreign_jobs import fsdp1_leaves, hooked_tensors, sharded_tensors, uneven_tensors
from support.fsdp1_jobs import (
    Layout,
    load_and_go_on,
    load_differing_steps,
    refused,
    save_after_forward,
    save_and_go_on,
    save_replaced_data,
)
from support.rank_processes import RankProcesses

import holdfast


@pytest.mark.nightly(16)
def test_what_fsdp1_leaves_in_plain_dicts_is_refused_by_name(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """This applies to flat parameters, and views of them."""
    for texts in ranks.run(fsdp1_leaves, str(tmp_path / "c"), world=2):
        for text in texts:
            assert text.startswith('StateError: state["model"]["')
            assert "FSDP1" in text
            assert len(text) < 500
    assert list(tmp_path.iterdir()) == []


def test_sharded_tensors_are_loaded_cut_otherwise(ranks: RankProcesses, tmp_path: Path) -> None:
    """Two ranks and three ranks save several parts each, and one rank has fewer."""
    for world in (2, 3):
        assert all(ranks.run(sharded_tensors, str(tmp_path / str(world)), world=world))


def test_a_dtensor_whose_hooks_tell_another_layout_is_refused(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Megatron-FSDP has parts of equal sizes at other offsets."""
    for found in ranks.run(hooked_tensors, str(tmp_path), world=2):
        assert found.pop("save right") == found.pop("load right") == ""
        names = {
            "buffer": '["m"]["cache"]',
            "module": '["m"]["weight"]',
            "optimizer": 'group 0 in state["o"]',
        }
        for what, text in found.items():
            assert text.startswith("StateError: "), what
            assert names.get(what.split()[1], 'state["w"]') in text, what
            said = (
                "LocalShardsWrapper"
                if what.endswith("wrapped")
                else "layout that this release does not support"
            )
            assert said in text, what
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


def test_a_local_tensor_of_another_shape_than_its_placements_imply_is_refused(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Examples are uneven parts, padding, and unexpected elements."""
    first, second = ranks.run(uneven_tensors, str(tmp_path), world=2)
    for rank, found in enumerate((first, second)):
        for name, alone in (("longer first", None), ("padded", 1), ("none expected", 1)):
            for what in (f"save {name}", f"load {name}"):
                mine = alone is None or rank == alone
                kind = "StateError: " if mine else "RankFailedError: "
                assert found[what].startswith(kind), what
                assert 'state["w"] holds a local tensor of shape' in found[what], what
            assert found[f"committed {name}"] == "False"


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
FORMS = [
    *(Layout(kind, orig) for kind, orig in product(STRATEGIES, (True, False))),
    Layout("FULL_SHARD", orig=True, mesh=True, recomputed=True),
    Layout("FULL_SHARD", orig=False, mesh=True),
    Layout("SHARD_GRAD_OP", orig=True, mixed=True),
    Layout("FULL_SHARD", orig=False, mixed=True),
    Layout("NO_SHARD", orig=True, mixed=True),
    Layout("FULL_SHARD", orig=True, frozen=True),
]


def world_of(layout: Layout) -> int:
    """Return the number of ranks of a layout."""
    return {"plain": 1, "HYBRID_SHARD": 4}.get(layout.kind, 2)


@pytest.mark.nightly(10)
@pytest.mark.parametrize("layout", FORMS, ids=str)
def test_a_job_goes_on_from_its_checkpoint(
    layout: Layout, ranks: RankProcesses, tmp_path: Path
) -> None:
    """A job resumes with identical tensors and losses, even with gathered parameters."""
    uri = str(tmp_path / "c")
    world = world_of(layout)
    held, losses = ranks.run(save_and_go_on, uri, layout, world=world)[0]
    for found, found_losses in ranks.run(load_and_go_on, uri, layout, True, world=world):
        assert difference(held, found) is None
        assert found_losses == losses


@pytest.mark.nightly(5)
@pytest.mark.parametrize("orig", [True, False])
def test_what_fsdp1_saves_any_other_layout_loads(
    orig: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Other FSDP1 forms, FSDP2, DDP, a bare module and a load without target read FSDP1's save."""
    uri = str(tmp_path / "c")
    held, losses = ranks.run(save_and_go_on, uri, Layout("FULL_SHARD", orig), world=2)[0]
    others = [(Layout("FULL_SHARD", not orig), 3)]
    others += [(Layout(kind), world) for kind, world in (("FSDP2", 2), ("DDP", 2), ("plain", 1))]
    for layout, world in others:
        for found, found_losses in ranks.run(load_and_go_on, uri, layout, world=world):
            assert difference(held, found) is None, layout
            assert found_losses == pytest.approx(losses, rel=1e-5), layout
    built = holdfast.load(uri)
    assert sorted(f"model.{name}" for name in built["model"]) == sorted(
        name for name in held if name.startswith("model.")
    )
    steps = [entry["step"] for entry in built["optim"]["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


@pytest.mark.nightly(3)
@pytest.mark.parametrize("kind", ["FSDP2", "DDP", "plain"])
def test_what_another_layout_saves_fsdp1_loads(
    kind: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """FSDP1 on three ranks loads other layouts, with original and with flat parameters."""
    uri = str(tmp_path / "c")
    layout = Layout(kind)
    held, losses = ranks.run(save_and_go_on, uri, layout, world=world_of(layout))[0]
    for orig in (True, False):
        fsdp1 = Layout("FULL_SHARD", orig)
        for found, found_losses in ranks.run(load_and_go_on, uri, fsdp1, world=3):
            assert difference(held, found) is None
            assert found_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("orig", [True, False])
def test_a_save_after_a_forward_stores_what_the_ranks_hold(
    kind: str, orig: bool, ranks: RankProcesses, tmp_path: Path
) -> None:
    """After a forward pass the original parameters show the gathered data."""
    uri = str(tmp_path / "c")
    held = ranks.run(save_after_forward, uri, Layout(kind, orig), world=2)[0]
    found = ranks.run(load_and_go_on, uri, Layout("plain"), world=1)[0][0]
    assert difference(held, found) is None


def test_new_data_of_an_original_parameter_is_saved(ranks: RankProcesses, tmp_path: Path) -> None:
    """New data of an original parameter is saved before FSDP1 copies it to the flat parameter."""
    uri = str(tmp_path / "c")
    held = ranks.run(save_replaced_data, uri, world=2)[0]
    found = ranks.run(load_and_go_on, uri, Layout("plain"), world=1)[0][0]
    assert difference(held, found) is None


def test_what_of_fsdp1_cannot_be_saved_is_refused_by_name(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Saves and loads refuse unsupported FSDP1 states by path, before any I/O."""
    expected = {
        "optimizer alone": ('group 0 in state["optim"] is sharded by FSDP1', True),
        "flat optimizer alone": ('group 0 in state["optim"] is sharded by FSDP1', True),
        "gathered": ('state["model"]["0.weight"] is a parameter of FSDP1', True),
        "column-major": ('state["model"]["weight"] is a parameter of FSDP1', True),
        "own making": ('state["model"]["_fsdp_wrapped_module.1"] is a Extra', True),
        "other shape": ('["rows"] is a tensor of shape', False),
    }
    for found in ranks.run(refused, str(tmp_path), world=2):
        assert found.keys() == expected.keys()
        for name, (path, both) in expected.items():
            for text in found[name][: 1 + both]:
                assert text.startswith("StateError: "), name
                assert path in text, name
                assert "FSDP1" in text, name
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_fsdp1_cannot_hold_is_refused_when_it_is_loaded(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """A load refuses different steps for parameters that share a single one in FSDP1."""
    for steps, rows in ranks.run(load_differing_steps, str(tmp_path), world=2):
        assert steps.startswith("StateError: ")
        assert '["step"] differs between parameters that FSDP1' in steps
        assert rows.startswith("MismatchError: ")
        assert "FSDP1" in rows
