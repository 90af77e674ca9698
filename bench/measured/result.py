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

__all__ = ["LIMITS", "PHASES", "Measurement", "Phase", "decoded", "encoded"]

VERSION = 1
LIMITS = {
    "save": "write alone",
    "overwrite": "write alone",
    "load": "read alone",
    "verify": "read alone",
}
"""The phases of checkpoints, and what each is held against."""
PHASES = ("write alone", "save", "overwrite", "read alone", "load", "verify", "delete")


@dataclass(frozen=True)
class Phase:
    """One phase, of ``nbytes`` each time. ``seconds``: of each round, in order. ``cpu_s``:
    processor time of this process; ``peak_nbytes``: how far its memory rose, both by round."""

    name: str
    nbytes: int
    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...] = ()
    peak_nbytes: tuple[int, ...] = ()
    retries: int = 0

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
    ``invalid``: why the figures are not to be believed, by phase, or of all under ``""``.
    ``notes``: what they are not to be compared with, and why."""

    uri: str
    created_s: float
    config: Mapping[str, Any]
    machine: Mapping[str, str]
    phases: tuple[Phase, ...]
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

    def share(self, name: str) -> float | None:
        """The rate of a phase, as a share of that of its limit: the median of the ratios within
        each round. None where it has no limit, or that was not measured."""
        limit = self.by_name.get(LIMITS.get(name, ""))
        if limit is None:
            return None
        phase = self.by_name[name]
        pairs = zip(limit.seconds, phase.seconds, strict=False)
        return median(of / took for of, took in pairs) * phase.nbytes / limit.nbytes


def encoded(found: Measurement) -> str:
    """As JSON."""
    fields = asdict(found)
    for phase, made in zip(fields["phases"], found.phases, strict=True):
        phase["rate"] = made.rate
        phase["mean_rate"] = made.mean_rate
        phase["share"] = found.share(made.name)
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
    )
