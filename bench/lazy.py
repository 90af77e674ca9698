"""How much training notices of a save at every step: how long it stands still, and how much slower its steps are.

A step computes, and then an optimizer updates the fp32 weights in place. It computes as an accelerator would have it, with
an idle host that looks at a queue every millisecond; or on the host itself, on all cores. Steps are longer than the copy of
the state. Standing still is measured from outside: the call that begins the save, and the optimizer's step beyond what it
takes without one. Each contestant runs in a process of its own; a save is durable before the next one begins.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast

from .limits import Memcpy
from .machine import describe
from .options import Options, work_folder
from .report import Report, Series, Target
from .states import State, build, digests
from .workers import each_alone

__all__: list[str] = []

COPIES_A_STEP = 6
"""How much longer a step computes than a bare memcpy of the state: copying beside hashing and writing takes longer."""
KINDS = ("accelerator", "host")


class _Training:
    """Steps on a state: ``compute`` for a while, then the optimizer."""

    def __init__(self, state: State, compute_s: float) -> None:
        weights = [p["master"] for p in state["optim"].values()]
        self._parameters = [torch.nn.Parameter(w) for w in weights]
        for parameter in self._parameters:
            parameter.grad = torch.full((1,), 1e-3).expand(parameter.shape)
        self._optim = torch.optim.SGD(self._parameters, lr=1e-3, foreach=False)
        self._compute_s = compute_s
        self._a = torch.randn(512, 512)
        self._products = max(1, int(compute_s / self._product_s()))
        self.optimizer_s: list[float] = []

    def _product_s(self) -> float:
        began_s = time.perf_counter()
        for _ in range(20):
            torch.mm(self._a, self._a)
        return (time.perf_counter() - began_s) / 20

    def step(self, kind: str) -> float:
        """Seconds of one step."""
        began_s = time.perf_counter()
        if kind == "host":
            for _ in range(self._products):
                torch.mm(self._a, self._a)
        else:
            while time.perf_counter() - began_s < self._compute_s:
                time.sleep(0.001)
        computed_s = time.perf_counter()
        self._optim.step()
        self.optimizer_s.append(time.perf_counter() - computed_s)
        return time.perf_counter() - began_s


class _Holdfast:
    """A Checkpointer, as a user has it, with a save at every step."""

    def __init__(self, folder: Path) -> None:
        self._ckpt = holdfast.Checkpointer(folder, every=1, keep=1, when_busy="wait", on_error="raise", grace_s=None)

    def save(self, step: int, state: State) -> None:
        self._ckpt.step(step, state)

    def wait(self) -> None:
        self._ckpt.wait()


class _DCP:
    """torch.distributed.checkpoint.async_save; one save at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saving: Any = None

    def save(self, step: int, state: State) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()
        with warnings.catch_warnings(action="ignore"):  # always the same place: it keeps one, as the other does
            self._saving = async_save(state, checkpoint_id=self._folder / "saved")

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()


CONTESTANTS: dict[str, Callable[[Path], Any]] = {"holdfast": _Holdfast, "DCP": _DCP}


def _measure(name: str, given: Options) -> list[dict[str, Any]]:
    """In a worker: seconds standing still per save; of steps without and with a save beside them, by kind; and of whole
    rounds of a step and a save."""
    found = []
    with work_folder(given.folder) as folder:
        if name == "DCP":
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        state = build(given.gib)
        training = _Training(state, COPIES_A_STEP * Memcpy(state).best_s())
        saver, step = CONTESTANTS[name](folder), 1
        saver.save(step, state)  # the first finds memory, and is not counted
        saver.wait()
        for kind in KINDS if name == "holdfast" else KINDS[:1]:
            still, plain, beside = Series(f"{name}, still"), Series(f"{kind}, alone"), Series(f"{kind}, {name} beside")
            for _ in range(given.runs):
                plain.seconds.append(training.step(kind))
                alone_s = training.optimizer_s[-1]
                step += 1
                began_s = time.perf_counter()
                saver.save(step, state)
                called_s = time.perf_counter() - began_s
                beside.seconds.append(training.step(kind))
                still.seconds.append(called_s + max(0.0, training.optimizer_s[-1] - alone_s))
                saver.wait()
            found += [still, plain, beside]
        found.append(_every_step(name, saver, training, state, step, given.runs))
        if given.tiny and name == "holdfast":
            _check(folder, training, state)
    return [vars(series) for series in found]


def _every_step(name: str, saver: Any, training: _Training, state: State, step: int, runs: int) -> Series:
    """Seconds per step of training with a save at every step, from the first to the last byte."""
    began_s = time.perf_counter()
    for more in range(1, runs + 1):
        training.step("accelerator")
        saver.save(step + more, state)
    saver.wait()
    return Series(f"{name}, a save every step", [(time.perf_counter() - began_s) / runs])


def _check(folder: Path, training: _Training, state: State) -> None:
    """What is saved beside training is the state of the call, not of the step after it."""
    expected = digests(state)
    handle = holdfast.async_save(folder / "checked", state, lazy="prove")
    training.step("accelerator")
    handle.wait()
    if digests(holdfast.load(folder / "checked")) != expected or digests(state) == expected:
        raise AssertionError("what was saved is not what the state was at the call")


def _table(found: dict[str, list[Series]]) -> list[list[str]]:
    rows = []
    for name, series in found.items():
        for i, kind in enumerate(KINDS[: (len(series) - 1) // 3]):
            still, plain, beside = series[3 * i : 3 * i + 3]
            still_ms = [f"{1e3 * x:.1f}" for x in (still.median, max(still.seconds))]
            steps = [f"{plain.median:.3f}", f"{beside.median:.3f}", f"{100 * _inflation(plain, beside):+.1f} %"]
            rows.append([f"{name}, computing on the {kind}", *still_ms, *steps, "–"])
        rows.append([f"{name}, a save every step", *["–"] * 5, f"{series[-1].median:.2f}"])
    return rows


def _inflation(plain: Series, beside: Series) -> float:
    """How much longer a step is while a save is under way: the median over pairs of steps, one right after the other."""
    return statistics.median(b / a for a, b in zip(plain.seconds, beside.seconds, strict=True)) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    return each_alone("lazy", __doc__, list(CONTESTANTS), _measure, _report, argv)


def _report(found: dict[str, list[Series]], given: Options, folder: Path) -> Report:
    ours = found["holdfast"]
    targets = [
        Target("standing still per save, ms", 1e3 * ours[0].median, 5.0, at_least=False),
        Target("longer steps beside a save, %, accelerator", 100 * _inflation(ours[1], ours[2]), 3.0, at_least=False),
    ]
    if "DCP" in found:
        times = found["DCP"][-1].median / ours[-1].median
        targets.append(Target("a save every step, faster than DCP by", times, 2.0, at_least=True))
    return Report(
        "lazy",
        f"What training notices of saves of about {given.gib:g} GiB at every step, {given.runs} steps",
        describe(folder),
        ["", "still, median ms", "still, max ms", "step alone s", "step beside s", "longer", "s per step and save"],
        _table(found),
        [] if given.tiny else targets,
        series=[series for group in found.values() for series in group],
    )


if __name__ == "__main__":
    sys.exit(main())
