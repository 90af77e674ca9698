"""Layouts that Holdfast does not know are refused by name, before any I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.foreign_jobs import fsdp1_leaves, hooked_tensors, sharded_tensors, uneven_tensors
from support.rank_processes import RankProcesses


@pytest.mark.nightly(16)
def test_what_fsdp1_leaves_in_plain_dicts_is_refused_by_name(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Flat parameters, and views of them."""
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
    """Uneven parts, padding, and elements where none are expected."""
    first, second = ranks.run(uneven_tensors, str(tmp_path), world=2)
    for rank, found in enumerate((first, second)):
        for name, alone in (("longer first", None), ("padded", 1), ("none expected", 1)):
            for what in (f"save {name}", f"load {name}"):
                mine = alone is None or rank == alone
                kind = "StateError: " if mine else "RankFailedError: "
                assert found[what].startswith(kind), what
                assert 'state["w"] holds a local tensor of shape' in found[what], what
            assert found[f"committed {name}"] == "False"
