"""Runs of checkpoints that borrow from each other, with changes and deletions at random."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference
from support.effort import examples
from support.lending import FOLDER, save_borrowing, save_whole
from support.tiny import BLOCK_NBYTES

import holdfast
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest

SIZES = st.integers(1, 12 * BLOCK_NBYTES)
Change = tuple[int, int, int]
"""Rank, first element and number of elements of ``w`` that change."""


def changes(world: int) -> st.SearchStrategy[list[Change]]:
    """Draw the changes from one step to the next: nothing, single elements, long runs."""
    lengths = st.sampled_from([1, 2, BLOCK_NBYTES // 4, 3 * BLOCK_NBYTES])
    starts = st.integers(0, 12 * BLOCK_NBYTES)
    return st.lists(st.tuples(st.integers(0, world - 1), starts, lengths), max_size=4)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[dict[str, Any]]]:
    """Draw the sizes of the ranks' tensors, and the events of each step."""
    world = draw(st.integers(1, 3))
    step = st.fixed_dictionaries(
        {
            "changes": changes(world),
            "whole": st.integers(0, 5).map(lambda number: number == 0),
            "grows": st.integers(0, 7).map(lambda number: number == 0),
            "base": st.integers(0, 2),
            "deleted": st.sets(st.integers(0, 5), max_size=2),
        }
    )
    sizes = draw(st.lists(SIZES, min_size=world, max_size=world))
    return sizes, draw(st.lists(step, min_size=2, max_size=6))


@pytest.mark.nightly(10)
@examples(40)
@given(runs(), st.data())
def test_every_checkpoint_reads_whatever_becomes_of_the_others(
    run: tuple[list[int], list[dict[str, Any]]], data: st.DataObject
) -> None:
    """Steps borrow from any earlier step, which may be deleted by hand; all others are whole."""
    sizes, steps = run
    random = np.random.default_rng(len(steps))
    now = [{"w": torch.from_numpy(random.integers(0, 256, n, np.uint8)), "rank": torch.full((3,), rank)} for rank, n in enumerate(sizes)]  # fmt: skip
    kept: dict[Path, list[dict[str, torch.Tensor]]] = {}
    with tempfile.TemporaryDirectory(dir=FOLDER) as root:
        for number, step in enumerate(steps):
            for rank, first, count in step["changes"]:
                now[rank]["w"][first : first + count] += 1
            if step["grows"]:
                now[0][f"more{number}"] = torch.full((BLOCK_NBYTES,), number)
            folder = Path(root, str(number))
            if step["whole"] or not kept:
                save_whole(folder, now, number, small=True)
            else:
                base = list(kept)[-1 - step["base"] % len(kept)]
                save_borrowing(folder, now, base, number, small=True)
            kept[folder] = [{name: t.clone() for name, t in state.items()} for state in now]
            for gone in step["deleted"]:
                path = Path(root, str(gone))
                if len(kept) > 1 and kept.pop(path, None):
                    shutil.rmtree(path)
        for folder, states in kept.items():
            with holdfast.open(folder) as c:
                assert c.verify().ok
                for rank, state in enumerate(states):
                    assert difference(state["w"], c.read("w", rank=rank)) is None
                    a, b = sorted(data.draw(st.integers(0, len(state["w"]))) for _ in "ab")
                    assert c.read_bytes("w", a, b, rank=rank) == bytes(state["w"][a:b].tolist())
            assert difference(states[0], holdfast.load(folder)) is None
            holdfast.copy(folder, folder.with_suffix(".copy"))
            copy = Manifest.decode((folder.with_suffix(".copy") / MANIFEST_KEY).read_bytes())
            assert copy.version == 1
