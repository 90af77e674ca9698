"""Training steps for measurements: each computes for some time, and then changes the state.

A step can compute as on an accelerator: the host queues kernels ahead of a device that processes
them one by one, and waits for the last one. By default it waits as CUDA does, with one core that
polls without the GIL; or it sleeps, which leaves the core and its caches to other processes. A step
can also compute on the host: on all cores, or in Python, which shows how long others hold the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from .states import State

KERNEL_S = 100e-6
QUEUE_S = 0.1
"""Time that the host may be ahead of the device: CUDA's queue holds about a thousand kernels."""
KINDS = {
    "accelerator": "on an accelerator",
    "asleep": "on an accelerator, waiting asleep",
    "host": "on the host",
    "Python": "in Python",
}
LOOPS = 10_000
LOOK_NUMBERS = 16_384
"""Numbers to compute between two looks at the device: about 20 µs on one thread, without the
GIL."""


class Training:
    """Steps on ``state``, which :func:`.states.build` made: ``step_s`` seconds of work, then the
    optimizer."""

    def __init__(self, state: State, step_s: float) -> None:
        self.parameters = {
            name: torch.nn.Parameter(p["master"]) for name, p in state["optim"].items()
        }
        for parameter in self.parameters.values():
            parameter.grad = torch.full((1,), 1e-3).expand(parameter.shape)
        self._optim = torch.optim.SGD(self.parameters.values(), lr=1e-3, foreach=False)
        self._a = torch.randn(512, 512)
        self._small = torch.zeros(8)
        self._numbers = torch.zeros(LOOK_NUMBERS)
        self._computes: dict[str, Callable[[int], None]] = {
            "accelerator": partial(self._on_accelerator, self._look),
            "asleep": partial(self._on_accelerator, time.sleep),
            "host": self._on_host,
            "Python": self._in_python,
        }
        self._work = {kind: max(1, int(step_s / self._piece_s(kind))) for kind in KINDS}

    def _piece_s(self, kind: str) -> float:
        if kind in ("accelerator", "asleep"):
            return KERNEL_S
        began_s = time.perf_counter()
        self._computes[kind](20)
        return (time.perf_counter() - began_s) / 20

    def step(self, kind: str, share: float = 1.0) -> float:
        """Compute for this share of a step's time, then run the optimizer. Return the seconds of
        computing."""
        began_s = time.perf_counter()
        self.compute(kind, share)
        computed_s = time.perf_counter() - began_s
        self.update()
        return computed_s

    def compute(self, kind: str, share: float = 1.0) -> None:
        """Compute for this share of a step's time."""
        self._computes[kind](max(1, int(self._work[kind] * share)))

    def update(self) -> None:
        """Run the optimizer, which changes the fp32 weights in place."""
        self._optim.step()

    def _on_host(self, pieces: int) -> None:
        for _ in range(pieces):
            torch.mm(self._a, self._a)

    def _in_python(self, pieces: int) -> None:
        for _ in range(pieces):
            for _ in range(LOOPS):
                pass

    def _on_accelerator(self, wait: Callable[[float], None], pieces: int) -> None:
        idle_s = time.perf_counter()  # when the device will have finished its queue
        for _ in range(pieces):
            self._small.add_(1)  # the host's cost of a launch
            now_s = time.perf_counter()
            idle_s = max(idle_s, now_s) + KERNEL_S
            if idle_s - now_s > QUEUE_S:
                wait(QUEUE_S / 10)
        while (left_s := idle_s - time.perf_counter()) > 0:
            wait(left_s)

    def _look(self, seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            torch.sin(self._numbers, out=self._numbers)
