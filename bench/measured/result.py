"""What a measurement found, and the same as JSON (``docs/reference/bench.md``).

Scope: pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from ...errors import UsageError
from ..prices import Prices, Requests
from ..ratios import median_ratio
from .observed import Operations

__all__ = [
    "BY_ONE_RANK",
    "DELETING",
    "FIO_READ",
    "FIO_WRITE",
    "LIMITS",
    "PERCENTS",
    "PHASES",
    "READ_ALONE",
    "READ_LIMIT",
    "WRITE_ALONE",
    "WRITE_LIMIT",
    "Measurement",
    "Phase",
    "decoded",
    "encoded",
    "limit_of_phase",
]

VERSION = 1
WRITE_LIMIT = "write limit"
READ_LIMIT = "read limit"
"""What a client that is not ours does."""
WRITE_ALONE = "write alone"
READ_ALONE = "read alone"
"""What our driver does without the engine."""
FIO_WRITE = "fio write"
FIO_READ = "fio read"
"""What fio does, where it is asked for."""
LIMITS = {
    "save": WRITE_LIMIT,
    "async save": WRITE_LIMIT,
    "overwrite": WRITE_LIMIT,
    "load": READ_LIMIT,
    "reshard": READ_LIMIT,
    "verify": READ_LIMIT,
}
"""The phases of checkpoints, and what each is held against."""
PHASES = (
    WRITE_LIMIT,
    "save",
    "async save",
    "overwrite",
    READ_LIMIT,
    "load",
    "reshard",
    "verify",
    "prune",
    "delete",
)
"""Those of every measurement; that reshard only with several ranks."""
PERCENTS = (50, 90, 99)
"""The quantiles of how long operations took that are said."""
BY_ONE_RANK = ("verify", "prune", "delete")
"""Phases that rank 0 runs for all."""
DELETING = ("prune", "delete")
"""Phases that move no bytes, and are measured once: their times are all that they have."""
_GETS = ("read", "get", "stat")
_OF_OTHERS = {
    WRITE_ALONE: WRITE_LIMIT,
    READ_ALONE: READ_LIMIT,
    FIO_WRITE: WRITE_LIMIT,
    FIO_READ: READ_LIMIT,
}


def limit_of_phase(name: str) -> str | None:
    """The phase that ``name`` is held against: also that of a peer, as "save: DCP", of fio, and
    of our driver alone. None where there is none."""
    verb = name.partition(": ")[0]
    return LIMITS.get(verb) or _OF_OTHERS.get(name)


@dataclass(frozen=True)
class Phase:
    """One phase, in which all ranks together move ``nbytes`` each time.

    By round, in order: ``seconds``, until the last rank was done; ``ranks_s``, of each rank;
    ``cpu_s``, processor time of all ranks; ``peak_nbytes``, how far the memory of a rank rose, of
    the one where it rose most; ``stall_s``, how long training would have stood still, of the rank
    where that was longest. ``operations``: what was asked of the storage, in all rounds."""

    name: str
    nbytes: int
    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...] = ()
    peak_nbytes: tuple[int, ...] = ()
    retries: int = 0
    ranks_s: tuple[tuple[float, ...], ...] = ()
    stall_s: tuple[float, ...] = ()
    operations: Mapping[str, Operations] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        """Until the first rank was done that had something to do: the median of the rounds."""
        if self.name in BY_ONE_RANK:
            return self.median_s
        return median(min(ranks) for ranks in self.ranks_s or [(s,) for s in self.seconds])

    @property
    def data_operations(self) -> Operations | None:
        """Those that moved most of the bytes: writes of parts, or reads of ranges."""
        moved = (self.operations.get("write"), self.operations.get("read"))
        return max(filter(None, moved), key=lambda operations: operations.nbytes, default=None)

    @property
    def requests(self) -> Requests:
        """What was asked of the storage in all rounds, as stores charge for it: lists as puts, and
        deletes not at all."""

        def count(*names: str) -> int:
            return sum(self.operations[name].count for name in names if name in self.operations)

        return Requests(count("put", "create", "write", "commit", "list"), count(*_GETS))

    @property
    def read_amplification(self) -> float | None:
        """How many bytes were read for each that was wanted; None where nothing was read."""
        read = self.operations.get("read")
        if read is None:
            return None
        return read.nbytes / (self.nbytes * len(self.seconds))

    @property
    def median_s(self) -> float:
        """Of the rounds."""
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes per second of all rounds together: what they moved in the time that they took."""
        return self.nbytes * len(self.seconds) / sum(self.seconds)

    @property
    def mean_rate(self) -> float:
        """The arithmetic mean of the rates of single rounds, as MLPerf Storage reports it. It is
        never less than :attr:`rate`, and more the further the rounds are apart."""
        return mean(self.nbytes / seconds for seconds in self.seconds)

    @property
    def cpu_s_per_gib(self) -> float | None:
        """Processor time of this process per GiB; None where it was not measured."""
        if not self.cpu_s:
            return None
        return median(self.cpu_s) / (self.nbytes / (1 << 30))


@dataclass(frozen=True)
class Measurement:
    """``uri`` without secrets. ``config``: what was asked for; ``machine``: what it ran on;
    ``limits``: which client each limit was measured by, and how it was set, by phase;
    ``invalid``: why the figures are not to be believed, by phase, or of all under ``""``.
    ``notes``: what they are not to be compared with, and why."""

    uri: str
    created_s: float
    config: Mapping[str, Any]
    machine: Mapping[str, str]
    phases: tuple[Phase, ...]
    limits: Mapping[str, str] = field(default_factory=dict)
    invalid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, Phase]:
        """Its phases."""
        return {phase.name: phase for phase in self.phases}

    @property
    def config_hash(self) -> str:
        """Equal for measurements of the same: of the URI and what was asked for."""
        text = json.dumps([self.uri, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def cost_usd(self, phase: Phase) -> float | None:
        """What the requests of a round cost; None where no prices were given, or where requests
        were not counted."""
        prices = self.config.get("prices")
        if prices is None or not phase.operations:
            return None
        return Prices(**prices).cost_usd(phase.requests) / len(phase.seconds)

    def share(self, name: str) -> float | None:
        """The rate of a phase, as a share of that of its limit: the median of the ratios within
        each round. None where it has no limit, or that was not measured."""
        limit = self.by_name.get(limit_of_phase(name) or "")
        if limit is None:
            return None
        phase = self.by_name[name]
        return median_ratio(limit.seconds, phase.seconds) * phase.nbytes / limit.nbytes


def encoded(found: Measurement) -> str:
    """As JSON."""
    fields = asdict(found)
    for phase, made in zip(fields["phases"], found.phases, strict=True):
        phase["rate"] = made.rate
        phase["mean_rate"] = made.mean_rate
        phase["share"] = found.share(made.name)
        phase["first_s"] = made.first_s
        phase["cost_usd"] = found.cost_usd(made)
        for name, operations in made.operations.items():
            phase["operations"][name] |= {
                f"p{percent}_s": operations.quantile_s(percent / 100) for percent in PERCENTS
            }
        phase["read_amplification"] = made.read_amplification
    return json.dumps({"version": VERSION, "config_hash": found.config_hash, **fields}, indent=1)


def decoded(text: str, name: str) -> Measurement:
    """The inverse. Raises UsageError, which names ``name``, for anything else."""
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise ValueError(f"its version is {fields['version']!r}")
        return Measurement(
            uri=str(fields["uri"]),
            created_s=float(fields["created_s"]),
            config=dict(fields["config"]),
            machine={key: str(value) for key, value in dict(fields["machine"]).items()},
            phases=tuple(map(_phase, fields["phases"])),
            limits={key: str(value) for key, value in dict(fields["limits"]).items()},
            invalid={key: tuple(map(str, why)) for key, why in dict(fields["invalid"]).items()},
            notes=tuple(map(str, fields.get("notes", ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} is no result of `holdfast bench` that this release can read: {error!r}"
        ) from error


def _phase(fields: Mapping[str, Any]) -> Phase:
    seconds = tuple(map(float, fields["seconds"]))
    if not seconds or min(seconds) <= 0:
        raise ValueError("a phase without a time")
    return Phase(
        name=str(fields["name"]),
        nbytes=int(fields["nbytes"]),
        seconds=seconds,
        cpu_s=tuple(map(float, fields["cpu_s"])),
        peak_nbytes=tuple(map(int, fields["peak_nbytes"])),
        retries=int(fields["retries"]),
        ranks_s=tuple(tuple(map(float, ranks)) for ranks in fields["ranks_s"]),
        stall_s=tuple(map(float, fields["stall_s"])),
        operations={str(name): _operations(of) for name, of in fields["operations"].items()},
    )


def _operations(fields: Mapping[str, Any]) -> Operations:
    return Operations(
        int(fields["count"]), int(fields["nbytes"]), tuple(map(int, fields["histogram"]))
    )
