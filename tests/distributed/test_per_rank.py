"""Values of one rank each, in jobs whose number of ranks changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.loading import dealt_lists, part_of_an_epoch, save_lists
from support.rank_processes import RankProcesses
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.storage.integrations.dcp import HoldfastReader

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
        found: dict[str, Any] = {}
        _load_state_dict(found, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
        assert found["split"]["of"] == everyone
        assert found["lists"] == [["0.0"]]
