"""Messages between a trainer and its saver.

The saver answers each :class:`Write` with :class:`Wrote` or :class:`Failed`, under the number of
the request. Until then it sends :class:`Moved`. Both processes run the same version of Holdfast,
since one has started the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...core.spans import Summary
from ..arenas.messages import decode_kind, encode
from ..ranks.failures import Failure

__all__ = [
    "BEAT_S",
    "Alive",
    "Cancel",
    "Failed",
    "Forget",
    "Message",
    "Moved",
    "Write",
    "Wrote",
    "decode",
    "encode",
]

BEAT_S = 5.0
"""Interval of signs of life."""


@dataclass(frozen=True, slots=True)
class Write:
    """Requests that an image is written to ``key`` below ``uri``. Carries its memory, of
    ``memory_nbytes``, which stays unchanged until the request is answered and forgotten.

    ``options``: of the driver, as JSON. ``environment``: variables that configure the driver,
    including secrets; never stored. ``nbytes``, ``hashed_end``, ``chunk_nbytes``, ``block_nbytes``:
    of the image, see :class:`~...planner.image.ImageLayout`. ``records``: time the stages.

    The rest is needed to commit without the trainer. ``attempt``, ``step``, ``created_s``,
    ``branch``: for the manifest. ``draft``: this rank's fragment of it, without the image.
    ``record``: the contents of the commit record.
    """

    uri: str
    options: str
    environment: Mapping[str, str]
    key: str
    rank: int
    world: int
    memory_nbytes: int
    nbytes: int
    hashed_end: int
    chunk_nbytes: int
    block_nbytes: int
    compression: str
    records: bool
    attempt: str
    step: int | None
    created_s: float
    draft: bytes
    record: bytes
    branch: str = ""
    overwrite: bool = True


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests that a write ends, whose request had the same number."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Reports that the save whose image was written under the same number has ended. Until then,
    the saver commits it if the trainer dies."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Event: of ``total_nbytes``, ``done_nbytes`` are written. ``sealed``: all are hashed."""

    done_nbytes: int
    total_nbytes: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """Event, of no request: sent every :data:`BEAT_S` while images are written."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """Answer: the image is durable. ``digests``: 16 bytes per chunk; ``stored_nbytes``: size of its
    file; ``summary``: of the recorded stages."""

    digests: bytes
    stored_nbytes: int
    summary: Summary | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer: nothing of the image is visible. ``unopened``: the saver could not even open the
    driver."""

    failure: Failure
    unopened: bool = False


Message: TypeAlias = Write | Cancel | Forget | Moved | Alive | Wrote | Failed
_KINDS = {kind.__name__: kind for kind in Message.__args__}


def decode(data: bytes) -> tuple[int, Message]:
    """Decode a message, and return its number and contents. Raises CoordinationError if
    malformed."""
    return decode_kind(data, _KINDS)
