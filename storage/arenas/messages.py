"""Messages between trainers and keepers.

The keeper answers each request with the request's number. Events, which it sends unasked, have
number 0. Some messages carry descriptors, as documented.

Keepers of different versions of Holdfast understand :class:`Hello` as far as its version,
:class:`TakeOver` with its answers, :class:`StatusAsked`, :class:`Stop`, :class:`Refused` and
:class:`Done`. So these change only by new fields with default values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ...errors import CoordinationError
from ..ranks.messages import codec
from .hosts import GuardedGroup, KeeperHost
from .label import GenerationId

M = TypeVar("M")
VERSION = 10
OTHER_VERSION = "version"
"""Reason of a refusal: the other side has another version of these messages."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a trainer. ``host``: its failure domain. ``options``: the options that its
    keeper should have, as JSON; "" to leave them as they are. ``node``: the NUMA node of its
    processors, -1 for any."""

    version: int
    run: str
    rank: int
    world: int
    host: str
    options: str = ""
    node: int = -1


@dataclass(frozen=True, slots=True)
class FlushEnd:
    """Event: the flush of a generation has ended. ``nbytes``: size of all its images, of which
    ``borrowed_nbytes`` were copied from ``base``, a URI; ``why_whole``: why there was none.
    ``problem``: the error, "" if the generation is committed at the URI of its :class:`Flush`.
    ``final``: it will not be retried."""

    generation: GenerationId
    attempt: str
    nbytes: int = 0
    problem: str = ""
    final: bool = True
    borrowed_nbytes: int = 0
    base: str = ""
    why_whole: str = ""


@dataclass(frozen=True, slots=True)
class Enter:
    """Enters ``epoch``, resumed from ``chosen``: a step in memory or storage, None for the
    beginning of the run. All later steps are dropped for good. ``hosts``: keepers of the job,
    including this one; empty if it is alone. ``groups``: keepers that protect each other.
    ``problem``: the reason why no steps will be kept in this epoch. ``ended``: the newest final end
    of a flush that an earlier keeper has told this trainer."""

    epoch: int
    chosen: int | None
    hosts: tuple[KeeperHost, ...] = ()
    groups: tuple[GuardedGroup, ...] = ()
    problem: str = ""
    ended: FlushEnd | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """Requests a slot for an image of ``nbytes`` in this epoch. ``within_s``: how long the trainer
    waits if memory must be allocated first; memory that takes longer serves a later step."""

    step: int
    nbytes: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Captured:
    """Reports that the image is complete. Carries the draft of the label, immutable. For the fields
    see :class:`.label.Label`."""

    slot: int
    step: int
    hashed_end: int
    chunk_nbytes: int
    block_nbytes: int
    created_s: float
    agreement: str = ""
    equal: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Reports that the capture into a slot has failed."""

    slot: int


@dataclass(frozen=True, slots=True)
class LookUp:
    """Requests the inventory, to choose a generation to resume from."""


@dataclass(frozen=True, slots=True)
class Open:
    """Requests an image and its label for reading. The image stays unchanged until
    :class:`Release`."""

    generation: GenerationId
    rank: int


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Requests that the lost image of ``rank`` is rebuilt from the members of ``group`` that are
    not in ``lost``. ``hosts``: their addresses."""

    generation: GenerationId
    rank: int
    group: GuardedGroup
    lost: tuple[int, ...]
    hosts: tuple[KeeperHost, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Allows all images that this trainer has opened to be overwritten."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Announces that this rank ends on purpose, so the others need not be notified. ``finished``:
    training is over, and nobody will resume from memory."""

    finished: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    """Hands over an image of an earlier keeper. Carries the image and its label."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Requests that the generation of this step is written to ``uri`` once it is agreed.
    ``options``: driver options as JSON. ``environment``: variables that configure the driver,
    including secrets; never stored. ``compression``: codec of the images, "" for none. ``branch``:
    branch of the run, for the manifest. ``base``: name of the checkpoint beside this one to borrow
    equal bytes from, "" for none yet; None to write everything. ``limits``: of borrowing, as the
    fields of ``pipeline.borrowing.Incremental``; () for its defaults."""

    step: int
    uri: str
    options: str = "{}"
    environment: Mapping[str, str] = field(default_factory=dict)
    compression: str = ""
    branch: str = ""
    base: str | None = None
    limits: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Requests the status."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Requests that the keeper exits and releases all memory."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """First message of a keeper that is to succeed this one. Requests that this one hands over its
    images and the lock of the run, and exits once the successor has sent :class:`Done`. ``always``:
    also if both speak the same version."""

    version: int
    always: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers :class:`Hello` with the keeper's identity, without its ranks. ``fixed``: the names of
    options that differ and that only a new keeper would apply."""

    pid: int
    host: KeeperHost
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Answers any request that is refused. ``reason``: one word."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """Answers requests without a result."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Answers :class:`Fill`. Carries the memory of the slot, unless this trainer already has it."""

    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GenerationEntry:
    """A generation with images in the memory of a keeper.

    ``world``: number of ranks of the job. ``ranks``: those whose images this keeper has, ascending.
    ``agreed``: all ranks of the job have sealed matching images.
    """

    generation: GenerationId
    world: int
    ranks: tuple[int, ...]
    agreed: bool


@dataclass(frozen=True, slots=True)
class ParityEntry:
    """A keeper's parity of a generation, as the ``member`` with this index in ``group``."""

    generation: GenerationId
    world: int
    group: GuardedGroup
    member: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Answers :class:`LookUp`. ``hosts``: keepers of the last job."""

    epoch: int
    generations: tuple[GenerationEntry, ...]
    guards: tuple[ParityEntry, ...] = ()
    hosts: tuple[KeeperHost, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers :class:`Open`. Carries the memory and the label."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Answers :class:`TakeOver` for each image. Carries the image and its label. ``agreed``: as in
    :class:`GenerationEntry`."""

    agreed: bool


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Answers :class:`TakeOver` after all images. Carries the locked file. ``options``: the
    keeper's options, as JSON."""

    options: str


@dataclass(frozen=True, slots=True)
class Status:
    """Answers :class:`StatusAsked` with JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Event: an image is complete, hashed and labelled. Carries the label."""

    slot: int
    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Agreed:
    """Event: all ranks have sealed matching images of a generation. ``local``: the keeper is
    writing its images to the local level, see :class:`Local`."""

    generation: GenerationId
    local: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """Event: the write to the local level has ended; ``problem``: the error, if any."""

    generation: GenerationId
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Protected:
    """Event: all images of a generation have parity or copies, so it survives the loss of hosts."""

    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Voided:
    """Event: a generation is void: ranks disagree, or it was dropped."""

    generation: GenerationId
    text: str


@dataclass(frozen=True, slots=True)
class FlushLost:
    """Event: this keeper will not learn how a flush ends, or its images are gone."""

    generation: GenerationId
    problem: str


@dataclass(frozen=True, slots=True)
class RankLost:
    """Event: a rank of this epoch has died, so no later step can be agreed on."""

    rank: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Event: another Checkpointer of this process has connected, and gets all later events."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Precedes the answer to a long request, with its number, and reports progress."""


Request: TypeAlias = (
    Hello
    | Enter
    | Fill
    | Captured
    | Dropped
    | LookUp
    | Open
    | Rebuild
    | Release
    | Leave
    | Adopt
    | Flush
    | StatusAsked
    | Stop
    | TakeOver
)
Answer: TypeAlias = (
    Welcome | Refused | Done | Filled | Inventory | Opened | HandedOver | TakenOver | Status
)
GenerationEvent: TypeAlias = Sealed | Agreed | Local | Protected | Voided | FlushEnd | FlushLost
Event: TypeAlias = GenerationEvent | RankLost | Replaced
Message: TypeAlias = Request | Answer | Event | Progress

_KINDS = {
    kind.__name__: kind for kind in (*Request.__args__, *Answer.__args__, *Event.__args__, Progress)
}


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Envelope of a message: its number, class name, and encoding."""

    number: int
    kind: str
    body: bytes


def encode(number: int, message: object) -> bytes:
    """Return the encoded message: a dataclass that :mod:`..ranks.messages` can encode."""
    kind = type(message)
    return codec(_Numbered).encode(_Numbered(number, kind.__name__, codec(kind).encode(message)))


def number_of(data: bytes) -> int:
    """Return the number of an encoded message, even of another version of Holdfast. Raises
    CoordinationError if it is no message."""
    return codec(_Numbered).decode(data, "a message on the line").number


def decode(data: bytes) -> tuple[int, Message]:
    """Decode a message, and return its number and contents. Raises CoordinationError if
    malformed."""
    return decode_kind(data, _KINDS)


def decode_kind(data: bytes, kinds: Mapping[str, type[M]]) -> tuple[int, M]:
    """Decode a message of one of these ``kinds``, by name, like :func:`decode`."""
    numbered = codec(_Numbered).decode(data, "a message on the line")
    kind = kinds.get(numbered.kind)
    if kind is None:
        raise CoordinationError(f"a message of the unknown kind {numbered.kind!r:.40}")
    message = codec(kind).decode(numbered.body, f"a message of the kind {numbered.kind}")
    return numbered.number, message
