"""Measures a hundred thousand tensors of 16 bytes: the time and metadata that each costs beyond its
bytes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdfast

from ..drivers.uri import parse
from .machine import PeakMemory, describe, drop_caches, sync_tree
from .options import Options, work_folder
from .options import parse as parse_options
from .peers.choice import beside_ours
from .peers.peer import Peer
from .report import Report, Series, Target
from .states import digests, zero

__all__: list[str] = []

COUNT = 100_000
TENSOR_NBYTES = 16
NAMES: dict[str, Callable[[int], str]] = {
    "short names": lambda i: f"t.{i:06d}",
    "long names": lambda i: (
        f"model.layers.{i // 1000:03d}.experts.{i % 1000:03d}.feed_forward.bias"
    ),
}
OPERATIONS = ("save", "load (build)", "load (into)")


@dataclass
class _Measured:
    """One contestant with one kind of names: a series per operation, and the metadata bytes per
    tensor."""

    contestant: str
    names: str
    series: dict[str, Series] = field(default_factory=dict)
    metadata_nbytes: float = 0.0

    def row(self) -> list[str]:
        times = [
            f"{self.series[name].median:.2f}" if name in self.series else "–" for name in OPERATIONS
        ]
        peak = max(series.peak or 0 for series in self.series.values())
        return [
            f"{self.contestant}, {self.names}",
            *times,
            f"{self.metadata_nbytes:.1f}",
            f"{peak / (1 << 20):.0f} MiB",
        ]


def _state(count: int, name: Callable[[int], str]) -> dict[str, Any]:
    values = torch.randn(count, TENSOR_NBYTES // 4, generator=torch.Generator().manual_seed(0))
    return {name(i): row.clone() for i, row in enumerate(values)}


def _measure(peer: Peer, names: str, count: int, runs: int, path: Path) -> _Measured:
    found = _Measured(peer.name, names)
    state = _state(count, NAMES[names])
    expected = digests(state)
    for _ in range(runs):
        _timed(found, "save", lambda: _durably(peer, path, state))
        found.metadata_nbytes = (_size(path) - count * TENSOR_NBYTES) / count
        zero(state)
        drop_caches(path)
        _timed(found, "load (into)", lambda: peer.load(parse(path), state))
        _check(digests(state) == expected, peer.name)
        if peer.name == "holdfast":
            drop_caches(path)
            built: list[Any] = []
            _timed(found, "load (build)", lambda: built.append(holdfast.load(path)))  # noqa: B023 - called at once
            _check(digests(built[0]) == expected, peer.name)
        shutil.rmtree(path)
    return found


def _check(right: bool, name: str) -> None:
    if not right:
        raise AssertionError(f"{name}: what was loaded is not what was saved")


def _timed(found: _Measured, operation: str, run: Callable[[], object]) -> None:
    series = found.series.setdefault(
        operation, Series(f"{found.contestant}, {found.names}: {operation}")
    )
    with PeakMemory() as memory:
        began_s = time.perf_counter()
        run()
        series.seconds.append(time.perf_counter() - began_s)
    series.peak_nbytes.append(memory.nbytes)
    print(f"  {series.name}: {series.seconds[-1]:.2f} s", flush=True)


def _durably(peer: Peer, path: Path, state: dict[str, Any]) -> None:
    peer.save(parse(path), state)
    if not peer.durable:
        sync_tree(path)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _targets(found: Sequence[_Measured]) -> list[Target]:
    ours = [m for m in found if m.contestant == "holdfast"]
    out = [
        Target(f"{op}, s", max(m.series[op].median for m in ours), 2.0, at_least=False)
        for op in OPERATIONS
    ]
    return [
        *out,
        Target(
            f"metadata per tensor with {ours[0].names}, bytes",
            ours[0].metadata_nbytes,
            100,
            at_least=False,
        ),
    ]


def _all(options: Options, folder: Path, count: int) -> list[_Measured]:
    ours, *others = beside_ours(parse(folder), alone=options.alone)
    found = [_measure(ours, names, count, options.runs, folder / "saved") for names in NAMES]
    for peer in others:
        if peer.name == "DCP":  # slow, so only once
            found.append(_measure(peer, "short names", count, 1, folder / "saved"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse_options("small", __doc__, argv)
    if options.tiny:
        count = COUNT // 100
    else:
        count = COUNT
    with work_folder(options.folder) as folder:
        holdfast.save(folder / "warm", {"x": torch.zeros(1)})
        found = _all(options, folder, count)
        targets = _targets(found)
        if options.tiny:
            targets = []
        report = Report(
            "small",
            f"{count:,} tensors of {TENSOR_NBYTES} bytes, medians of {options.runs} rounds",
            describe(folder),
            [
                "",
                *(f"{name} s" for name in OPERATIONS),
                "metadata bytes per tensor",
                "extra memory",
            ],
            [measured.row() for measured in found],
            targets,
            series=[series for measured in found for series in measured.series.values()],
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
