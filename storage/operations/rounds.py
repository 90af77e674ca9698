"""The rounds of saves and loads, and the messages of each.

A save:

    agree       what each rank holds, or which global plan it goes by; the leader: that all go by
                it, or what is to be compared
    holds       what each rank holds, where some go by another plan
    digests     digests of what is to be compared; the leader: the global plan
    keep        where ranks have keepers: whether each has a slot; the leader: whether all go by way
                of their keepers, and the branch of the run
    begin       the leader alone: the attempt
    written     the ranks of a host to the first of them: their fragments, and what they recorded
    commit      the first ranks of hosts, and the ranks of the leader's: the same

A save whose ranks another library plans, without coordinating them:

    divide      the boxes that each rank has; the leader: the attempt, and who writes what several
                have
    commit      all ranks: their fragments

A load:

    hosts       the host of each rank; the leader: which ranks share one
    fits        what does not fit, and which manifest was read; the leader: whether to go on
    arrived     whether the checkpoint was still there
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.fragment import Fragment, StateLayout, decode_fragment
from ..ranks.messages import Codec, Nothing, Round, codec

__all__ = [
    "AGREE",
    "ARRIVED",
    "BEGIN",
    "DIGESTS",
    "DIVIDE",
    "FITS",
    "HOLDS",
    "HOSTS",
    "KEEP",
    "AgreeVerdict",
    "Arrived",
    "Begun",
    "Boxes",
    "Comparison",
    "Differences",
    "Division",
    "Findings",
    "Fit",
    "FitReport",
    "FragmentCodec",
    "HeldStatement",
    "Hosts",
    "Keepable",
    "Kept",
    "OnHost",
    "PlanDecision",
    "PlanFollowed",
    "SaveStatement",
    "commit_round",
]


@dataclass(frozen=True, slots=True)
class HeldStatement:
    """What one rank holds whose replicas it does not know.

    ``labels``: digests of names; ``mesh``: int16, for each label the position in ``groups`` of the
    ranks of its mesh, -1 for a plain tensor; ``groups``: for each group of ranks, by a digest of
    it, the bytes that they hold. ``host``: what ranks of one host have in common.
    """

    labels: bytes
    mesh: bytes
    groups: dict[str, int]
    host: str | None


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """The global plan that a rank goes by: its ``id``, and digests of what was compared for it."""

    id: bytes
    identical: dict[str, bytes]
    divergent: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class SaveStatement:
    """What a rank states first. Either ``plan`` or ``holdings`` is given. ``placeholders``: by
    path, why it seems to be one; None from a rank without tensors."""

    uri: str
    plan: PlanFollowed | None = None
    holdings: HeldStatement | None = None
    compression: str | None = None
    placeholders: dict[str, str] | None = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Labels of which several groups of ranks are to send digests."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgreeVerdict:
    """All ranks go by the plan ``plan``; or ``comparison`` is made next; or, with neither, all
    ranks say what they hold."""

    plan: bytes = b""
    comparison: Comparison | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What a rank has found of the rows that are compared. ``of``: their positions among its
    labels; ``digests`` and ``nbytes`` of each; ``parts``: texts of parts of DTensors, by label."""

    of: tuple[int, ...]
    digests: bytes
    nbytes: tuple[int, ...]
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """The global plan. ``groups``: lists of ranks; ``labels``: the group that holds each label,
    where that is not the whole job, None where ranks hold different values; ``divergent``: of
    those, the first rank that holds it, and how many do; ``shares``: by groups, the cuts between
    the parts that each of them writes; ``hosts``: the host of each rank, see ``ranks.hosts``."""

    groups: tuple[tuple[int, ...], ...]
    labels: dict[str, int | None]
    divergent: dict[str, tuple[int, int]]
    shares: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    hosts: bytes = b""
    id: bytes = b""


@dataclass(frozen=True, slots=True)
class Keepable:
    """Why this rank cannot go by way of its keeper; "" where it can."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Why no rank goes by way of its keeper, "" where all do; and the branch of the run."""

    problem: str = ""
    branch: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The attempt that the leader has begun."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Boxes:
    """What a rank could write: the bytes of each box, by a name of the box that is the same on all
    ranks that have it."""

    nbytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Division:
    """The attempt that the leader has begun, and when; and of each box that several ranks have, by
    its name, which of them writes it."""

    attempt: str
    created_s: float
    writers: dict[str, int]


@dataclass(frozen=True, slots=True)
class OnHost:
    """What ranks of one host have in common; None where a rank shares nothing with others."""

    host: str | None


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host of each rank, see ``ranks.hosts``."""

    numbers: bytes


@dataclass(frozen=True, slots=True)
class Differences:
    """What a load has left: names that only the state has (``missing``), or only the checkpoint
    (``unexpected``); of all ranks together, some of each, and how many there are."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing_count: int = 0
    unexpected_count: int = 0


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a rank has found before anything is filled.

    ``manifest``: its digest, empty where the checkpoint was replaced; ``peers``: what ranks that
    exchange have in common. Texts by name: see ``state.targets.Match``. ``tensors`` and ``values``:
    bits, what of the checkpoint the rank has a place for.
    """

    manifest: bytes
    peers: str | None
    missing: dict[str, str]
    mismatched: dict[str, str]
    castable: dict[str, str]
    shared: dict[str, str]
    left: dict[str, str]
    tensors: bytes
    values: bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """What a load leaves out, and which ranks exchange what they read, as in ``ranks.hosts``. None:
    ranks have read different manifests, and start again."""

    left: Differences | None
    peers: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Whether all that was wanted has arrived; else the checkpoint was replaced meanwhile."""

    complete: bool


AGREE = Round.of("agree", SaveStatement, AgreeVerdict)
HOLDS = Round.of("holds", HeldStatement, Comparison)
DIGESTS = Round.of("digests", Findings, PlanDecision)
KEEP = Round.of("keep", Keepable, Kept)
BEGIN = Round.of("begin", Nothing, Begun)
DIVIDE = Round.of("divide", Boxes, Division)
HOSTS = Round.of("hosts", OnHost, Hosts)
FITS = Round.of("fits", FitReport, Fit)
ARRIVED = Round.of("arrived", Arrived, Arrived)


@dataclass(frozen=True, slots=True)
class FragmentCodec(Codec[Fragment]):
    """Fragments between two ranks, of which ``sent`` and ``received`` are kept from save to save: a
    layout that was sent before goes by its key."""

    sent: set[bytes]
    received: dict[bytes, StateLayout]
    slow = True

    def encode(self, message: Fragment, /) -> bytes:
        return message.encode(self.sent)

    def decode(self, data: bytes, what: str, /) -> Fragment:
        return decode_fragment(data, what, self.received)


def commit_round(fragments: FragmentCodec) -> Round[Fragment, Nothing]:
    """The round in which a save is committed."""
    return Round("commit", fragments, codec(Nothing))
