"""Groups of hosts over failure domains, which bytes guard which, and the arithmetic of parity."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.planner.parity import (
    BLOCK_ALIGN,
    DataBlock,
    HostDomain,
    Lane,
    ParityBlock,
    groups,
    protection,
)
from holdfast.storage.keeper.parity import galois
from holdfast.storage.keeper.parity.galois import make_q, make_xor, recover

ODD_NBYTES = 2 * galois.XOR_PIECE_NBYTES + 12_345
"""Several pieces of every kind, and a part of one that is no multiple of anything."""


def hosts(*domains: str) -> list[HostDomain]:
    """Hosts h00, h01, …, each in the domain that is given."""
    return [HostDomain(f"h{number:02}", domain) for number, domain in enumerate(domains)]


def apart(count: int) -> list[HostDomain]:
    """Hosts that are domains of their own."""
    return hosts(*(f"d{number:02}" for number in range(count)))


def test_domains_are_shared_as_far_as_parity_allows() -> None:
    """Two hosts of a rack in one group are one too many for one block of parity, not for two."""
    racks = hosts(*"aabb")
    assert groups(racks[::-1], 4, 2) == [("h00", "h01", "h02", "h03")]
    says = "4 hosts in 2 failure domains .* 2 hosts .* lie in a, and 1"
    with pytest.raises(ValueError, match=says):
        groups(racks, 4, 1)


def test_groups_that_cannot_be_are_refused_by_name() -> None:
    """The error says what is missing, and how much of it."""
    with pytest.raises(ValueError, match="2 hosts cannot guard against the loss of 2: 3 or more"):
        groups(apart(2), 4, 2)
    with pytest.raises(ValueError, match="a group of 2 hosts cannot lose 2 of them; it needs 3"):
        groups(apart(8), 2, 2)
    with pytest.raises(ValueError, match="a host is listed twice"):
        groups([*apart(3), HostDomain("h00", "x")], 4, 1)


def test_a_choice_never_fails() -> None:
    """``auto`` falls back from XOR to copies to nothing, and says why; other modes raise."""
    modes = [protection(apart(count)).mode for count in (1, 2, 3, 9)]
    assert modes == ["off", "copy", "xor", "xor"]
    pairs = protection(hosts(*"aaaabbbb"))
    assert pairs.mode == "copy"
    assert pairs.groups == tuple((f"h0{i}", f"h0{i + 4}") for i in range(4))
    alone = protection(hosts(*"aaaa"))
    assert (alone.mode, alone.groups) == ("off", ())
    assert "4 hosts in 1 failure domains" in alone.reason
    with pytest.raises(ValueError, match="4 hosts in 1 failure domains"):
        protection(hosts(*"aaaa"), "copy")
    with pytest.raises(ValueError, match="'raid' is not one of auto, off, copy, xor, pq"):
        protection(apart(4), "raid")  # type: ignore[arg-type]


def test_stripes_of_four_members() -> None:
    """P and Q rotate over the members, as in RAID-6; blocks end where images end."""
    lane = Lane((20_000, 20_000, 9_000, 0), parity=2, width=2)
    assert lane.block_nbytes == 3 * BLOCK_ALIGN == 12_288
    assert lane.data(0) == (DataBlock(2, 0, 0, 9_000), DataBlock(3, 1, 0, 0))
    assert lane.data(3) == (DataBlock(1, 0, 0, 12_288), DataBlock(2, 1, 9_000, 9_000))
    assert lane.parities(3) == (ParityBlock(3, 3, 0, 12_288), ParityBlock(0, 3, 1, 12_288))
    assert lane.data(2)[1] == DataBlock(1, 1, 12_288, 20_000)
    assert lane.held_by(0) == (ParityBlock(0, 0, 0, 9_000), ParityBlock(0, 3, 1, 12_288))


def test_what_is_pulled_for_a_lost_image_is_the_least() -> None:
    """A repair pulls the fewest blocks, and no byte beyond the end of the wanted one."""
    lane = Lane((3 * 4096,) * 3 + (2 * 4096 + 10,), parity=1, width=3)
    repairs = lane.repairs([3], 3)
    assert [repair.wanted.nbytes for repair in repairs] == [4096, 4096, 10]
    pulled = [sum(block.nbytes for block in repair.pulled) for repair in repairs]
    assert pulled == [3 * 4096, 3 * 4096, 30]
    assert {block.member for repair in lane.repairs([3], 3) for block in repair.pulled} == {0, 1, 2}
    assert {repair.unknown for repair in repairs} == {(0,), (1,), (2,)}
    (repair,) = Lane((5000, 0), 1, 1).repairs([0], 0)
    assert list(repair.pulled) == [ParityBlock(1, 1, 0, 5000)]


def test_more_losses_than_parity_are_refused() -> None:
    """The error names them. A lost member without an image costs nothing."""
    lane = Lane((5000,) * 4, parity=1, width=3)
    with pytest.raises(ValueError, match="has lost 2 blocks, and 1 of its 1 blocks of parity"):
        lane.repairs([0, 1], 0)
    assert Lane((5000, 0, 0, 0), 1, 1).repairs([0, 1], 0)


# Arithmetic, compared with a plain reference byte by byte.


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


@pytest.mark.parametrize("nbytes", [1, 255, ODD_NBYTES])
def test_any_two_lost_blocks_come_back(nbytes: int) -> None:
    """This holds for any two of five blocks and two of parity, and so does the loss of one."""
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
