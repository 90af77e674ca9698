"""Messages between a trainer and its saver.

The saver answers each :class:`Write` with :class:`Wrote` or :class:`Failed`, under the number of
the request. Until then it sends :class:`Moved`. Both processes run the same version of Holdfast,
since one has started the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...core.spans import Summary
from ...drivers.layers.metrics import OperationMetrics, Snapshot, meter_of
from ...planner.image import DIGEST_NBYTES
from ..arenas.messages import decode_kind, encode
from ..format.extents import Extents
from ..pipeline.base import Borrowing, ChosenBase
from ..pipeline.image_writer import WrittenImage
from ..ranks.failures import Failure

__all__ = [
    "BEAT_S",
    "Alive",
    "Cancel",
    "Counted",
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
    ``base``: URI of the folder of the checkpoint ``choice``, whose equal bytes are borrowed, "" to
    write everything; ``limits``: the fields of :class:`~..pipeline.borrowing.Incremental`.

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
    base: str = ""
    choice: ChosenBase = field(default_factory=ChosenBase)
    limits: tuple[float, ...] = ()


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
    """Answer: the image is durable. ``digests``: 16 bytes per chunk; ``stored_nbytes``,
    ``borrowed_nbytes``, ``unchanged``, ``extents``: see
    :class:`~..pipeline.image_writer.WrittenImage`; ``base``, ``why_whole``: see
    :class:`~..pipeline.base.Borrowing`; ``summary``: of the recorded stages."""

    digests: bytes
    stored_nbytes: int
    summary: Summary | None = None
    borrowed_nbytes: int = 0
    unchanged: tuple[tuple[int, int], ...] = ()
    extents: bytes = b""
    base: str = ""
    why_whole: str = ""

    @classmethod
    def of(cls, written: WrittenImage, borrowing: Borrowing, summary: Summary | None) -> Wrote:
        """Return the answer for an image."""
        return cls(
            *(written.digests.tobytes(), written.stored_nbytes, summary, written.borrowed_nbytes),
            tuple(written.unchanged),
            b"" if written.extents is None else written.extents.encode(),
            *(borrowing.uri, borrowing.why_whole),
        )

    @property
    def image(self) -> WrittenImage:
        """The image. Raises DamagedError."""
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        extents = Extents.decode(self.extents, "a saver's extents") if self.extents else None
        return WrittenImage(
            *(digests, self.stored_nbytes, self.borrowed_nbytes, self.unchanged, extents)
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer: nothing of the image is visible. ``unopened``: the saver could not even open the
    driver."""

    failure: Failure
    unopened: bool = False


@dataclass(frozen=True, slots=True)
class Requests:
    """Fields of :class:`~...drivers.layers.metrics.OperationMetrics`."""

    count: int
    nbytes: int
    seconds: float
    errors: Mapping[str, int]
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Event, of no request, before an answer: what the saver has counted since the last one, by
    store and operation (``metrics=on``)."""

    stores: Mapping[str, Mapping[str, Requests]]

    @classmethod
    def of(cls, snapshots: Mapping[str, Snapshot]) -> Counted:
        """Return the event for these counts."""
        return cls(
            {
                store: {
                    name: Requests(m.count, m.nbytes, m.seconds, m.errors, tuple(m.histogram))
                    for name, m in snapshot.operations.items()
                }
                for store, snapshot in snapshots.items()
            }
        )

    def add(self) -> None:
        """Add the counts to the metrics of this process."""
        for store, operations in self.stores.items():
            counts = {
                name: OperationMetrics(
                    *(found.count, found.nbytes, found.seconds, Counter(found.errors)),
                    list(found.histogram),
                )
                for name, found in operations.items()
            }
            meter_of(store).add(Snapshot(counts))


Message: TypeAlias = Write | Cancel | Forget | Moved | Alive | Counted | Wrote | Failed
_KINDS = {kind.__name__: kind for kind in Message.__args__}


def decode(data: bytes) -> tuple[int, Message]:
    """Decode a message, and return its number and contents. Raises CoordinationError if
    malformed."""
    return decode_kind(data, _KINDS)
