"""Results of measurements: their JSON (``docs/reference/bench.md``), their validity, and
comparisons.

Scope: pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np

from ...core.histogram import BUCKETS, bucket_of, quantile_s
from ...errors import UsageError
from ..report import median_ratio, of_medians

VERSION = 1
WRITE_LIMIT = "write limit"
READ_LIMIT = "read limit"
"""Phases of a client other than ours."""
WRITE_ALONE = "write alone"
READ_ALONE = "read alone"
"""Phases of our driver without the engine."""
LIMITS = {
    "save": WRITE_LIMIT,
    "async save": WRITE_LIMIT,
    "overwrite": WRITE_LIMIT,
    "incremental save": WRITE_LIMIT,
    "load": READ_LIMIT,
    "reshard": READ_LIMIT,
    "verify": READ_LIMIT,
}
"""The phases of checkpoints, and the limit of each."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
"""Quantiles of latencies to report."""
BY_ONE_RANK = ("verify", "prune", "delete")
"""Phases that rank 0 runs for all."""
DELETING = ("prune", "delete")
"""Phases that move no bytes and run once. They have times only."""
LEAST_S = 0.1
"""Shortest valid round. Shorter ones measure overhead, not the storage."""
SPREAD = 1.5
"""Greatest valid ratio of the longest round to the shortest."""
DRIFT = 1.25
"""Greatest valid ratio between the two halves of the rounds."""
BUSY = 0.2
"""Greatest valid share of busy processors before the measurement."""
COLD = 0.9
"""Smallest valid share of a load's bytes that come from the device."""
_OF_OTHERS = {
    WRITE_ALONE: WRITE_LIMIT,
    READ_ALONE: READ_LIMIT,
}


def limit_of_phase(name: str) -> str | None:
    """Return the limit of a phase, which may be a peer's, such as "save: DCP", or our driver's;
    None if it has none."""
    verb = name.partition(": ")[0]
    return LIMITS.get(verb) or _OF_OTHERS.get(name)


@dataclass(frozen=True)
class Operations:
    """Storage operations of one kind over all ranks and rounds, such as writes of parts.

    ``histogram[i]`` counts operations of up to ``2**i`` units of 2⁻²⁰ s, about a microsecond.
    ``exact_s`` has the :data:`QUANTILES` if every operation was timed.
    """

    count: int
    nbytes: int
    histogram: tuple[int, ...]
    exact_s: tuple[float, ...] = ()

    @property
    def quantiles_s(self) -> dict[str, float]:
        """Latencies by name of the quantile. Unless they are exact, they are ends of buckets, so
        too high by up to a factor of 2."""
        found = self.exact_s or [quantile_s(self.histogram, part) for part in QUANTILES.values()]
        return dict(zip(QUANTILES, found, strict=True))

    def plus(self, other: Operations, sign: int = 1) -> Operations:
        """Return the sum of both, or with a ``sign`` of -1 the difference."""
        pairs = zip(self.histogram, other.histogram, strict=True)
        histogram = tuple(mine + sign * its for mine, its in pairs)
        return Operations(
            self.count + sign * other.count, self.nbytes + sign * other.nbytes, histogram
        )


NOTHING = Operations(0, 0, (0,) * BUCKETS)


def timed_operations(seconds: Sequence[float], nbytes: int) -> Operations:
    """Return operations that took these times and moved ``nbytes`` together. Quantiles are
    nearest-rank: each is the latency of some operation."""
    histogram = np.bincount([bucket_of(each) for each in seconds], minlength=BUCKETS)
    exact_s = np.quantile(seconds, list(QUANTILES.values()), method="inverted_cdf")
    return Operations(len(seconds), nbytes, tuple(histogram.tolist()), tuple(exact_s.tolist()))


@dataclass(frozen=True)
class Phase:
    """One phase: all ranks together move ``nbytes`` per round.

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
        found = [self.operations[name] for name in ("write", "read") if name in self.operations]
        return max(found, key=lambda operations: operations.nbytes, default=None)

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
        for name, operations in made.operations.items():
            quantiles_s = operations.quantiles_s.items()
            phase["operations"][name] |= {f"{which}_s": found_s for which, found_s in quantiles_s}
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
        operations=operations_of(fields["operations"]),
    )


def operations_of(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Operations]:
    """Decode operations by name from JSON."""
    return {
        str(name): Operations(
            int(of["count"]),
            int(of["nbytes"]),
            tuple(map(int, of["histogram"])),
            tuple(map(float, of.get("exact_s", ()))),
        )
        for name, of in fields.items()
    }


def reasons_against(
    phases: Sequence[Phase],
    *,
    busy_before: float,
    cold_shares: Mapping[str, float],
) -> dict[str, tuple[str, ...]]:
    """Return the reasons why figures are invalid, by phase, or under ``""`` for all.

    ``busy_before`` is the share of processors that were busy before the measurement.
    ``cold_shares`` maps reading phases to the smallest share that came from the device in a round,
    where that is known.
    """
    found = {
        phase.name: tuple(_reasons_against_phase(phase))
        for phase in phases
        if phase.name not in DELETING
    }
    for name, share in cold_shares.items():
        if share < COLD:
            found[name] = (*found[name], f"{1 - share:.0%} of it came from a cache")
    if busy_before > BUSY:
        found[""] = (f"{busy_before:.0%} of the processors were busy before it began",)
    return {name: reasons for name, reasons in found.items() if reasons}


def _reasons_against_phase(phase: Phase) -> Iterator[str]:
    seconds = phase.seconds
    if phase.median_s < LEAST_S:
        yield f"shorter than {LEAST_S:g} s, which is too short; give a larger --size"
    if len(seconds) < 3:
        yield f"only {len(seconds)} rounds"
        return
    if max(seconds) > SPREAD * min(seconds):
        yield f"rounds took from {min(seconds):.2f} to {max(seconds):.2f} s"
    half = len(seconds) // 2
    first, last = median(seconds[:half]), median(seconds[-half:])
    if max(first, last) > DRIFT * min(first, last) and len(seconds) >= 4:
        yield f"times drift: {first:.2f} s in the first half, {last:.2f} s in the second"


def joined(*found: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Join the reasons of several checks, by phase."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: tuple(why for each in found for why in each.get(name, ())) for name in names}


@dataclass(frozen=True)
class Compared:
    """One phase of two results.

    ``ratio`` is how many times as fast B is as A, by medians. ``low`` and ``high`` bound its 95 %
    confidence interval.
    """

    name: str
    a: Phase
    b: Phase
    ratio: float
    low: float
    high: float

    def is_slower(self, part: float) -> bool:
        """Return whether B is slower by more than ``part``, with confidence."""
        return self.high < 1 - part

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        if self.low > 1:
            return "faster"
        if self.high < 1:
            return "slower"
        return "no difference shown"


def compare(a: Measurement, b: Measurement) -> list[Compared]:
    """Compare the phases that both results have, in the order of ``a``. Resampling is seeded, so
    the same files give the same figures."""
    found = []
    for phase in a.phases:
        other = b.by_name.get(phase.name)
        if other is not None:
            times = of_medians(phase.seconds, other.seconds)
            larger = other.nbytes / phase.nbytes
            found.append(Compared(phase.name, phase, other, *(larger * each for each in times)))
    return found
