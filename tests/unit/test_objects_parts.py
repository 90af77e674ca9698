"""Cutting an object into the parts of a multipart upload: pure."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.drivers.objects.uploads import PARTS_MAX, Cutter, part_nbytes_for

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "preferred", "expected"),
    [
        (0, 16 * MIB, 16 * MIB),
        (PARTS_MAX * 16 * MIB, 16 * MIB, 16 * MIB),
        (PARTS_MAX * 16 * MIB + 1, 16 * MIB, 32 * MIB),
        (5 << 40, 16 * MIB, 528 * MIB),
        (5 << 40, 5 * MIB, 525 * MIB),
    ],
)
def test_no_object_has_more_parts_than_a_store_takes(
    nbytes: int, preferred: int, expected: int
) -> None:
    """Parts grow by whole multiples of the preferred size, and no sooner than they must."""
    assert part_nbytes_for(nbytes, preferred) == expected
    assert -(-nbytes // expected) <= PARTS_MAX


@given(st.integers(0, 10 << 40), st.integers(5 << 20, 5 << 30))
def test_parts_are_few_enough_and_no_larger_than_needed(nbytes: int, preferred: int) -> None:
    """For any size: at most 10,000 parts, and more than that if they were one step smaller."""
    part = part_nbytes_for(nbytes, preferred)
    assert part % preferred == 0
    assert -(-nbytes // part) <= PARTS_MAX
    assert part == preferred or -(-nbytes // (part - preferred)) > PARTS_MAX


@given(
    st.integers(1, 500), st.integers(0, 100), st.integers(1, 60), st.randoms(use_true_random=False)
)
def test_whatever_is_written_comes_out_once_and_in_order(
    nbytes: int, spare_nbytes: int, part_nbytes: int, rnd: random.Random
) -> None:
    """Pieces of any length make parts of the size asked for, the last one shorter. Nothing is kept
    back but the last part of an object that ends before the size it was declared with."""
    content = rnd.randbytes(nbytes)
    cutter, parts, at = Cutter(nbytes + spare_nbytes, part_nbytes), [], 0
    while at < nbytes:
        step = rnd.randint(1, nbytes - at)
        parts += [bytes(part) for part in cutter.cut(memoryview(content)[at : at + step])]
        at += step
    rest = cutter.rest()
    assert (rest is None) == (spare_nbytes == 0 or nbytes % part_nbytes == 0)
    parts += [] if rest is None else [bytes(rest)]
    assert cutter.rest() is None
    assert b"".join(parts) == content
    assert {len(part) for part in parts[:-1]} <= {part_nbytes}
    assert len(parts) == -(-nbytes // part_nbytes)


def test_a_part_that_one_write_fills_is_the_callers_memory() -> None:
    """Whole parts are views; what several writes make together, and a short end, is copied."""
    memory = np.arange(25, dtype=np.uint8)
    cutter = Cutter(25, 10)
    first, second = cutter.cut(memoryview(memory)[:20])
    (last,) = cutter.cut(memoryview(memory)[20:])
    shared = [np.shares_memory(part, memory) for part in (first, second, last)]
    assert shared == [True, True, False]
    cutter = Cutter(20, 10)
    assert list(cutter.cut(memoryview(memory)[:5])) == []
    (gathered,) = cutter.cut(memoryview(memory)[5:10])
    assert (bytes(gathered), np.shares_memory(gathered, memory)) == (bytes(range(10)), False)
