"""Measures training steps that are each kept in memory and protected by other hosts, next to plain
steps.

Three ranks stand for three hosts. Each has its own keeper, and the keepers protect each other's
images by XOR. A step computes as on an accelerator, while the host sleeps; then the ranks meet, as
for gradients, and an optimizer updates the fp32 weights in place. The state is in host memory here,
so each call arms its pages; a state on a device would not need that.

All hosts share this machine's processors. The program counts the steps that are protected before
the next one begins: if a step is too short for its bytes, some are not.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

from ..core.decoded_json import int_in, object_in
from ..storage.arenas.client import status_of
from ..storage.arenas.folder import keeper_folders
from .keeper import own_keepers
from .program import GIB, Options, Program, joined, launched
from .report import Report, Series
from .states import State, build, nbytes_of
from .training import Training

HOSTS = 3
STEP_S = 0.5
TINY_STEP_S = 0.05
STEPS = 5
"""Steps of each kind in a round."""
WARM_UP_STEPS = 8
"""Steps after which all slots and the memory for parity exist."""
KEPT_S = 30.0
SETTLED_S = 300.0
SHARED_GIB = 1.0
"""Ranks hold some rows of a state of this size: few tensors, as in a large model."""
ALONE = "alone"
KEPT = "kept and protected"


class _Steps:
    """The work of one rank."""

    def __init__(self, given: Options, rank: int) -> None:
        share = build(SHARED_GIB, seed=rank, share=round(SHARED_GIB * HOSTS / given.gib))
        self.nbytes = nbytes_of(share)
        self._training = Training(share, TINY_STEP_S if given.tiny else STEP_S)
        self._state = _split_evenly(share, init_device_mesh("cpu", (HOSTS,)))
        keeper = holdfast.Keeper(
            every=1,
            serve=f"127.0.0.{rank + 2}",
            domain=f"host {rank}",
            protect="xor",
            group=HOSTS,
            linger="2min",
            deadline_s=KEPT_S,
        )
        self._run = holdfast.Checkpointer(given.dir / "run", keeper=keeper, grace_s=None)
        self._number = 0

    def step_s(self, *, kept: bool) -> float:
        """Take a step and return its seconds, including any wait for the keeper if it is kept."""
        began_s = time.perf_counter()
        if kept:
            self._keep()
        self._training.compute("asleep")
        dist.barrier()
        self._training.update()
        return time.perf_counter() - began_s

    def _keep(self) -> holdfast.SaveHandle | None:
        self._number += 1
        return self._run.step(self._number, self._state)

    def settle(self) -> None:
        """Keep steps until one is protected on all ranks. The first ones are skipped, because their
        memory is not ready."""
        until_s = time.monotonic() + SETTLED_S
        while not _everywhere(self._is_settled()):
            if time.monotonic() > until_s:
                raise AssertionError(f"no step is protected: {self._run.counters}")

    def _is_settled(self) -> bool:
        handle = self._keep()
        if handle is None:
            return False
        try:
            handle.agreed.wait(KEPT_S)
            handle.protected.wait(KEPT_S)
        except (holdfast.SaveError, holdfast.DeadlineError):
            return False
        return True

    @property
    def protected(self) -> int:
        """Number of protected steps so far."""
        (folder,) = keeper_folders()
        status = status_of(folder)
        assert status is not None
        return int_in(object_in(status["counters"], "counters")["protected"], "protected")

    @property
    def not_kept(self) -> int:
        """Number of skipped steps so far."""
        return self._run.counters.not_kept

    def close(self) -> None:
        """Disconnect from the keeper."""
        self._run.close()


def _split_evenly(share: State, mesh: DeviceMesh) -> State:
    """Return a state in which each rank's ``share`` is its rows of a larger one."""
    parts: State = {}
    for key, value in share.items():
        if isinstance(value, dict):
            parts[key] = _split_evenly(value, mesh)
        elif isinstance(value, torch.Tensor):
            parts[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
        else:
            parts[key] = value
    return parts


def _everywhere(here: bool) -> bool:
    told = torch.tensor(int(here))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _measure(given: Options, task: object) -> dict[str, Any]:
    """Measure in a worker. Return the seconds of steps by kind, and the numbers of skipped and
    protected steps."""
    with joined() as (rank, _), own_keepers(), closing(_Steps(given, rank)) as steps:
        for _ in range(WARM_UP_STEPS):
            steps.settle()
        return _rounds(steps, given)


def _rounds(steps: _Steps, given: Options) -> dict[str, Any]:
    found: dict[str, list[float]] = {ALONE: [], KEPT: []}
    protected = left_out = 0
    for _ in range(given.runs):
        found[ALONE] += [steps.step_s(kept=False) for _ in range(STEPS)]
        protected_before = steps.protected
        left_out_before = steps.not_kept
        found[KEPT] += [steps.step_s(kept=True) for _ in range(STEPS)]
        left_out += steps.not_kept - left_out_before
        steps.step_s(kept=False)  # the last kept step is protected during this one
        protected += steps.protected - protected_before
        steps.settle()
    return {"seconds": found, "nbytes": steps.nbytes, "protected": protected, "left_out": left_out}


def _longer_percent(alone: Series, kept: Series) -> float:
    """Return how much longer kept steps take: the median over rounds of the ratio of medians."""
    ratios = [
        statistics.median(kept.seconds[at : at + STEPS])
        / statistics.median(alone.seconds[at : at + STEPS])
        for at in range(0, len(alone.seconds), STEPS)
    ]
    return 100.0 * (statistics.median(ratios) - 1)


def _report(given: Options, folder: Path) -> Report:
    told = launched(given, folder, world=HOSTS)
    found = []
    for name in (ALONE, KEPT):
        of_ranks = [rank["seconds"][name] for rank in told]
        found.append(Series(name, list(map(max, zip(*of_ranks, strict=True)))))
    alone, kept = found
    longer = _longer_percent(alone, kept)
    count = len(kept.seconds)
    protected = min(of["protected"] for of in told)
    left_out = max(of["left_out"] for of in told)
    return Report(
        f"Steps on {HOSTS} hosts, {told[0]['nbytes'] / GIB:.3f} GiB each, {given.runs} rounds of "
        f"{STEPS} steps",
        ["", "median s", "min s", "max s", "longer by"],
        [
            [
                series.name,
                *(f"{x:.3f}" for x in (series.median, min(series.seconds), max(series.seconds))),
                "–" if series is alone else f"{longer:+.1f} %",
            ]
            for series in found
        ],
        notes=[f"of {count} steps, {left_out} were not kept, and {protected} were protected"],
        series=found,
    )


main = Program("kept_steps", __doc__, _report, gib=0.2, work=_measure)


if __name__ == "__main__":
    sys.exit(main())
