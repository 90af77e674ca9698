"""Status of a keeper, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..arenas.label import GenerationId
from ..arenas.messages import VERSION, GenerationEntry


@dataclass
class Counters:
    """Events since the keeper began.

    ``sealed``: images; ``agreed`` and ``void``: generations; ``skipped``: steps without a free
    slot; ``refused``: requests; ``flushed`` and ``flush_failures``: flushes to storage; ``local``
    and ``local_failures``: writes to the local level; ``protected`` and ``protect_failures``:
    generations that were, or could not be, encoded; ``rebuilt``: images; ``report_failures``:
    reports that the leader has not answered.
    """

    sealed: int = 0
    agreed: int = 0
    void: int = 0
    skipped: int = 0
    refused: int = 0
    flushed: int = 0
    flush_failures: int = 0
    local: int = 0
    local_failures: int = 0
    protected: int = 0
    protect_failures: int = 0
    rebuilt: int = 0
    report_failures: int = 0


@dataclass(frozen=True)
class KeeperStatus:
    """Current state of a keeper."""

    run: str
    host: str
    pid: int
    began_s: float
    epoch: int
    budget_nbytes: int
    held_nbytes: int
    ranks: Sequence[int]
    """Ranks with a connected process."""
    generations: Sequence[GenerationEntry]
    flushing: GenerationId | None
    """Generation being flushed."""
    address: str
    """HTTP address, "" if not served."""
    counters: Counters
    name: str = ""
    """Name of the keeper in the run."""
    hosts: Sequence[str] = ()
    """Names of all keepers of the job."""
    protection: str = "off"
    """Mode of parity."""
    protected: GenerationId | None = None
    """Newest protected generation."""
    parity_nbytes: int = 0
    """Size of this keeper's parity."""
    ready: bool = True
    """False while it loads its first images and lets trainers wait."""
    problem: str = ""
    """The reason why the job keeps no steps for now, such as a keeper that does not answer."""
    version: int = VERSION
    """Version of its messages. Trainers need the same one."""
    is_service: bool = False
    """True if no trainer has started it."""

    def as_json(self) -> dict[str, object]:
        """Return the status as a JSON object."""
        found = asdict(self)
        for held in found["generations"]:
            held.update(held.pop("generation"))
        for name in ("flushing", "protected"):
            generation = found.pop(name)
            found[f"{name}_step"] = None if generation is None else generation["step"]
        return found
