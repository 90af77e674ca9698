"""Arithmetic of parity, compared with a plain reference byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.storage.keeper.parity import galois
from holdfast.storage.keeper.parity.galois import make_q, make_xor, recover

ODD_NBYTES = 2 * galois.XOR_PIECE_NBYTES + 12_345
"""Several pieces of every kind, and a part of one that is no multiple of anything."""


def noise(count: int, nbytes: int) -> list[galois.Bytes]:
    """Blocks of random bytes, the same ones each time."""
    random = np.random.default_rng(nbytes)
    return [random.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(count)]


def doubled(value: int) -> int:
    """Twice ``value``, in the field."""
    return (value << 1) ^ (0x11D if value & 0x80 else 0)


def reference(blocks: Sequence[galois.Bytes], at: int) -> tuple[int, int]:
    """P and Q of the bytes at one place, by the definition."""
    p = q = 0
    for position, block in enumerate(blocks):
        value = int(block[at]) if at < len(block) else 0
        p ^= value
        for _ in range(position):
            value = doubled(value)
        q ^= value
    return p, q


def parity_of(blocks: Sequence[galois.Bytes], nbytes: int) -> tuple[galois.Bytes, galois.Bytes]:
    """Return P and Q."""
    p, q = np.full(nbytes, 0xAA, np.uint8), np.full(nbytes, 0xAA, np.uint8)
    make_xor(p, blocks)
    make_q(q, blocks)
    return p, q


@pytest.mark.parametrize("count", [1, 2, 3, 6, 20])
def test_parity_is_what_its_definition_says(count: int) -> None:
    """Byte by byte, also of blocks that are shorter, which count as followed by zeros."""
    lengths = [300, 300, 299, 17, 0, 256]
    blocks = [block[: lengths[i % 6]] for i, block in enumerate(noise(count, 300))]
    p, q = parity_of(blocks, 300)
    expected = [reference(blocks, at) for at in range(300)]
    assert list(zip(p.tolist(), q.tolist(), strict=True)) == expected


def test_blocks_of_many_pieces() -> None:
    """Piece after piece gives the same bytes at both sides of every border, and at the end."""
    blocks = noise(4, ODD_NBYTES)
    blocks[1] = blocks[1][: ODD_NBYTES - 70_001]
    p, q = parity_of(blocks, ODD_NBYTES)
    borders = [*range(0, ODD_NBYTES, galois.PRODUCT_PIECE_NBYTES), len(blocks[1]), ODD_NBYTES]
    places = [at for border in borders for at in (border - 1, border) if 0 <= at < ODD_NBYTES]
    assert [(p[at], q[at]) for at in places] == [reference(blocks, at) for at in places]


@pytest.mark.parametrize("nbytes", [1, 2, 255, 4096, ODD_NBYTES])
def test_any_two_lost_blocks_come_back(nbytes: int) -> None:
    """Of five blocks and two of parity, whichever two are lost; and the other one as well."""
    blocks = noise(5, nbytes)
    blocks[2] = blocks[2][: nbytes // 2]
    p, q = parity_of(blocks, nbytes)
    stored = {**dict(enumerate(blocks)), 5: p, 6: q}
    for lost in itertools.combinations(range(7), 2):
        data = {i: block for i, block in stored.items() if i < 5 and i not in lost}
        parity = {i - 5: block for i, block in stored.items() if i >= 5 and i not in lost}
        unknown = [i for i in lost if i < 5]
        for wanted in unknown:
            out = np.empty(len(blocks[wanted]), np.uint8)
            recover(out, wanted, data, parity, unknown)
            assert np.array_equal(out, blocks[wanted]), (lost, wanted)


def test_what_cannot_be_computed_is_refused() -> None:
    """Too few blocks of parity, blocks that do not fit, and more blocks than there are weights."""
    a, b, c = noise(3, 64)
    with pytest.raises(ValueError, match="recovered from 1 parity blocks, with 2 unknown"):
        recover(a, 0, {}, {0: b}, [0, 1])
    with pytest.raises(ValueError, match="block 2 cannot be recovered"):
        recover(a, 2, {}, {0: b, 1: c}, [0, 1])
    with pytest.raises(ValueError, match="parity 1 is shorter than the 64 bytes"):
        recover(a, 0, {}, {0: b, 1: c[:63]}, [0, 1])
    for make in (make_xor, make_q):
        with pytest.raises(ValueError, match="a block of 64 bytes is longer than parity of 63"):
            make(a[:63], [b, c])
    with pytest.raises(ValueError, match="256 blocks are more than 255"):
        make_q(a, [c] * 256)
