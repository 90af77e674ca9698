"""Groups of hosts over failure domains, and which bytes guard which."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.planner.parity import (
    BLOCK_ALIGN,
    DataBlock,
    Group,
    HostDomain,
    Lane,
    Mode,
    ParityBlock,
    groups,
    lanes,
    protection,
)


def hosts(*domains: str) -> list[HostDomain]:
    """Hosts h00, h01, …, each in the domain that is given."""
    return [HostDomain(f"h{number:02}", domain) for number, domain in enumerate(domains)]


def apart(count: int) -> list[HostDomain]:
    """Hosts that are domains of their own."""
    return hosts(*(f"d{number:02}" for number in range(count)))


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (2, [2]),
        (3, [3]),
        (4, [4]),
        (5, [5]),
        (7, [7]),
        (8, [4, 4]),
        (9, [5, 4]),
        (23, [5, 5, 5, 4, 4]),
    ],
)
def test_sizes_of_groups(count: int, sizes: list[int]) -> None:
    """As many groups of four or more as there can be, as even as they can be; each host in one."""
    found = groups(apart(count), 4, 1)
    assert [len(group.hosts) for group in found] == sizes
    assert sorted(host for group in found for host in group.hosts) == [h.host for h in apart(count)]


def test_members_lie_in_different_domains() -> None:
    """Four racks of three hosts make three groups, each with one host of each rack."""
    racks = hosts(*"aaabbbcccddd")
    domain_of = {one.host: one.domain for one in racks}
    found = groups(racks, 4, 1)
    assert [sorted(domain_of[host] for host in group.hosts) for group in found] == [
        list("abcd")
    ] * 3


def test_domains_are_shared_as_far_as_parity_allows() -> None:
    """Two hosts of a rack in one group are one too many for one block of parity, not for two."""
    racks = hosts(*"aabb")
    assert groups(racks, 4, 2) == [Group(("h00", "h01", "h02", "h03"))]
    with pytest.raises(
        ValueError, match=r"4 hosts in 2 failure domains .* 2 hosts .* lie in a, and 1"
    ):
        groups(racks, 4, 1)


def test_the_order_of_hosts_does_not_matter() -> None:
    """All ranks come to the same groups, however they have heard of the hosts."""
    racks = hosts(*"abcdabcde")
    assert groups(racks[::-1], 4, 1) == groups(racks, 4, 1)


def test_groups_that_cannot_be_are_refused_by_name() -> None:
    """What is missing, and how much of it."""
    with pytest.raises(ValueError, match="2 hosts cannot guard against the loss of 2: 3 or more"):
        groups(apart(2), 4, 2)
    with pytest.raises(ValueError, match="a group of 2 hosts cannot lose 2 of them; it needs 3"):
        groups(apart(8), 2, 2)
    with pytest.raises(ValueError, match="a host is listed twice"):
        groups([*apart(3), HostDomain("h00", "x")], 4, 1)


@pytest.mark.parametrize(
    ("count", "mode", "parity"), [(1, "off", 0), (2, "copy", 1), (3, "xor", 1), (9, "xor", 1)]
)
def test_what_is_chosen_for_a_number_of_hosts(count: int, mode: Mode, parity: int) -> None:
    """Nothing on one host, a copy on two, XOR from three."""
    found = protection(apart(count))
    assert (found.mode, found.parity) == (mode, parity)
    assert sum(len(group.hosts) for group in found.groups) == (count if count > 1 else 0)


def test_a_choice_never_fails() -> None:
    """Two racks of four cannot have XOR over four hosts, but a copy in the other rack; hosts of one
    rack have nothing, and it is said why."""
    pairs = protection(hosts(*"aaaabbbb"))
    assert pairs.mode == "copy"
    assert pairs.groups == tuple(Group((f"h0{i}", f"h0{i + 4}")) for i in range(4))
    alone = protection(hosts(*"aaaa"))
    assert (alone.mode, alone.groups) == ("off", ())
    assert "4 hosts in 1 failure domains" in alone.reason
    with pytest.raises(ValueError, match="4 hosts in 1 failure domains"):
        protection(hosts(*"aaaa"), "copy")
    with pytest.raises(ValueError, match="'raid' is not one of auto, off, copy, xor, pq"):
        protection(apart(4), "raid")  # type: ignore[arg-type]


def test_how_many_give_to_a_stripe() -> None:
    """All but those that hold its parity; one, where each image is copied."""
    (group,) = groups(apart(5), 4, 1)
    widths = {mode: protection(apart(5), mode).width(group) for mode in ("copy", "xor", "pq")}
    assert widths == {"copy": 1, "xor": 4, "pq": 3}
    with pytest.raises(ValueError, match="nothing is protected"):
        protection(apart(5), "off").width(group)


def test_stripes_of_four_members() -> None:
    """RAID-6, rotated: P of stripe s lies with member s, Q with the next one, and the others give a
    block each. Blocks end where their images end."""
    lane = Lane((20_000, 20_000, 9_000, 0), parity=2, width=2)
    assert lane.block_nbytes == 3 * BLOCK_ALIGN == 12_288
    assert lane.data(0) == (DataBlock(2, 0, 0, 9_000), DataBlock(3, 1, 0, 0))
    assert lane.data(3) == (DataBlock(1, 0, 0, 12_288), DataBlock(2, 1, 9_000, 9_000))
    assert lane.parities(3) == (ParityBlock(3, 3, 0, 12_288), ParityBlock(0, 3, 1, 12_288))
    assert lane.data(2)[1] == DataBlock(1, 1, 12_288, 20_000)
    assert lane.held_by(0) == (ParityBlock(0, 0, 0, 9_000), ParityBlock(0, 3, 1, 12_288))


@pytest.mark.parametrize(("members", "parity"), [(2, 1), (3, 1), (4, 1), (5, 2), (7, 2)])
def test_every_block_is_in_one_stripe_and_parity_is_spread(members: int, parity: int) -> None:
    """No member has two blocks of one stripe, of whichever kind; all hold as much parity."""
    lane = Lane((100_000,) * members, parity, members - parity)
    seen = Counter[tuple[int, int]]()
    held = Counter[int]()
    for stripe in range(members):
        data = lane.data(stripe)
        guards = lane.parities(stripe)
        assert len({b.member for b in (*data, *guards)}) == members
        assert [lane.stripe_of(block) for block in data] == [stripe] * lane.width
        assert [guard for guard in guards if guard not in lane.held_by(guard.member)] == []
        seen.update((block.member, block.position) for block in data)
        held.update(guard.member for guard in guards)
    assert seen == Counter((m, p) for m in range(members) for p in range(lane.width))
    assert held == dict.fromkeys(range(members), parity)


def test_what_is_pulled_for_a_lost_image_is_the_least() -> None:
    """By XOR over four: for each of three blocks two others and one of parity, and no byte beyond
    the end of the last one."""
    lane = Lane((3 * 4096,) * 3 + (2 * 4096 + 10,), parity=1, width=3)
    repairs = lane.repairs([3], 3)
    assert [repair.wanted.nbytes for repair in repairs] == [4096, 4096, 10]
    assert [repair.pulled_nbytes for repair in repairs] == [3 * 4096, 3 * 4096, 30]
    assert {block.member for block in lane.to_pull([3], 3)} == {0, 1, 2}
    assert {repair.unknown for repair in repairs} == {(0,), (1,), (2,)}
    assert Lane((5000, 0), 1, 1).to_pull([0], 0) == [ParityBlock(1, 1, 0, 5000)]


def test_more_losses_than_parity_are_refused() -> None:
    """By name; but a lost member without an image costs nothing."""
    lane = Lane((5000,) * 4, parity=1, width=3)
    with pytest.raises(ValueError, match="has lost 2 blocks, and 1 of its 1 blocks of parity"):
        lane.repairs([0, 1], 0)
    assert not lane.recoverable([0, 1])
    assert lane.recoverable([2])
    assert Lane((5000, 0, 0, 0), 1, 1).recoverable([0, 1])


def test_lanes_of_hosts_with_several_ranks() -> None:
    """The first ranks of all hosts together, then the second ones; who has none has an empty
    image."""
    assert lanes([[10, 20], [30], [40, 50]], 1, 2) == (
        Lane((10, 30, 40), 1, 2),
        Lane((20, 0, 50), 1, 2),
    )
    assert lanes([[], []], 1, 1) == ()


def test_stripes_that_cannot_be_are_refused() -> None:
    """More blocks than members, and parity of which there is no arithmetic."""
    with pytest.raises(
        ValueError, match=r"stripes of 3 \+ 1 blocks need as many members, and there are 3"
    ):
        Lane((1, 1, 1), 1, 3)
    with pytest.raises(ValueError, match="one or two blocks of parity, not 3"):
        Lane((1,) * 9, 3, 6)
