"""Parity restores every image bit for bit after any tolerable loss of hosts.

It reads only the blocks that the plan names.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.parity import (
    DataBlock,
    HostDomain,
    Lane,
    groups,
    lanes,
    protection,
)
from holdfast.storage.keeper.parity.galois import Bytes, make_q, make_xor, recover

IMAGE_NBYTES = st.one_of(st.integers(0, 10), st.integers(0, 60_000))


@st.composite
def schemes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Members of a group, blocks of parity, and the width of its stripes; also narrower ones."""
    members = draw(st.integers(2, 7))
    parity = draw(st.integers(1, min(2, members - 1)))
    widest = members - parity
    return members, parity, draw(st.sampled_from([widest, widest, draw(st.integers(1, widest))]))


def part(image: Bytes, block: DataBlock) -> Bytes:
    """Return the bytes of a block."""
    return image[block.start : block.stop]


def guarded(lane: Lane, images: list[Bytes]) -> dict[tuple[int, int], Bytes]:
    """Compute all parity of a lane as planned; return it by stripe and row."""
    found = {}
    for stripe in range(lane.members):
        blocks = [part(images[block.member], block) for block in lane.data(stripe)]
        outputs = [np.empty(parity.nbytes, np.uint8) for parity in lane.parities(stripe)]
        make_xor(outputs[0], blocks)
        if len(outputs) == 2:
            make_q(outputs[1], blocks)
        found.update({(stripe, row): output for row, output in enumerate(outputs)})
    return found


def rebuilt(
    lane: Lane, lost: set[int], want: int, images: list[Bytes], parity: dict[tuple[int, int], Bytes]
) -> Bytes:
    """Rebuild the image of ``want`` from pulled bytes; lost members provide nothing."""
    out = np.full(lane.image_nbytes[want], 0xAA, np.uint8)
    for repair in lane.repairs(lost, want):
        assert not lost & {block.member for block in repair.pulled}
        recover(
            part(out, repair.wanted),
            repair.wanted.position,
            {block.position: part(images[block.member], block) for block in repair.data},
            {block.row: parity[block.stripe, block.row][: block.nbytes] for block in repair.parity},
            repair.unknown,
        )
    return out


@examples(150)
@given(schemes(), st.data())
def test_any_loss_that_may_be_is_rebuilt(scheme: tuple[int, int, int], data: st.DataObject) -> None:
    """Any tolerable loss is rebuilt, for any image sizes and any number of ranks per host."""
    members, parity, width = scheme
    sizes = data.draw(
        st.lists(st.lists(IMAGE_NBYTES, max_size=3), min_size=members, max_size=members)
    )
    lost = data.draw(st.sets(st.integers(0, members - 1), min_size=1, max_size=parity))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for lane in lanes(sizes, parity, width):
        images = [random.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in lane.image_nbytes]
        stored = guarded(lane, images)
        for want in lost:
            assert np.array_equal(rebuilt(lane, lost, want, images, stored), images[want])


@examples(150)
@given(schemes(), st.data())
def test_every_byte_is_guarded_by_others(scheme: tuple[int, int, int], data: st.DataObject) -> None:
    """The blocks cover each image, and only other members hold its parity, in equal shares."""
    members, parity, width = scheme
    sizes = data.draw(st.lists(IMAGE_NBYTES, min_size=members, max_size=members))
    lane = Lane(tuple(sizes), parity, width)
    for member, nbytes in enumerate(sizes):
        blocks = [lane.block(member, position) for position in range(width)]
        assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
        assert blocks[-1].stop == nbytes
        for block in blocks:
            stripe = lane.stripe_of(block)
            assert block in lane.data(stripe)
            assert member not in {guard.member for guard in lane.parities(stripe)}
        held = sum(guard.nbytes for guard in lane.held_by(member))
        assert held <= parity * lane.block_nbytes


@examples(150)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(2, 8), st.integers(1, 2))
def test_groups_survive_the_loss_of_any_domain(domains: list[int], size: int, parity: int) -> None:
    """Groups survive the loss of a domain, unless hosts or domains are too few."""
    hosts = [HostDomain(f"h{number}", f"d{domain}") for number, domain in enumerate(domains)]
    domain_of = {one.host: one.domain for one in hosts}
    try:
        found = groups(hosts, size, parity)
    except ValueError:
        assert size <= parity or len(hosts) <= parity or len(set(domains)) < len(domains)
        return
    assert sorted(host for group in found for host in group.hosts) == sorted(domain_of)
    assert len(found) == max(1, len(hosts) // size)
    for group in found:
        assert len(group.hosts) > parity
        shared = [domain_of[host] for host in group.hosts]
        assert max(map(shared.count, shared)) <= parity


@examples(100)
@given(st.lists(st.integers(0, 4), max_size=20), st.integers(1, 6))
def test_protection_is_found_or_its_lack_explained(domains: list[int], size: int) -> None:
    """Mode "auto" forms groups on any hosts, or explains why it cannot."""
    hosts = [HostDomain(f"h{number}", f"d{domain}") for number, domain in enumerate(domains)]
    found = protection(hosts, "auto", size)
    assert bool(found.groups) == (found.mode in ("copy", "xor"))
    assert bool(found.reason) == (found.mode == "off")
