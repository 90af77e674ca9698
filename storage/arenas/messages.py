"""What trainers and keepers say to each other.

A trainer asks, and the keeper answers each request, with the number that it had. What the keeper
tells without being asked has the number 0. Descriptors go with the messages that say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ...errors import CoordinationError
from ..ranks.messages import codec
from .hosts import GuardedGroup, KeeperHost
from .label import GenerationId

__all__ = [
    "VERSION",
    "Adopt",
    "Agreed",
    "Answer",
    "Captured",
    "Done",
    "Dropped",
    "Durable",
    "Enter",
    "Event",
    "Fill",
    "Filled",
    "Flush",
    "FlushFailed",
    "HeldGeneration",
    "HeldGuard",
    "Hello",
    "Inventory",
    "Local",
    "LookUp",
    "Message",
    "Open",
    "Opened",
    "Protected",
    "Rebuild",
    "Refused",
    "Release",
    "Request",
    "Sealed",
    "Status",
    "StatusAsked",
    "Stop",
    "UnderWay",
    "Voided",
    "Welcome",
    "decode",
    "encode",
]

VERSION = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a trainer. ``host``: its failure domain."""

    version: int
    run: str
    rank: int
    world: int
    host: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Training goes on in ``epoch``, from ``chosen``: a step of memory or of storage, None for the
    run's beginning. What is later is dropped for good. ``hosts``: the keepers of the job, this one
    among them; none where this one is alone. ``groups``: of those that guard each other."""

    epoch: int
    chosen: int | None
    hosts: tuple[KeeperHost, ...] = ()
    groups: tuple[GuardedGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """A slot for an image of ``nbytes``, in this epoch. ``within_s``: how long the trainer waits
    where its memory has to be made first; what takes longer is there for a later step."""

    step: int
    nbytes: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Captured:
    """All bytes of a slot have been copied. With the draft of the label, unchangeable. The fields
    are those of the label."""

    slot: int
    step: int
    hashed_end: int
    chunk_nbytes: int
    block_nbytes: int
    created_s: float
    accord: str = ""
    equal: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """The capture into a slot has failed."""

    slot: int


@dataclass(frozen=True, slots=True)
class LookUp:
    """What is there to go on from?"""


@dataclass(frozen=True, slots=True)
class Open:
    """Hand over an image, to be read from; and its label. It stays as it is until it is
    released."""

    generation: GenerationId
    rank: int


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Make the image of ``rank``, which is lost, again, out of what the others of its ``group``
    have: all but the members ``lost``. ``hosts``: where they are."""

    generation: GenerationId
    rank: int
    group: GuardedGroup
    lost: tuple[int, ...]
    hosts: tuple[KeeperHost, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """All that this trainer has opened may be written over."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """An image that a former keeper has held, with the image and its label."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Once the generation of this step is agreed on, write it to ``uri``. ``options``: of the
    driver, as JSON. ``environment``: what configures the driver, with its secrets; never
    stored. ``compression``: of its images, "" for none. ``branch``: of the run, as the manifest
    records it."""

    step: int
    uri: str
    options: str = "{}"
    environment: Mapping[str, str] = field(default_factory=dict)
    compression: str = ""
    branch: str = ""


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """What does this keeper do?"""


@dataclass(frozen=True, slots=True)
class Stop:
    """End, and let go of all that is in memory."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers :class:`Hello`: which keeper this is, but for its ranks."""

    pid: int
    host: KeeperHost


@dataclass(frozen=True, slots=True)
class Refused:
    """Answers any request that is not granted. ``reason``: one word."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """Answers a request that has no other answer."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Answers :class:`Fill`; with the memory of the slot, if this trainer was not handed it
    before."""

    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HeldGeneration:
    """A generation in memory, by the ranks whose images are held; ``agreed``: all ranks' are known
    to be whole and alike."""

    generation: GenerationId
    world: int
    ranks: tuple[int, ...]
    agreed: bool


@dataclass(frozen=True, slots=True)
class HeldGuard:
    """A keeper's part of the parity of a generation: that of the ``member`` of ``group`` in this
    place."""

    generation: GenerationId
    world: int
    group: GuardedGroup
    member: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Answers :class:`LookUp`. ``hosts``: the keepers of the last job."""

    epoch: int
    generations: tuple[HeldGeneration, ...]
    guards: tuple[HeldGuard, ...] = ()
    hosts: tuple[KeeperHost, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers :class:`Open`; with the memory and its label."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """Answers :class:`StatusAsked`; ``text`` is JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Tells that an image is whole, hashed and labelled; with its label."""

    slot: int
    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Agreed:
    """Tells that all ranks' images of a generation are whole, and alike where they have to be.
    ``local``: the keeper writes its images to storage of the host now, see :class:`Local`."""

    generation: GenerationId
    local: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """Tells that the images of this host are on its own storage; ``problem``: why they are not."""

    generation: GenerationId
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Protected:
    """Tells that there is parity, or are copies, of all images of a generation: it outlives
    hosts."""

    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Voided:
    """Tells that a generation is not one: ranks disagree, or it was dropped."""

    generation: GenerationId
    text: str


@dataclass(frozen=True, slots=True)
class Durable:
    """Tells that a generation is committed at the URI it was to be flushed to."""

    generation: GenerationId
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class FlushFailed:
    """Tells that a flush has failed; ``final``: it is not tried again."""

    generation: GenerationId
    text: str
    final: bool


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Comes before an answer, with its number: what was asked for takes long, and more of it is
    done."""


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
    | Adopt
    | Flush
    | StatusAsked
    | Stop
)
Answer: TypeAlias = Welcome | Refused | Done | Filled | Inventory | Opened | Status
Event: TypeAlias = Sealed | Agreed | Local | Protected | Voided | Durable | FlushFailed
Message: TypeAlias = Request | Answer | Event | UnderWay

_KINDS = {
    kind.__name__: kind for kind in (*Request.__args__, *Answer.__args__, *Event.__args__, UnderWay)
}


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A message on the line: its number, its class, and its encoding."""

    number: int
    kind: str
    body: bytes


def encode(number: int, message: Message) -> bytes:
    """The bytes of a message."""
    kind = type(message)
    return codec(_Numbered).encode(_Numbered(number, kind.__name__, codec(kind).encode(message)))


def decode(data: bytes) -> tuple[int, Message]:
    """The number of a message, and what it says. Raises CoordinationError for anything else."""
    numbered = codec(_Numbered).decode(data, "a message on the line")
    kind = _KINDS.get(numbered.kind)
    if kind is None:
        raise CoordinationError(f"a message of the unknown kind {numbered.kind!r:.40}")
    message: Message = codec(kind).decode(numbered.body, f"a message of the kind {numbered.kind}")
    return numbered.number, message
