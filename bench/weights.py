"""Measures a weight channel next to other ways to bring a trainer's weights to an engine.

Some elements of random bf16 weights change by one unit in the last place, as in a small optimizer
step. A trainer publishes them, and an engine in the same process follows. The others bring all
weights: a load of a whole checkpoint, a safetensors file that is written and read, and the plain
bytes over a socket. Files are read from the device, as on another host. After each update, the
engine's weights are compared with the trainer's.
"""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import safetensors.torch
import torch

import holdfast

from ..drivers.local.tree import sync_path
from .contest import Contestant, contest
from .machine import drop_caches, evict
from .program import GIB, Options, Program
from .report import Report, Series, median_ratio
from .states import digests
from .workloads.sized import NBYTES_PER_PARAMETER, scaled_parameters

SHARES = (0.01, 0.03)
"""Shares of the elements that change before each push."""
_WEIGHT_NBYTES = 2
HEADER = [
    "",
    "changed",
    "median s",
    "min s",
    "max s",
    "CPU s/GB",
    "bytes",
    "extra memory",
    "of an update",
    "of push and update",
]
_PUSH, _UPDATE = "push", "update"
_OTHERS = ("load of a checkpoint", "safetensors, written and read", "bytes over a socket")

Weights = dict[str, torch.Tensor]


class Engine(torch.nn.Module):
    """A model with these weights."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def _weights(gib: float, seed: int) -> Weights:
    """Build about ``gib`` GiB of random bf16 weights."""
    random = torch.Generator().manual_seed(seed)
    shapes = scaled_parameters(gib * NBYTES_PER_PARAMETER / _WEIGHT_NBYTES)
    return {
        name.replace(".", "_"): torch.empty(shape).normal_(0, 0.02, generator=random).bfloat16()
        for name, shape in shapes.items()
    }


@dataclass(eq=False)
class _Channel:
    """A trainer that publishes its weights after changes of a ``share`` of them, and an engine."""

    folder: Path
    share: float
    trained: Weights
    engine: Engine
    version: int = 0
    pending: bool = False
    stored_nbytes: list[int] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    updates: list[holdfast.Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(1)
        self._publisher = holdfast.publish(self.folder / "channel")
        self._subscriber = holdfast.subscribe(self.folder / "channel", {"model": self.engine})
        self.push()
        self.update()

    def change(self) -> None:
        """Change the weights. An engine that is behind is updated first."""
        if self.pending:
            self.update()
        for tensor in self.trained.values():
            units = tensor.view(-1).view(torch.int16)
            count = max(1, int(self.share * len(units)))
            where = torch.randint(len(units), (count,), generator=self._random)
            units[where] += torch.randint(2, (count,), generator=self._random).short() * 2 - 1

    def push(self) -> None:
        """Publish the weights; return once the version is visible."""
        began_s = time.perf_counter()
        self.version += 1
        handle = self._publisher.push(self.version, {"model": self.trained})
        self.blocked_s.append(time.perf_counter() - began_s)
        report = handle.wait()
        assert report is not None
        self.stored_nbytes.append(report.stored_nbytes)
        self.pending = True

    def offer(self) -> None:
        """Let a version be there to update to, and not in the page cache."""
        if not self.pending:
            self.change()
            self.push()
        drop_caches(self.folder)

    def update(self) -> None:
        """Update the engine."""
        update = self._subscriber.update()
        assert update is not None
        self.updates.append(update)
        self.pending = False

    def check(self) -> None:
        """Compare the engine with the trainer."""
        _check(self.trained, self.engine)

    def close(self) -> None:
        """Free the memory of both."""
        self._publisher.close()
        self._subscriber.close()


def _check(trained: Weights, engine: Engine) -> None:
    if digests(trained) != digests(engine.state_dict()):
        raise AssertionError("the weights of the engine are not those of the trainer")


def _write_and_read(path: Path, trained: Weights, engine: Engine) -> None:
    safetensors.torch.save_file(trained, path)
    sync_path(str(path), 0)
    evict(path)
    found = safetensors.torch.load_file(path)
    for name, tensor in engine.state_dict().items():
        tensor.copy_(found[name])


def _send(trained: Weights, engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        sender = threading.Thread(target=_send_all, args=(theirs, trained.values()))
        sender.start()
        for tensor in engine.state_dict().values():
            view = _bytes_of(tensor)
            while len(view):
                view = view[ours.recv_into(view) :]
        sender.join()


def _send_all(to: socket.socket, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        to.sendall(_bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _measured(
    given: Options, folder: Path, share: float
) -> tuple[list[list[str]], list[str], list[Series]]:
    trained = _weights(given.gib, 0)
    engine = Engine(_weights(given.gib, 1))
    nbytes = sum(tensor.nbytes for tensor in trained.values())
    channel = _Channel(folder, share, trained, engine)
    checkpoint = folder / "checkpoint"
    file = folder / "model.safetensors"

    def save() -> None:
        holdfast.save(checkpoint, {"model": trained})
        drop_caches(checkpoint)

    def check() -> None:
        _check(trained, engine)

    ways = (
        lambda: holdfast.load(checkpoint, into={"model": engine}),
        lambda: _write_and_read(file, trained, engine),
        lambda: _send(trained, engine),
    )
    others = [
        Contestant(name, way, save if name == _OTHERS[0] else lambda: None, check)
        for name, way in zip(_OTHERS, ways, strict=True)
    ]
    ours = [
        Contestant(_PUSH, channel.push, channel.change),
        Contestant(_UPDATE, channel.update, channel.offer, channel.check),
    ]
    found = contest([*ours, *others], given.runs, given.settle_s)
    channel.close()
    push, update = found[:2]
    both_s = [a + b for a, b in zip(push.seconds, update.seconds, strict=True)]
    moved = [
        median(channel.stored_nbytes[1:]),
        median(u.received_nbytes for u in channel.updates[1:]),
    ]
    moved += [nbytes] * len(others)
    rows = [
        [
            series.name,
            f"{share:.0%}",
            *(
                f"{value:.3f}"
                for value in (series.median, min(series.seconds), max(series.seconds))
            ),
            f"{median(series.own_processor_s) / nbytes * 1e9:.2f}",
            f"{part / nbytes:.2%}",
            f"{(series.peak or 0) / GIB:.2f} GiB",
            *(f"{median_ratio(series.seconds, of):.1f} ×" for of in (update.seconds, both_s)),
        ]
        for series, part in zip(found, moved, strict=True)
    ]
    pauses = [u.pause_s / (u.prepare_s + u.pause_s) for u in channel.updates[1:]]
    blocked_s = median(channel.blocked_s[1:])
    note = (
        f"{share:.0%} changed: a push blocks training for {blocked_s * 1000:.1f} ms; an update "
        f"pauses the engine for {median(pauses):.2%} of its time."
    )
    return rows, [note], found


def _report(given: Options, folder: Path) -> Report:
    report = Report(
        f"Weights of {given.gib:.2g} GiB in bf16, from a trainer to an engine, {given.runs} rounds",
        HEADER,
        [],
    )
    for share in SHARES:
        print(f"{share:.0%} changed", flush=True)
        inner = folder / f"{share:.0%}"
        inner.mkdir()
        rows, notes, series = _measured(given, inner, share)
        report.rows += rows
        report.notes += notes
        report.series += series
        shutil.rmtree(inner)
    return report


main = Program("weights", __doc__, _report, gib=1.0)


if __name__ == "__main__":
    sys.exit(main())
