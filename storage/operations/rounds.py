"""The rounds of saves and loads, and the messages of each.

A save:

    agree       ranks state their tensors, or the global plan they follow; the leader confirms the
                plan, or chooses what to compare
    holds       ranks state their tensors, if some follow another plan
    digests     ranks send digests of the compared tensors; the leader makes the global plan
    keep        with keepers: ranks state whether they have a slot; the leader decides whether all
                use their keepers, and returns the branch of the run
    patch       of a weight channel: ranks state whether they have the bytes of the last version
    begin       the leader announces the attempt
    written     ranks send their fragments and telemetry to the first rank of their host
    commit      the first ranks of hosts, and the ranks of the leader's, send these to the leader

A save whose ranks another library plans without coordinating them:

    divide      ranks state their boxes; the leader returns the attempt, and the writer of each box
                that several ranks have
    commit      all ranks send their fragments

A load:

    hosts       ranks state their host; the leader returns which ranks share one
    fits        ranks state what does not fit, and the manifest they read; the leader decides
                whether to proceed
    arrived     ranks state whether the checkpoint was still there
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.fragment import Fragment, StateLayout, decode_fragment
from ..pipeline.base import ChosenBase
from ..ranks.messages import Codec, Nothing, Round, codec


@dataclass(frozen=True, slots=True)
class HeldStatement:
    """Tensors of one rank whose replicas it does not know.

    ``labels``: digests of names; ``mesh``: int16, for each label the index in ``groups`` of its
    mesh's ranks, -1 for a plain tensor; ``groups``: bytes held by each group of ranks, by a digest
    of the group. ``host``: equal on all ranks of a host.
    """

    labels: bytes
    mesh: bytes
    groups: dict[str, int]
    host: str | None


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """The global plan that a rank follows: its ``id``, and digests of the rows compared for it."""

    id: bytes
    identical: dict[str, bytes]
    divergent: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class SaveStatement:
    """A rank's first statement. Either ``plan`` or ``holdings`` is given. ``placeholders``: the
    reason for suspecting a placeholder, by path; None from a rank without tensors."""

    uri: str
    plan: PlanFollowed | None = None
    holdings: HeldStatement | None = None
    compression: str | None = None
    overwrite: bool = True
    placeholders: dict[str, str] | None = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Labels whose holders must send digests."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgreeVerdict:
    """``plan`` for all ranks; or a ``comparison`` to make; or neither: state all tensors."""

    plan: bytes = b""
    comparison: Comparison | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """A rank's findings about the compared rows. ``of``: their positions among its labels;
    ``digests`` and ``nbytes`` of each; ``parts``: texts of parts of DTensors, by label."""

    of: tuple[int, ...]
    digests: bytes
    nbytes: tuple[int, ...]
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """The global plan.

    ``groups``: lists of ranks; ``labels``: the group that holds each label, omitted for the whole
    job, None if ranks hold different values; ``divergent``: for those, the first holder and the
    number of holders; ``shares``: the cuts between the parts that a group's members write, by
    group; ``hosts``: the host of each rank, see ``ranks.hosts``.
    """

    groups: tuple[tuple[int, ...], ...]
    labels: dict[str, int | None]
    divergent: dict[str, tuple[int, int]]
    shares: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    hosts: bytes = b""
    id: bytes = b""


@dataclass(frozen=True, slots=True)
class Keepable:
    """Why this rank cannot use its keeper; "" if it can."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Why no rank uses its keeper, "" if all do; and the branch of the run."""

    problem: str = ""
    branch: str = ""


@dataclass(frozen=True, slots=True)
class CanPatch:
    """Readiness of a rank, or of all, to store images as patches of the last version."""

    can: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The attempt that the leader has begun, and what ranks may borrow from."""

    attempt: str
    base: ChosenBase = field(default_factory=ChosenBase)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes that a rank could write: bytes by name; all ranks that have a box use the same name."""

    nbytes: dict[str, int]
    overwrite: bool = True


@dataclass(frozen=True, slots=True)
class Division:
    """The leader's attempt, its start, and by name the writer of each box of several ranks."""

    attempt: str
    created_s: float
    writers: dict[str, int]


@dataclass(frozen=True, slots=True)
class OnHost:
    """An id shared by the ranks of a host; None if a rank shares nothing with others."""

    host: str | None


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host of each rank, see ``ranks.hosts``."""

    numbers: bytes


@dataclass(frozen=True, slots=True)
class Differences:
    """Names left out by a load: only in the state (``missing``), or only in the checkpoint
    (``unexpected``). Over all ranks; a sample of each, and the total counts."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing_count: int = 0
    unexpected_count: int = 0


@dataclass(frozen=True, slots=True)
class FitReport:
    """A rank's findings before anything is filled.

    ``manifest``: its digest, empty if the checkpoint was replaced; ``peers``: an id shared by ranks
    that exchange. Texts by name: see ``state.filling.targets.Match``. ``tensors`` and ``values``:
    bit masks of the parts of the checkpoint that the rank has a place for.
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
    """Names left out by a load, and which ranks exchange their reads, as in ``ranks.hosts``.
    ``left`` is None if ranks read different manifests and must start again."""

    left: Differences | None
    peers: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Whether everything wanted has arrived; otherwise the checkpoint was replaced meanwhile."""

    complete: bool


AGREE = Round.of("agree", SaveStatement, AgreeVerdict)
HOLDS = Round.of("holds", HeldStatement, Comparison)
DIGESTS = Round.of("digests", Findings, PlanDecision)
MEET = Round.of("meet", Nothing, Nothing)
KEEP = Round.of("keep", Keepable, Kept)
PATCH_ROUND = Round.of("patch", CanPatch, CanPatch)
BEGIN = Round.of("begin", Nothing, Begun)
DIVIDE = Round.of("divide", Boxes, Division)
HOSTS = Round.of("hosts", OnHost, Hosts)
FITS = Round.of("fits", FitReport, Fit)
ARRIVED = Round.of("arrived", Arrived, Arrived)


@dataclass(frozen=True, slots=True)
class FragmentCodec(Codec[Fragment]):
    """Codec for fragments between two ranks; a layout sent before is replaced by its key."""

    sent: set[bytes]
    received: dict[bytes, StateLayout]
    slow = True

    def encode(self, message: Fragment, /) -> bytes:
        return message.encode(self.sent)

    def decode(self, data: bytes, what: str, /) -> Fragment:
        return decode_fragment(data, what, self.received)


def commit_round(fragments: FragmentCodec) -> Round[Fragment, Nothing]:
    """Return the round that commits a save."""
    return Round("commit", fragments, codec(Nothing))
