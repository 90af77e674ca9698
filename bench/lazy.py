"""Measures how a save at every step affects training: how long it stalls, and how much its steps
slow down.

A step computes in one of the ways of :mod:`.training`; then an optimizer updates the fp32 weights
in place. Steps are longer than the copy of the state. Their length is calibrated once for all
contestants.

A stall is measured from outside: the call that starts the save, plus the time that an optimizer's
step waits before it begins. Each contestant runs in its own process. A save is durable before the
next one begins.

With a save at every step, the result depends on the length of a step: in every library, a step that
is shorter than a save waits for it. So steps have several lengths, in units of copies of the state,
and there are enough of them that the final wait hardly counts. These steps sleep: a polling core is
nothing to a training host, but half of a two-core machine.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import holdfast
from holdfast.storage.saver.client import SWITCH

from .program import Options, Program, each_alone
from .report import OURS, Report, Series, median_ratio
from .states import State, build, copy_s, digests
from .training import KINDS, Training

COPIES_A_STEP = 6
"""Length of a step, in units of a bare memcpy of the state. A copy alongside hashing and writing
takes longer than that."""
LENGTHS = (1, 2, COPIES_A_STEP)
"""Lengths of steps with a save at each."""
LEAST_STEPS = 6
CALIBRATED_GIB = 1.0
HEADER = [
    "",
    "stall, median ms",
    "stall, max ms",
    "step alone s",
    "step during save s",
    "longer",
    "s per step and save",
]


def _step_s(given: Options) -> float:
    """Return how long a step computes."""
    gib = min(given.gib, CALIBRATED_GIB)
    return COPIES_A_STEP * copy_s(build(gib)) * given.gib / gib


class _Clocks:
    """Clocks before and after the pre-step hooks of the saving library. Hooks run in order of
    registration, so the time between these two is a stall of training."""

    def __init__(self) -> None:
        self._came_s = 0.0
        self.waited_s = 0.0
        register_optimizer_step_pre_hook(self._come)

    def made_all(self) -> None:
        """Register the second clock, after all other hooks."""
        register_optimizer_step_pre_hook(self._go)

    def _come(self, *_: object) -> None:
        self._came_s = time.perf_counter()

    def _go(self, *_: object) -> None:
        self.waited_s = time.perf_counter() - self._came_s


class _DCP:
    """torch.distributed.checkpoint.async_save, one save at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saving: Any = None
        self._options: dict[str, Any] = {}

    def step(self, step: int, state: State) -> None:
        """Save, like :meth:`holdfast.Checkpointer.step`."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()
        with warnings.catch_warnings(action="ignore"):
            # Always the same place, so it keeps one checkpoint like the other.
            self._saving = async_save(state, checkpoint_id=self._folder / "saved", **self._options)

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self._saving is not None:
            getattr(self._saving, "upload_completion", self._saving).result()


class _DCPProcess(_DCP):
    """DCP with everything that it has against stalls: a separate process that writes, persistent
    memory shared with it (pinned with CUDA), and a thread that copies into it, for which the
    optimizer waits."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(folder)
        cuda = torch.cuda.is_available()
        staging = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=cuda,
        )
        self._options = {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": DefaultStager(staging),
        }
        register_optimizer_step_pre_hook(self._fence)

    def _fence(self, *_: object) -> None:
        if self._saving is not None:
            self._saving.staging_completion.result()


def _ours(folder: Path, **options: Any) -> holdfast.Checkpointer:
    """Return a Checkpointer with a save at every step, as a user would have it."""
    return holdfast.Checkpointer(
        folder, every=1, keep=1, when_busy="wait", on_error="raise", grace_s=None, **options
    )


def _by_threads(folder: Path) -> holdfast.Checkpointer:
    os.environ[SWITCH] = "off"
    return _ours(folder)


def _by_keeper(folder: Path) -> holdfast.Checkpointer:
    made = _ours(folder, keeper=holdfast.Keeper(linger="10s"))
    made.resume({})
    return made


CONTESTANTS: dict[str, Callable[[Path], Any]] = {
    OURS: _ours,
    f"{OURS}, threads": _by_threads,
    f"{OURS}, keeper": _by_keeper,
    "DCP": _DCP,
    "DCP, process": _DCPProcess,
}


def _measure(given: Options, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure in a worker: the stalls per save; steps without and during saves, by kind; rounds of
    a step and a save."""
    name: str = task["name"]
    folder = given.dir
    if name.startswith("DCP"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    state = build(given.gib)
    clocks = _Clocks()
    training = Training(state, task["step_s"])
    saver = CONTESTANTS[name](folder)
    clocks.made_all()
    for step in (1, 2):  # the first allocates memory and does not count
        saver.step(step, state)
        saver.wait()
    rounds = _Rounds(name, saver, training, clocks)
    found = [each for kind in _kinds(name) for each in rounds.beside(kind, state, given.runs)]
    steps = 1 if given.tiny else max(LEAST_STEPS, given.runs)
    found += [rounds.every_step(state, steps, copies) for copies in LENGTHS]
    if name.startswith("DCP"):
        dist.destroy_process_group()
    elif given.tiny and name == OURS:
        _check(folder, training, state)
    return [vars(series) for series in found]


class _Rounds:
    """Training with one saver."""

    def __init__(self, name: str, saver: Any, training: Training, clocks: _Clocks) -> None:
        self._name = name
        self._saver = saver
        self._training = training
        self._clocks = clocks
        self._step = 2

    def beside(self, kind: str, state: State, runs: int) -> list[Series]:
        """Return the stalls of saves of ``state``, and the seconds of steps alone and during saves.
        A first round does not count."""
        still = Series(f"{self._name}, still")
        plain = Series(f"{kind}, alone")
        beside = Series(f"{kind}, beside")
        for number in range(runs + 1):
            alone_s = self._training.step(kind)
            self._step += 1
            began_s = time.perf_counter()
            self._saver.step(self._step, state)
            called_s = time.perf_counter() - began_s
            beside_s = self._training.step(kind)
            if number:
                plain.seconds.append(alone_s)
                beside.seconds.append(beside_s)
                still.seconds.append(called_s + self._clocks.waited_s)
            self._saver.wait()
        return [still, plain, beside]

    def every_step(self, state: State, steps: int, copies: int) -> Series:
        """Return the seconds per step of training with a save at every step, including the end of
        the last save."""
        began_s = time.perf_counter()
        for _ in range(steps):
            self._training.step("asleep", copies / COPIES_A_STEP)
            self._step += 1
            self._saver.step(self._step, state)
        self._saver.wait()
        return Series(f"{self._name}, {_every(copies)}", [(time.perf_counter() - began_s) / steps])


def _check(folder: Path, training: Training, state: State) -> None:
    """Check that a save during training holds the state at the call, not after the next step."""
    expected = digests(state)
    handle = holdfast.async_save(folder / "checked", state, lazy="prove")
    training.step("accelerator")
    handle.wait()
    if digests(holdfast.load(folder / "checked")) != expected or digests(state) == expected:
        raise AssertionError("the save does not hold the state at the call")


def _table(found: dict[str, list[Series]]) -> list[list[str]]:
    rows = []
    for name, series in found.items():
        kinds = _kinds(name)
        for i, kind in enumerate(kinds):
            still, plain, beside = series[3 * i : 3 * i + 3]
            longer = median_ratio(beside.seconds, plain.seconds) - 1
            row = [
                f"{name}, computing {KINDS[kind]}",
                f"{1e3 * still.median:.1f}",
                f"{1e3 * max(still.seconds):.1f}",
                f"{plain.median:.3f}",
                f"{beside.median:.3f}",
                f"{100 * longer:+.1f} %",
                "–",
            ]
            rows.append(row)
        for at, copies in enumerate(LENGTHS, 3 * len(kinds)):
            rows.append([f"{name}, {_every(copies)}", *["–"] * 5, f"{series[at].median:.2f}"])
    return rows


def _kinds(name: str) -> list[str]:
    if name.startswith(OURS):
        return list(KINDS)
    return ["accelerator"]


def _every(copies: int) -> str:
    return f"a save every step of {copies} {'copy' if copies == 1 else 'copies'}"


def _report(given: Options, folder: Path) -> Report:
    found = each_alone(given, folder, CONTESTANTS, step_s=_step_s(given))
    return Report(
        f"Effect on training of saves of about {given.gib:g} GiB at every step, {given.runs} steps",
        HEADER,
        _table(found),
        series=[series for group in found.values() for series in group],
    )


main = Program("lazy", __doc__, _report, work=_measure)


if __name__ == "__main__":
    sys.exit(main())
