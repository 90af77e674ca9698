"""Reports of a save, a load or an update on one rank. Times are in seconds from the call.

Fields of all: ``stages`` by name, in the order in which they began; ``slowest``: the slowest
operations that read or write an object, slowest first; ``cpu_s``: processor time of this process,
training included; ``peak_nbytes``: peak host memory of chunks. Empty or zero with
``telemetry="off"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.spans import SlowOperation, StageReport


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save on one rank.

    ``nbytes``: size of this rank's image, 0 if it wrote none; ``stored_nbytes``: size of its file,
    less if compressed. ``borrowed_nbytes``: bytes of the file that the storage copied from the
    earlier checkpoint ``base``, a URI; ``why_whole``: why there was none to copy from, "" if there
    was, or if none was asked for. ``fenced_s``: how long training waited for a lazy save before
    changing the state.
    """

    uri: str
    attempt: str
    nbytes: int
    captured_s: float
    sealed_s: float
    durable_s: float
    fenced_s: float = 0.0
    stored_nbytes: int = 0
    borrowed_nbytes: int = 0
    base: str = ""
    why_whole: str = ""
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    slowest: tuple[SlowOperation, ...] = ()
    cpu_s: float = 0.0
    peak_nbytes: int = 0

    @property
    def written_nbytes(self) -> int:
        """Bytes of the file that this rank has sent to the storage."""
        return self.stored_nbytes - self.borrowed_nbytes


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a load on one rank.

    ``step``: recorded in the checkpoint; None if it has none.

    ``bytes_wanted``: stored size of this rank's tensors. ``bytes_read``: bytes it read from
    storage, as whole blocks with checksums, also for other ranks; compressed data counts
    uncompressed. ``bytes_received``: bytes that other ranks read for this one.

    ``missing``: names only in the state; ``unexpected``: names only in the checkpoint; over all
    ranks, as left out by a load that is not ``strict=True``. The first hundred of each;
    ``missing_count`` and ``unexpected_count`` count all.
    """

    uri: str
    attempt: str
    bytes_wanted: int
    bytes_read: int
    seconds: float
    step: int | None = None
    bytes_received: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing_count: int = 0
    unexpected_count: int = 0
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    slowest: tuple[SlowOperation, ...] = ()
    cpu_s: float = 0.0
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """Report of an update of one subscriber to ``version``.

    ``sequence``: number of the version in its channel; ``skipped``: number of versions since the
    one in use before that were never used. ``received_nbytes``: bytes read from the channel;
    ``anchored_chunks``: chunks that were read whole. ``prepare_s``: seconds to fetch, apply and
    verify, while the engine works; ``pause_s``: seconds to swap the weights.
    """

    uri: str
    attempt: str
    version: int
    sequence: int
    skipped: int
    received_nbytes: int
    anchored_chunks: int
    prepare_s: float
    pause_s: float = 0.0
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    slowest: tuple[SlowOperation, ...] = ()
    cpu_s: float = 0.0
    peak_nbytes: int = 0
