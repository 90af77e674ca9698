"""Patches of chunks, for any bytes: applying one gives the new bytes, or an error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.storage.format.patches import apply_patch, encode_patch, units

BLOCK_NBYTES = 4096


class Change(NamedTuple):
    """Random bytes, and the share of them that changes in each block of a chunk."""

    seed: int
    shares: list[float]

    def chunks(self) -> tuple[memoryview, memoryview]:
        """Return the chunk before and after the change."""
        rng = np.random.default_rng(self.seed)
        before = rng.integers(0, 256, len(self.shares) * BLOCK_NBYTES, dtype=np.uint8)
        after = before.copy()
        for block, share in enumerate(self.shares):
            place = after[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES]
            chosen = rng.random(BLOCK_NBYTES) < share
            place[chosen] = rng.integers(0, 256, int(chosen.sum()), dtype=np.uint8)
        return memoryview(before.tobytes()), memoryview(after.tobytes())


SHARES = st.sampled_from([0.0, 0.0005, 0.02, 0.3, 1.0])
CHANGES = st.builds(Change, st.integers(0, 2**32), st.lists(SHARES, min_size=1, max_size=6))


@given(CHANGES, st.booleans())
def test_a_patch_gives_the_new_bytes(change: Change, differences: bool) -> None:
    """Both kinds of patches turn the old bytes into the new ones; new values do so from any."""
    before, after = change.chunks()
    changed = units(after) != units(before)
    patch = encode_patch(after, changed, before if differences else None, BLOCK_NBYTES)
    into = bytearray(before)
    apply_patch(memoryview(patch), memoryview(into), BLOCK_NBYTES, differences=differences)
    assert into == after.obj
    if not differences:
        apply_patch(memoryview(patch), memoryview(into), BLOCK_NBYTES, differences=False)
        assert into == after.obj
    assert bool(patch) == (before != after)


@given(CHANGES, st.data())
def test_a_damaged_patch_harms_nothing_else(change: Change, data: st.DataObject) -> None:
    """A patch with flipped or missing bytes gives other bytes or a ValueError, nothing else."""
    before, after = change.chunks()
    patch = bytearray(encode_patch(after, units(after) != units(before), before, BLOCK_NBYTES))
    if not patch:
        return
    if data.draw(st.booleans()):
        patch[data.draw(st.integers(0, len(patch) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del patch[data.draw(st.integers(0, len(patch) - 1)) :]
    into = bytearray(before)
    try:
        apply_patch(memoryview(patch), memoryview(into), BLOCK_NBYTES, differences=True)
    except ValueError:
        return
    assert len(into) == len(after)


def test_a_patch_outside_its_chunk_is_refused() -> None:
    """A patch for a longer chunk is a ValueError, and so is one that stops early."""
    before = bytes(2 * BLOCK_NBYTES)
    after = bytearray(before)
    after[-2] = 1
    whole = encode_patch(
        memoryview(after), units(memoryview(after)) != units(memoryview(before)), None, BLOCK_NBYTES
    )
    with pytest.raises(ValueError, match="outside"):
        apply_patch(
            memoryview(whole), memoryview(bytearray(BLOCK_NBYTES)), BLOCK_NBYTES, differences=False
        )
