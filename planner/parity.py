"""Parity over the images of several hosts: groups, stripes, and the blocks needed to rebuild.

Hosts form groups whose members lie in different failure domains. Within a group, the images of all
members are cut into blocks of one length, and each stripe takes one block each from ``width``
members. Its parity is held by members that contribute no block, and rotates from stripe to stripe,
as in RAID-5 and RAID-6 (Chen et al., ACM Computing Surveys 26(2), 1994). REFT (Wang et al., 2023)
protects snapshots in host memory in this way. All members hold equally much parity, and any
``parity`` members of a group can be lost.

Hosts with several ranks have several images each: the first images of all members form one lane,
the second ones another, and so on. Lanes are independent.

Scope: byte ranges and names. ``storage/keeper/parity/galois.py`` computes the bytes, and the
keepers decide when.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..core.units import ceil_div, round_up

Mode = Literal["auto", "off", "copy", "xor", "pq"]
"""``copy``: a copy of each image on another host; ``xor``: any host of a group may be lost; ``pq``:
any two; ``auto``: nothing on one host, a copy on two, XOR from three."""

GROUP_HOSTS = 4
"""Default number of hosts in a group."""
COPY_HOSTS = 2
BLOCK_ALIGN = 4096
"""Blocks begin at multiples of this within an image, so that they consist of whole pages."""
_PARITY_BLOCKS = {"copy": 1, "xor": 1, "pq": 2}

Group = tuple[str, ...]
"""Hosts that protect each other's images, in the order of their blocks."""


@dataclass(frozen=True, slots=True, order=True)
class HostDomain:
    """A host and its failure domain: a rack, a power supply, or the host itself."""

    host: str
    domain: str


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection of a job's hosts. Without groups, ``mode`` is "off" and ``reason`` says
    why."""

    mode: Mode
    groups: tuple[Group, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DataBlock:
    """Bytes [``start``, ``stop``) of the image of ``member``.

    ``position`` is the block's number both in that image and in the stripe. The block is implicitly
    padded with zeros, and is empty beyond the end of the image.
    """

    member: int
    position: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParityBlock:
    """A block of parity of ``stripe``, held by ``member``.

    Row 0 is P, the XOR of the data; row 1 is Q, weighted by powers of the generator.
    """

    member: int
    stripe: int
    row: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StripeRepair:
    """The inputs to rebuild one block of a lost image: ``data`` and ``parity``, cut to the bytes
    needed.

    ``unknown``: positions of all lost blocks of the stripe.
    """

    stripe: int
    wanted: DataBlock
    unknown: tuple[int, ...]
    data: tuple[DataBlock, ...]
    parity: tuple[ParityBlock, ...]

    @property
    def pulled(self) -> tuple[DataBlock | ParityBlock, ...]:
        """The blocks that other members have to supply."""
        return (*self.data, *self.parity)


@dataclass(frozen=True, slots=True)
class Lane:
    """One image of each member of a group, in order, and their division into blocks.

    Stripe s has its parity on members s, s + 1, … (``parity`` of them), and takes block j of member
    s + parity + j for each j below ``width``, all modulo the number of members. So block j of any
    image is at position j of its stripe.
    """

    image_nbytes: tuple[int, ...]
    parity: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.parity <= 2:
            raise ValueError(f"a stripe has one or two blocks of parity, not {self.parity}")
        if not 1 <= self.width <= len(self.image_nbytes) - self.parity:
            raise ValueError(
                f"stripes of {self.width} + {self.parity} blocks need as many members, and there "
                f"are {len(self.image_nbytes)}"
            )

    @property
    def members(self) -> int:
        return len(self.image_nbytes)

    @property
    def block_nbytes(self) -> int:
        """Size in bytes of every parity block, and of every data block including its zeros."""
        return round_up(ceil_div(max(self.image_nbytes), self.width), BLOCK_ALIGN)

    def block(self, member: int, position: int) -> DataBlock:
        """Return one block of one image."""
        nbytes = self.image_nbytes[member]
        start = min(position * self.block_nbytes, nbytes)
        stop = min(start + self.block_nbytes, nbytes)
        return DataBlock(member, position, start, stop)

    def stripe_of(self, block: DataBlock) -> int:
        """Return the stripe that contains ``block``."""
        return (block.member - self.parity - block.position) % self.members

    def data(self, stripe: int) -> tuple[DataBlock, ...]:
        """Return the data blocks of a stripe, by position: the inputs of its parity."""
        return tuple(
            self.block((stripe + self.parity + position) % self.members, position)
            for position in range(self.width)
        )

    def parities(self, stripe: int) -> tuple[ParityBlock, ...]:
        """Return the parity blocks of a stripe, by row. Those of a stripe without data are
        empty."""
        nbytes = max(block.nbytes for block in self.data(stripe))
        return tuple(
            ParityBlock((stripe + row) % self.members, stripe, row, nbytes)
            for row in range(self.parity)
        )

    def held_by(self, member: int) -> tuple[ParityBlock, ...]:
        """Return all parity that ``member`` holds: one block of each row."""
        return tuple(
            self.parities((member - row) % self.members)[row] for row in range(self.parity)
        )

    def repairs(self, lost: Collection[int], want: int) -> tuple[StripeRepair, ...]:
        """Return the blocks to pull, block by block, to rebuild the image of the lost member
        ``want``.

        These are the fewest whole blocks, cut off at the end of the wanted one. Empty blocks need
        none. Raises ValueError if too many members are lost.
        """
        blocks = (self.block(want, position) for position in range(self.width))
        return tuple(self._repair(block, frozenset(lost)) for block in blocks if block.nbytes)

    def _repair(self, wanted: DataBlock, lost: Collection[int]) -> StripeRepair:
        stripe = self.stripe_of(wanted)
        data = self.data(stripe)
        # An empty block is all zeros, whoever its member is.
        unknown = tuple(b.position for b in data if b.member in lost and b.nbytes)
        left = [block for block in self.parities(stripe) if block.member not in lost]
        if len(unknown) > len(left):
            raise ValueError(
                f"stripe {stripe} has lost {len(unknown)} blocks, and {len(left)} of its "
                f"{self.parity} blocks of parity are left"
            )
        nbytes = wanted.nbytes
        return StripeRepair(
            stripe,
            wanted,
            unknown,
            tuple(_shortened(b, nbytes) for b in data if b.nbytes and b.member not in lost),
            tuple(
                ParityBlock(b.member, stripe, b.row, min(b.nbytes, nbytes))
                for b in left[: len(unknown)]
            ),
        )


def _shortened(block: DataBlock, nbytes: int) -> DataBlock:
    stop = min(block.stop, block.start + nbytes)
    return DataBlock(block.member, block.position, block.start, stop)


def parity_of(mode: str) -> int:
    """Return the number of hosts of a group that may be lost."""
    return _PARITY_BLOCKS.get(mode, 0)


def lanes(images: Sequence[Sequence[int]], parity: int, width: int) -> tuple[Lane, ...]:
    """Return the lanes of a group.

    ``images``: the sizes in bytes of each member's images, by rank. A member with fewer images than
    others gets empty ones.
    """
    count = max(map(len, images), default=0)
    return tuple(
        Lane(tuple(sizes[number] if number < len(sizes) else 0 for sizes in images), parity, width)
        for number in range(count)
    )


def protection(
    hosts: Sequence[HostDomain], mode: Mode = "auto", group: int = GROUP_HOSTS
) -> Protection:
    """Return the protection of ``hosts``. ``auto`` takes the best possible one, and never fails.

    Raises ValueError if there are too few hosts or failure domains for another mode, or the mode is
    unknown.
    """
    if mode == "off":
        return Protection("off", reason="it is off")
    if mode == "auto":
        return _automatic(hosts, group)
    if mode not in get_args(Mode):
        raise ValueError(f"{mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "copy":
        group = COPY_HOSTS
    return Protection(mode, tuple(groups(hosts, group, _PARITY_BLOCKS[mode])))


def _automatic(hosts: Sequence[HostDomain], group: int) -> Protection:
    reason = "there is one host"
    modes: tuple[Mode, ...] = ()
    if len(hosts) == 2:
        modes = ("copy",)
    elif len(hosts) > 2:
        modes = ("xor", "copy")
    for mode in modes:
        try:
            return protection(hosts, mode, group)
        except ValueError as error:
            reason = str(error)
    return Protection("off", reason=reason)


def groups(hosts: Sequence[HostDomain], group: int, parity: int) -> list[Group]:
    """Divide ``hosts`` into as many groups of at least ``group`` as possible.

    Group sizes differ by at most one: they are ``group`` or one more, unless the hosts are too few
    for that. The result does not depend on the order of ``hosts``.

    Members of a group lie in different domains if possible; at most ``parity`` members share one,
    so that the loss of a domain can be repaired. Raises ValueError if that is impossible.
    """
    _check(hosts, group, parity)
    by_domain = defaultdict[str, list[str]](list)
    for one in sorted(hosts):
        by_domain[one.domain].append(one.host)
    # Deal like cards, domain by domain: each domain is spread over as many groups as possible.
    dealt = [host for domain in sorted(by_domain) for host in by_domain[domain]]
    count = max(1, len(dealt) // group)
    found = [tuple(dealt[number::count]) for number in range(count)]
    domain_of = {one.host: one.domain for one in hosts}
    for each in found:
        domain, shared = Counter(domain_of[host] for host in each).most_common(1)[0]
        if shared > parity:
            raise ValueError(
                f"{len(hosts)} hosts in {len(by_domain)} failure domains cannot form groups of "
                f"{len(each)} that survive the loss of a domain: {shared} hosts of one group "
                f"would lie in {domain}, and {parity} of a group may be lost"
            )
    return found


def _check(hosts: Sequence[HostDomain], group: int, parity: int) -> None:
    if len({one.host for one in hosts}) != len(hosts):
        raise ValueError("a host is listed twice")
    if group <= parity:
        raise ValueError(
            f"a group of {group} hosts cannot lose {parity} of them; it needs {parity + 1} or more"
        )
    if len(hosts) <= parity:
        raise ValueError(
            f"{len(hosts)} hosts cannot guard against the loss of {parity}: {parity + 1} or more "
            "are needed"
        )
