"""Results of measurements, and their JSON (``docs/reference/bench.md``).

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
"""Phases of a client other than ours."""
WRITE_ALONE = "write alone"
READ_ALONE = "read alone"
"""Phases of our driver without the engine."""
FIO_WRITE = "fio write"
FIO_READ = "fio read"
"""Phases of fio, if requested."""
LIMITS = {
    "save": WRITE_LIMIT,
    "async save": WRITE_LIMIT,
    "overwrite": WRITE_LIMIT,
    "load": READ_LIMIT,
    "reshard": READ_LIMIT,
    "verify": READ_LIMIT,
}
"""The phases of checkpoints, and the limit of each."""
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
"""Phases of every measurement. "reshard" needs several ranks."""
PERCENTS = (50, 90, 99)
"""Quantiles of latencies to report."""
BY_ONE_RANK = ("verify", "prune", "delete")
"""Phases that rank 0 runs for all."""
DELETING = ("prune", "delete")
"""Phases that move no bytes and run once. They have times only."""
_GETS = ("read", "get", "stat")
_OF_OTHERS = {
    WRITE_ALONE: WRITE_LIMIT,
    READ_ALONE: READ_LIMIT,
    FIO_WRITE: WRITE_LIMIT,
    FIO_READ: READ_LIMIT,
}


def limit_of_phase(name: str) -> str | None:
    """Return the limit of a phase, which may be a peer's, such as "save: DCP", fio's or our
    driver's; None if it has none."""
    verb = name.partition(": ")[0]
    return LIMITS.get(verb) or _OF_OTHERS.get(name)


@dataclass(frozen=True)
class Phase:
    """One phase, in which all ranks together move ``nbytes`` per round.

    Tuples have an entry per round, in order:

    - ``seconds``: until the last rank was done
    - ``ranks_s``: until each rank was done
    - ``cpu_s``: processor time of all ranks
    - ``peak_nbytes``: growth of memory, on the rank where it grew most
    - ``stall_s``: stall of training, on the rank where it was longest

    ``operations`` counts the storage operations of all rounds.
    """

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
        """Median over rounds of the time of the first rank to finish, among those that took
        part."""
        if self.name in BY_ONE_RANK:
            return self.median_s
        return median(min(ranks) for ranks in self.ranks_s or [(s,) for s in self.seconds])

    @property
    def data_operations(self) -> Operations | None:
        """The operations that moved most of the bytes: writes of parts, or reads of ranges."""
        moved = (self.operations.get("write"), self.operations.get("read"))
        return max(filter(None, moved), key=lambda operations: operations.nbytes, default=None)

    @property
    def requests(self) -> Requests:
        """Requests of all rounds, as stores charge for them: lists count as puts, deletes are
        free."""

        def count(*names: str) -> int:
            return sum(self.operations[name].count for name in names if name in self.operations)

        return Requests(count("put", "create", "write", "commit", "list"), count(*_GETS))

    @property
    def read_amplification(self) -> float | None:
        """Bytes read for each byte wanted; None if nothing was read."""
        read = self.operations.get("read")
        if read is None:
            return None
        return read.nbytes / (self.nbytes * len(self.seconds))

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes per second over all rounds."""
        return self.nbytes * len(self.seconds) / sum(self.seconds)

    @property
    def mean_rate(self) -> float:
        """Arithmetic mean of the rounds' rates, as MLPerf Storage reports it. It is never below
        :attr:`rate`, and exceeds it more the more the rounds differ."""
        return mean(self.nbytes / seconds for seconds in self.seconds)

    @property
    def cpu_s_per_gib(self) -> float | None:
        """Processor time of all ranks per GiB; None if it was not measured."""
        if not self.cpu_s:
            return None
        return median(self.cpu_s) / (self.nbytes / (1 << 30))


@dataclass(frozen=True)
class Measurement:
    """Result of a measurement.

    - ``uri``: without secrets
    - ``created_s``: its start, in seconds since the epoch
    - ``config``: the settings; ``machine``: properties of the host
    - ``limits``: by phase of a limit, such as "write limit": the client that measured it, with its
      settings
    - ``invalid``: by phase, or under ``""`` for all: reasons why its figures are invalid
    - ``notes``: departures from the rules of MLPerf Storage, so its results are not comparable
    """

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
        """The phases by name."""
        return {phase.name: phase for phase in self.phases}

    @property
    def config_hash(self) -> str:
        """Hash of the URI and settings. Results are comparable if it is equal."""
        text = json.dumps([self.uri, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def cost_usd(self, phase: Phase) -> float | None:
        """Return the cost of a round's requests; None if no prices are given, or requests were not
        counted."""
        prices = self.config.get("prices")
        if prices is None or not phase.operations:
            return None
        return Prices(**prices).cost_usd(phase.requests) / len(phase.seconds)

    def share(self, name: str) -> float | None:
        """Return the rate of a phase as a share of its limit: the median of the ratios within each
        round. None if it has no limit, or that was not measured."""
        limit = self.by_name.get(limit_of_phase(name) or "")
        if limit is None:
            return None
        phase = self.by_name[name]
        return median_ratio(limit.seconds, phase.seconds) * phase.nbytes / limit.nbytes


def encoded(found: Measurement) -> str:
    """Return a result as JSON."""
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
    """Decode the JSON of :func:`encoded`. Raises UsageError, which names ``name``, for anything
    else."""
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
            f"{name} is not a result of `holdfast bench` that this release can read: {error!r}"
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
