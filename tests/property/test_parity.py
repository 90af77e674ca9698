"""Plans of parity: every byte is guarded by other hosts, and groups survive lost domains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.parity import HostDomain, Lane, groups, protection

IMAGE_NBYTES = st.one_of(st.integers(0, 10), st.integers(0, 60_000))


@st.composite
def schemes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Members of a group, blocks of parity, and the width of its stripes; also narrower ones."""
    members = draw(st.integers(2, 7))
    parity = draw(st.integers(1, min(2, members - 1)))
    widest = members - parity
    return members, parity, draw(st.sampled_from([widest, widest, draw(st.integers(1, widest))]))


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
    assert sorted(host for group in found for host in group) == sorted(domain_of)
    assert len(found) == max(1, len(hosts) // size)
    for group in found:
        assert len(group) > parity
        shared = [domain_of[host] for host in group]
        assert max(map(shared.count, shared)) <= parity


@examples(100)
@given(st.lists(st.integers(0, 4), max_size=20), st.integers(1, 6))
def test_protection_is_found_or_its_lack_explained(domains: list[int], size: int) -> None:
    """Mode "auto" forms groups on any hosts, or explains why it cannot."""
    hosts = [HostDomain(f"h{number}", f"d{domain}") for number, domain in enumerate(domains)]
    found = protection(hosts, "auto", size)
    assert bool(found.groups) == (found.mode in ("copy", "xor"))
    assert bool(found.reason) == (found.mode == "off")
