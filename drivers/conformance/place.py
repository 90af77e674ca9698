"""A place: an empty root for one trial, what was opened on it, and whether all of that was let
go."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..contract import Driver, Traits
from ..registry import open_driver
from ..uri import Uri, join
from .probes import Probe, ProbeClass

__all__ = ["BARE", "Held", "Place", "held_now"]

BARE: Mapping[str, object] = {"retries": 0, "op_timeout_s": "off"}
"""The driver itself is tried, without the layers that would hide its faults; the URI may ask for
layers all the same."""

TRIAL_TIMEOUT_S = 110.0
"""How long one trial may take: whatever takes longer hangs."""

GRACE_S = 5.0
"""How long after close() a thread may take to end, and a descriptor to be closed, on a machine that
is busy. What is leaked is there for longer than that."""

T = TypeVar("T")


class Place:
    """An empty root. Drivers opened on it live on the place's own event loop, and are closed with
    it."""

    def __init__(self, uri: Uri, probe: ProbeClass | None, traits: Traits) -> None:
        self.uri = uri
        self.traits = traits
        if probe:
            self.probe: Probe | None = probe(uri)
        else:
            self.probe = None
        self._probe_class = probe
        self._runner = asyncio.Runner()
        self._opened: list[Driver] = []
        self._looker: Driver | None = None
        self._count = 0

    @property
    def part_nbytes(self) -> int:
        """The size of parts that makes the smallest object of several parts, in bytes."""
        return max(self.traits.part_min_nbytes, 64 << 10)

    def open(self, uri: Uri | None = None) -> Driver:
        """Another driver on the same root; ``uri`` gives it other options."""
        self._opened.append(open_driver(uri or self.uri, **BARE))
        return self._opened[-1]

    @property
    def looker(self) -> Driver:
        """A second driver on the same root, which is opened once: connecting is what takes a kit's
        time."""
        if self._looker is None:
            self._looker = self.open()
        return self._looker

    @property
    def opened(self) -> int:
        """How many drivers have been opened here."""
        return len(self._opened)

    def below(self) -> Place:
        """Another empty root, on the same loop, whose drivers are closed with this place."""
        self._count += 1
        place = Place(join(self.uri, f"below-{self._count}"), self._probe_class, self.traits)
        place._runner.close()
        place._runner = self._runner
        place._opened = self._opened
        return place

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns. Raises TimeoutError where it hangs."""
        return self._runner.run(_limited(work))

    async def keys(self, prefix: str = "") -> list[str]:
        """What a second driver lists, sorted."""
        return sorted([info.key async for info in self.looker.list(prefix)])

    async def holds(self, *keys: str) -> None:
        """See that these objects are there and nothing else: as a second driver lists them, and as
        the probe finds it."""
        assert await self.keys() == sorted(keys)
        if self.probe is not None:
            assert self.probe.list() == sorted(keys)

    def close(self) -> None:
        """Close all drivers, then the loop. Fails where a task of theirs is left."""
        try:
            self.run(self._close_drivers())
        finally:
            self._runner.close()

    async def _close_drivers(self) -> None:
        for driver in self._opened:
            await driver.close()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks outlive close(): {left}"


async def _limited(work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(TRIAL_TIMEOUT_S):
        return await work


@dataclass(frozen=True)
class Held:
    """Descriptors and threads of this process at one moment."""

    descriptors: Counter[str]
    """How many of each kind: files by their path, sockets and the like together."""
    threads: frozenset[threading.Thread]

    def outlived_by(self) -> list[str]:
        """What is held now and was not then, once it had some seconds to go."""
        deadline = time.monotonic() + GRACE_S
        while True:
            now = held_now()
            left = [
                f"{count} × {kind}" for kind, count in (now.descriptors - self.descriptors).items()
            ]
            left += [f"thread {thread.name}" for thread in now.threads - self.threads]
            if not left or time.monotonic() > deadline:
                return sorted(left)
            time.sleep(0.01)


def held_now() -> Held:
    """What this process holds. Where there is no /proc only threads are seen."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        kinds[path if path.startswith("/") else path.partition(":")[0]] += 1
    return Held(kinds, frozenset(threading.enumerate()))
