"""Measures saves and loads of a state on a GPU, next to the rate of its link: plain copies between
the device and pinned memory, in the same run.

The state is trained by real steps: a stack of linear layers in bf16 with a fused AdamW. It is
stored in memory, so that no disk is measured. Without a GPU nothing is measured.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import holdfast

from .keeper import own_keepers
from .machine import PeakMemory
from .program import GIB, Options, Program
from .report import Report, Series

WAIT_S = 100.0
WIDTH = 4096
TINY_WIDTH = 256
BYTES_A_PARAMETER = 2 + 2 + 2
"""bf16 weights, and two moments in bf16."""
HEADER = ["", "median ms", "GB/s", "of the link", "host memory", "device memory"]


@dataclass
class _Bench:
    """A model and its optimizer on ``device``, and the figures so far."""

    device: torch.device
    given: Options
    link: dict[str, float] = field(default_factory=dict)
    """Bytes per second to the host and to the device."""
    rows: list[list[str]] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)

    def __post_init__(self) -> None:
        width = TINY_WIDTH if self.given.tiny else WIDTH
        layers = max(1, int(self.given.gib * GIB / (width**2 * BYTES_A_PARAMETER)))
        bf16: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, **bf16) for _ in range(layers))
        )
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(width, width, **bf16)
        self.state: dict[str, Any] = {"net": self.net, "optim": self.optim}
        self.step()
        moments = [s[n] for s in self.optim.state.values() for n in ("exp_avg", "exp_avg_sq")]
        self.tensors = [*(p.detach() for p in self.net.parameters()), *moments]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def step(self) -> None:
        """Train one step, and return when the device has finished it."""
        self.net(self.batch).float().square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(
        self,
        name: str,
        run: Callable[[], Any],
        *,
        nbytes: int = 0,
        link: str = "",
        after: Callable[[Any], None] = lambda _: None,
    ) -> float:
        """Time ``run``, add a row, and return the median seconds. ``after`` gets the result of
        ``run`` and is not timed. The first run does not count."""
        series = Series(name)
        device_nbytes = 0
        after(run())
        for _ in range(self.given.runs):
            self.synchronize()
            with PeakMemory() as host, self._peak() as peak:
                began_s = time.perf_counter()
                found = run()
                self.synchronize()
                series.seconds.append(time.perf_counter() - began_s)
                after(found)
            series.peak_nbytes.append(host.nbytes)
            device_nbytes = max(device_nbytes, peak[0])
        self.series.append(series)
        rate = nbytes / series.median
        of_link = f"{rate / self.link[link]:.0%}" if link in self.link else "–"
        self.rows.append(
            [
                name,
                f"{series.median * 1000:.2f}",
                f"{rate / 1e9:.2f}" if nbytes else "–",
                of_link,
                f"{(series.peak or 0) / GIB:.2f} GiB",
                f"{device_nbytes / GIB:.2f} GiB",
            ]
        )
        print("  " + "  ".join(self.rows[-1]), flush=True)
        return series.median

    @contextmanager
    def _peak(self) -> Iterator[list[int]]:
        """Yield a list that receives the growth of device memory within the block, in bytes."""
        found = [0]
        if self.device.type != "cuda":
            yield found
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found[0] = torch.cuda.max_memory_allocated() - before


def _links(bench: _Bench) -> None:
    """Measure plain copies of up to 1 GiB, in both directions."""
    pinned = bench.device.type == "cuda"
    nbytes = min(bench.nbytes, GIB)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    for name, to, of in (("to the host", host, device), ("to the device", device, host)):
        seconds = bench.measure(
            f"link, {name}", partial(to.copy_, of, non_blocking=True), nbytes=nbytes
        )
        bench.link[name] = nbytes / seconds


def _captures(bench: _Bench) -> None:
    """Measure the time until a save has copied the state, and the time of the call."""

    def begin(lazy: bool | Literal["prove"]) -> holdfast.SaveHandle:
        return holdfast.async_save("memory://gpu-bench/c", bench.state, lazy=lazy)

    def captured(lazy: bool | Literal["prove"]) -> holdfast.SaveHandle:
        handle = begin(lazy)
        handle.captured.wait(WAIT_S)
        return handle

    def finish(handle: holdfast.SaveHandle) -> None:
        handle.wait(WAIT_S)
        holdfast.fence()

    kinds: list[tuple[str, bool | Literal["prove"]]] = [
        ("copied before the call returns", False),
        ("copied lazily, with digests on the device", True),
        ("copied lazily, and proved", "prove"),
    ]
    for name, lazy in kinds:
        bench.measure(f"save: {name}: the call", partial(begin, lazy), after=finish)
        bench.measure(
            f"save: {name}: captured",
            partial(captured, lazy),
            nbytes=bench.nbytes,
            link="to the host",
            after=finish,
        )


def _stalls(bench: _Bench) -> None:
    """Measure training steps alone, and with a lazy save in each."""
    handles: list[holdfast.SaveHandle] = []

    def saved() -> None:
        handles.append(holdfast.async_save("memory://gpu-bench/s", bench.state, lazy=True))
        bench.step()

    def finish(_: object) -> None:
        handles.pop().wait(WAIT_S)

    bench.measure("a training step", bench.step)
    bench.measure("a training step beside a lazy save", saved, after=finish)


def _restore(bench: _Bench) -> None:
    """Measure loads to the device, and check every byte."""
    expected = [tensor.clone() for tensor in bench.tensors]
    holdfast.save("memory://gpu-bench/r", bench.state)
    for tensor in bench.tensors:
        tensor.zero_()
    bench.measure(
        "load to the device",
        lambda: holdfast.load("memory://gpu-bench/r", into=bench.state),
        nbytes=bench.nbytes,
        link="to the device",
    )
    same = (torch.equal(_bits(a), _bits(b)) for a, b in zip(bench.tensors, expected, strict=True))
    if not all(same):
        raise AssertionError("what was loaded is not what was saved")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # NaN then equals itself


def _keeper(bench: _Bench) -> None:
    """Measure steps that a keeper holds in memory registered with CUDA."""
    with (
        own_keepers(),
        tempfile.TemporaryDirectory() as folder,
        holdfast.Checkpointer(Path(folder) / "run", keeper="auto", grace_s=None) as run,
    ):
        numbers = itertools.count(1)

        def keep() -> None:
            number = next(numbers)
            handle = run.step(number, bench.state)
            if handle is None:
                raise AssertionError(f"step {number} was not kept: {run.counters}")
            handle.agreed.wait(WAIT_S)

        for _ in range(2):  # all slots have memory then
            keep()
        bench.measure(
            "a step is kept in a keeper's memory", keep, nbytes=bench.nbytes, link="to the host"
        )


def _report(given: Options, folder: Path) -> Report:
    device = given.device
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no GPU here; nothing was measured")
        sys.exit()
    bench = _Bench(torch.device(device), given)
    for part in (_links, _captures, _stalls, _keeper, _restore):
        part(bench)
    return Report(
        f"A state of {bench.nbytes / 1e9:.2f} GB on {device}, {given.runs} runs",
        HEADER,
        bench.rows,
        series=bench.series,
        machine={"gpu": torch.cuda.get_device_name()} if device == "cuda" else {},
    )


main = Program(
    "gpu",
    __doc__,
    _report,
    gib=2.0,
    own=lambda parser: parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only for a trial"
    ),
)


if __name__ == "__main__":
    sys.exit(main())
