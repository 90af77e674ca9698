"""Layouts that Holdfast does not know are refused by name, before any I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.foreign_jobs import (
    fsdp1_leaves,
    hollow_saves,
    hooked_tensors,
    sharded_tensors,
    uneven_tensors,
    warned_of,
)
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
    """Several parts a rank, on two ranks and on three, of which one has fewer."""
    for world in (2, 3):
        assert all(ranks.run(sharded_tensors, str(tmp_path / str(world)), world=world))


def test_a_dtensor_whose_hooks_tell_another_layout_is_refused(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Of equal sizes and other offsets, as Megatron-FSDP has them."""
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


def test_a_state_that_holds_less_than_it_seems_is_refused_by_all_ranks_together(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Tensors without any element, and placeholders in the place of weights."""
    first, second = ranks.run(hollow_saves, str(tmp_path), world=2)
    refused = {
        "nothing": "the state",
        "nothing but values": "the state",
        "none on one rank": "the state",
    }
    refused["state dict"] = 'state["model"]'
    for name, path in refused.items():
        assert first[name][0].startswith(f"StateError: {path} "), name
        assert "allow_empty=True" in first[name][0], name
        assert path in second[name][0], name
        assert not first[name][1], name
    for found in (first, second):
        assert {name: seen for name, seen in found.items() if name not in refused} == {
            name: ("", True) for name in first if name not in refused
        }


def test_plain_tensors_that_differ_between_ranks_are_named_once(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """In a warning of the first rank that holds them."""
    first, second, third = ranks.run(warned_of, str(tmp_path), "warned", world=3)
    assert [len(told) for told in first] == [1, 0, 1, 0]
    (message,) = first[0]
    named = [
        '["model"]["weight"] (float32 [3] on rank 0, held by 3)',
        '["optim"]["state"]["weight"]["momentum_buffer"] (float32 [3] on rank 0, held by 3)',
        '["dict"]["weight"] (float32 [3] on rank 0, held by 3)',
        '["shape"] (float32 [2] on rank 0, held by 3)',
        '["dtype"] (float32 [2] on rank 0, held by 3)',
    ]
    assert all('state["warned"]' + name in message for name in named)
    assert message.count("on rank 0") == len(named)
    assert all(way in message for way in ("DTensor", "PerRank", "broadcast"))
    assert 'state["warned"]["late"]' in first[2][0]
    assert first[2][0].count("on rank 0") == 1
    assert [len(told) for told in second] == [1, 0, 0, 0]
    assert 'state["warned"]["second"] (float32 [2] on rank 1, held by 2)' in second[0][0]
    assert third == [[], [], [], []]
