"""What a save or a load did on one rank, in figures. Times are in seconds from the call.

What both reports say of their stages: ``stages`` by name, in the order in which they began;
``slowest``, the slowest operations of stages that read or write an object, the slowest first;
``cpu_s``, processor time of this process meanwhile, that of training included; ``peak_nbytes``,
what chunks took of host memory at most at a time. With ``telemetry="off"`` they are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.spans import SlowOperation, StageReport

__all__ = ["LoadReport", "SaveReport"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """``nbytes`` is the size of this rank's image, 0 if it wrote none; ``stored_nbytes`` that of
    its file: less, where it is compressed. ``fenced_s``: how long training had to wait for a lazy
    save before it could go on to change the state."""

    uri: str
    attempt: str
    nbytes: int
    captured_s: float
    sealed_s: float
    durable_s: float
    fenced_s: float = 0.0
    stored_nbytes: int = 0
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    slowest: tuple[SlowOperation, ...] = ()
    cpu_s: float = 0.0
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``bytes_wanted`` is what this rank's tensors take of the checkpoint, ``bytes_read`` what it
    read from storage: whole blocks, and checksums, also for other ranks; of what is compressed,
    what it unpacks to. ``bytes_received`` is what others read for this one.

    ``missing`` are names of the state that the checkpoint does not have, ``unexpected`` names of
    the checkpoint that the state does not have, of all ranks together: those that a load with
    ``strict="state"`` or ``strict=False`` has left. The first hundred of each; ``missing_count``
    and ``unexpected_count`` are how many there are."""

    uri: str
    attempt: str
    bytes_wanted: int
    bytes_read: int
    seconds: float
    bytes_received: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing_count: int = 0
    unexpected_count: int = 0
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    slowest: tuple[SlowOperation, ...] = ()
    cpu_s: float = 0.0
    peak_nbytes: int = 0
