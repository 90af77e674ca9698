"""The rules of MLPerf Storage for checkpointing workloads, and the figures that it reports.

The rules belong to MLCommons (github.com/mlcommons/storage, ``Submission_guidelines.md``, 2.0 and
later). Here they are data: a run that departs from them is measured all the same, and reports how.
Scope: pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from ...core.units import size_text
from .mlperf import Mlperf

__all__ = ["RULES", "Checkpoints", "Conduct", "Rules", "deviations", "subset_note"]

_SUBSET = ("llama3-8b", 8)
"""The only checkpoint and number of processes that may run without the accelerators of the full
job."""


@dataclass(frozen=True)
class Rules:
    """Rules for every run. If a client has written less than ``cache_factor`` times its memory, its
    cache must be cleared between writes and reads."""

    writes: int = 10
    reads: int = 10
    rest_s: float = 5.0
    host_processes_min: int = 4
    cache_factor: int = 3


RULES = Rules()


@dataclass(frozen=True)
class Conduct:
    """Procedure of a run.

    ``host_processes``        processes of each host
    ``writes``, ``reads``     number of checkpoints
    ``writes_come_first``     whether all writes precede the first read
    ``rest_s``                seconds between two checkpoints
    ``is_synced``             whether each write ends with fsync or the storage's equivalent
    ``written_nbytes``        bytes that each host writes, over all checkpoints
    ``memory_nbytes``         memory of each host
    ``cache_is_cleared``      whether caches are cleared between writes and reads
    ``results_are_apart``     whether checkpoints and results are on different file systems; None
                              if unknown
    """

    host_processes: Sequence[int]
    writes: int
    reads: int
    writes_come_first: bool
    rest_s: float
    is_synced: bool
    written_nbytes: Sequence[int]
    memory_nbytes: Sequence[int]
    cache_is_cleared: bool
    results_are_apart: bool | None

    @property
    def world(self) -> int:
        """Number of all processes."""
        return sum(self.host_processes)


def deviations(definition: Mlperf, conduct: Conduct, rules: Rules = RULES) -> list[str]:
    """Return a sentence for each departure from the rules; [] if none is known."""
    return [
        *_in_processes(definition, conduct, rules),
        *_in_course(conduct, rules),
        *_in_caches(conduct, rules),
    ]


def subset_note(definition: Mlperf, world: int) -> str | None:
    """Return why a job of this many processes is not comparable, or None if it is."""
    if definition.is_whole(world) or (definition.name, world) == _SUBSET:
        return None
    return (
        f"{world:,} of {definition.world:,} processes save a part of {definition.name}: not "
        f"comparable with results of MLPerf Storage"
    )


def _in_processes(definition: Mlperf, conduct: Conduct, rules: Rules) -> Iterator[str]:
    subset = subset_note(definition, conduct.world)
    if subset is not None:
        yield subset
    fewest = min(conduct.host_processes)
    if fewest < rules.host_processes_min:
        yield (
            f"only {fewest} on a host, of {rules.host_processes_min} processes that the rules want "
            f"at least"
        )
    if len(set(conduct.host_processes)) > 1:
        yield "hosts have different numbers of processes"


def _in_course(conduct: Conduct, rules: Rules) -> Iterator[str]:
    if conduct.writes != rules.writes:
        yield f"{conduct.writes} checkpoints are written, not {rules.writes}"
    if conduct.reads != rules.reads:
        yield f"{conduct.reads} checkpoints are read, not {rules.reads}"
    if not conduct.writes_come_first:
        yield "checkpoints are read before all of them are written"
    if conduct.rest_s < rules.rest_s:
        yield f"{conduct.rest_s:g} s pass between checkpoints, not {rules.rest_s:g} s"
    if not conduct.is_synced:
        yield "writes do not end with fsync"


def _in_caches(conduct: Conduct, rules: Rules) -> Iterator[str]:
    pairs = zip(conduct.written_nbytes, conduct.memory_nbytes, strict=True)
    least = min(pairs, key=lambda pair: pair[0] / pair[1])
    written_nbytes, memory_nbytes = least
    if written_nbytes < rules.cache_factor * memory_nbytes and not conduct.cache_is_cleared:
        yield (
            f"a host with {size_text(memory_nbytes)} of memory writes {size_text(written_nbytes)}, "
            f"less than {rules.cache_factor} times as much, and its cache is not cleared before "
            f"reads"
        )
    if conduct.results_are_apart is False:
        yield "checkpoint and results are on one file system"


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of ``nbytes`` that were written or read, with the seconds of each rank."""

    nbytes: int
    rank_seconds: Sequence[Sequence[float]]

    @property
    def durations_s(self) -> list[float]:
        """Duration of each checkpoint: the time of its slowest rank."""
        return [max(ranks) for ranks in self.rank_seconds]

    @property
    def throughputs(self) -> list[float]:
        """Throughput of each checkpoint in bytes per second: its size by its duration, the least
        that any rank would report."""
        return [self.nbytes / seconds for seconds in self.durations_s]

    @property
    def mean_duration_s(self) -> float:
        """Arithmetic mean of the durations, as MLPerf Storage reports it."""
        return mean(self.durations_s)

    @property
    def arithmetic_mean_rate(self) -> float:
        """Arithmetic mean of the throughputs in bytes per second, as MLPerf Storage reports it.

        It is never below :attr:`rate`, and exceeds it more the more the checkpoints differ: by up
        to half in published results.
        """
        return mean(self.throughputs)

    @property
    def rate(self) -> float:
        """Bytes per second over all checkpoints."""
        return self.nbytes * len(self.durations_s) / sum(self.durations_s)
