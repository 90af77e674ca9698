"""The checkpoints of MLPerf Storage: models, parallelism, the tensors that each process writes, and
the rules for runs.

Sizes are those that DLIO computes, the program that runs MLPerf Storage
(github.com/argonne-lcf/dlio_benchmark, ``base_checkpointing.py``): fp16 weights, three fp32
optimizer arrays, and flat arrays throughout. Published results state its totals; the table in the
rules rounds them, and gives 18 TB for a checkpoint of 15,427 GiB. The rules belong to MLCommons
(github.com/mlcommons/storage, ``Submission_guidelines.md``, 2.0 and later). A run that departs from
them is measured all the same, and reports how. Scope: pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import UsageError
from .changes import CHANGES
from .llama3 import LLAMA3, Llama
from .spec import Spec, Workload, check_rank

ROUNDS = 10
"""Checkpoints that the rules want written, and then read."""
REST_S = 5.0
"""Seconds that they want between two checkpoints."""
HOST_PROCESSES_MIN = 4
_SUBSET = ("llama3-8b", 8)
"""The only checkpoint and number of processes that may run without the accelerators of the full
job."""
_WEIGHT = "float16"
_OPTIMIZER = "float32"
_OPTIMIZER_ARRAYS = 3
_EXTRA_HIDDEN = 5
"""With each optimizer array DLIO writes another one of this many times the hidden size."""


@dataclass(frozen=True)
class Mlperf(Workload):
    """One checkpoint of MLPerf Storage, saved by ``tp`` × ``pp`` × ``dp`` processes.

    ``zero`` is the ZeRO stage. In stage 1 only data-parallel rank 0 writes the model. In stage 3
    the model is split over the data-parallel ranks as well. The optimizer is always split evenly
    over all processes.
    """

    name: str
    model: Llama
    tp: int
    pp: int
    dp: int
    zero: int

    @property
    def world(self) -> int:
        """Number of processes that save a whole checkpoint."""
        return self.tp * self.pp * self.dp

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`.spec.Workload`. The ranks of a smaller job hold the same as the first ranks
        of the full one. Raises UsageError for more processes than the full job has."""
        check_rank(rank, world)
        if world > self.world:
            raise UsageError(
                f"{self.name} of MLPerf Storage has {self.world:,} processes, not {world:,}",
                advice=f"Run it with {self.world:,}, or with fewer, as a subset.",
            )
        return [*self.model_specs(rank), *self.optimizer_specs(rank)]

    def model_specs(self, rank: int) -> list[Spec]:
        """Return the part of the model that ``rank`` of the full job writes."""
        writes_model = self.zero == 3 or rank < self.tp * self.pp
        if not writes_model:
            return []
        return [
            Spec(f"model.rank_{rank:05}.layer_{layer}.{part}", (elements,), _WEIGHT, False)
            for layer in self._layers(rank // self.tp % self.pp)
            for part, elements in self._parts(layer)
            if elements
        ]

    def optimizer_specs(self, rank: int) -> list[Spec]:
        """Return the part of the optimizer that ``rank`` of the full job writes."""
        lengths = [self.model.parameters // self.world, _EXTRA_HIDDEN * self.model.hidden]
        return [
            Spec(f"optimizer.rank_{rank:05}.{number}", (elements,), _OPTIMIZER, False)
            for number, elements in enumerate(lengths * _OPTIMIZER_ARRAYS)
        ]

    def _layers(self, stage: int) -> range:
        """Return the layers of a pipeline stage in DLIO's numbering: 0 is the embedding; the
        layers, the output and the last norm follow. If stages do not divide the layers evenly, the
        first stages have one more."""
        few, more = divmod(self.model.layers, self.pp)
        first = 1 + few * stage + min(stage, more)
        last = first + few + (stage < more)
        if stage == 0:
            first = 0
        if stage == self.pp - 1:
            last += 2
        return range(first, last)

    def _parts(self, layer: int) -> Iterator[tuple[str, int]]:
        """Yield the flat arrays of one layer, with the elements that a process has of each. Each
        tensor-parallel rank has the norms."""
        model = self.model
        split = self.dp if self.zero == 3 else 1
        if layer == 0:
            yield "embedding", model.hidden * model.vocab // self.tp // split
        elif layer == model.layers + 1:
            yield "output", model.hidden * model.vocab // self.tp // split
        elif layer == model.layers + 2:
            yield "norm", model.hidden // split
        else:
            yield "input_norm", model.hidden // split
            yield "qkv", model.hidden * (model.hidden + 2 * model.kv) // self.tp // split
            yield "dense", model.hidden * model.hidden // self.tp // split
            yield "layer_norm", model.hidden // split
            yield "h_to_4h", model.hidden * 2 * model.ffn // self.tp // split
            yield "4h_to_h", model.hidden * model.ffn // self.tp // split


_OF_70B = replace(LLAMA3["llama3-70b"], kv=8 * (8192 // 128))
"""The benchmark has 128 heads where the published model has 64, so keys are half as wide."""
_OF_1T = Llama(layers=128, hidden=25872, ffn=98304, kv=32 * (25872 // 192), vocab=128256)

MLPERF = {
    each.name: each
    for each in (
        Mlperf("llama3-8b", LLAMA3["llama3-8b"], tp=1, pp=1, dp=8, zero=3),
        Mlperf("llama3-70b", _OF_70B, tp=8, pp=1, dp=8, zero=3),
        Mlperf("llama3-405b", LLAMA3["llama3-405b"], tp=8, pp=32, dp=2, zero=1),
        Mlperf("llama3-1t", _OF_1T, tp=8, pp=64, dp=2, zero=1),
    )
}
"""Checkpoints by command-line name."""


def mlperf(name: str) -> Mlperf:
    """Return the checkpoint of that name. Raises UsageError for an unknown name."""
    try:
        return MLPERF[name]
    except KeyError:
        raise UsageError(
            f"--workload {name!r} is not known",
            advice=f"Give one of {', '.join([*MLPERF, *CHANGES])}, or raw.",
        ) from None


def deviations(
    definition: Mlperf, host_processes: Sequence[int], rounds: int, rest_s: float
) -> Iterator[str]:
    """Yield a sentence for each departure from the rules, of a run with so many processes on each
    host.

    The rules that always hold here are omitted: saves are durable on return, all writes precede the
    first read, and reads of a local file system follow a drop of its cached pages.
    """
    subset = subset_note(definition, sum(host_processes))
    if subset is not None:
        yield subset
    fewest = min(host_processes)
    if fewest < HOST_PROCESSES_MIN:
        yield (
            f"only {fewest} on a host, of {HOST_PROCESSES_MIN} processes that the rules want at "
            f"least"
        )
    if len(set(host_processes)) > 1:
        yield "hosts have different numbers of processes"
    if rounds != ROUNDS:
        yield f"{rounds} checkpoints are written and read, not {ROUNDS}"
    if rest_s < REST_S:
        yield f"{rest_s:g} s pass between checkpoints, not {REST_S:g} s"


def subset_note(definition: Mlperf, world: int) -> str | None:
    """Return why a job of this many processes is not comparable, or None if it is."""
    if world == definition.world or (definition.name, world) == _SUBSET:
        return None
    return (
        f"{world:,} of {definition.world:,} processes save a part of {definition.name}: not "
        f"comparable with results of MLPerf Storage"
    )
