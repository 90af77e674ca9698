"""A place: an empty root for one trial, its drivers, and the check that they release everything."""

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

BARE: Mapping[str, object] = {"retries": 0, "op_timeout_s": "off"}
"""Options that disable the retry layer, which would hide faults of the driver. The URI may still
enable layers."""

TRIAL_TIMEOUT_S = 110.0
"""Time limit of one trial in seconds; a slower one hangs."""

GRACE_S = 5.0
"""Seconds after close() that threads and descriptors may take to disappear on a busy machine. Real
leaks last longer."""

T = TypeVar("T")


class Place:
    """An empty root. Its drivers run on the place's own event loop and are closed with it."""

    def __init__(self, uri: Uri, probe: ProbeClass | None, traits: Traits) -> None:
        self.uri = uri
        self.traits = traits
        self.probe: Probe | None = None
        if probe:
            self.probe = probe(uri)
        self._probe_class = probe
        self._runner = asyncio.Runner()
        self._opened: list[Driver] = []
        self._looker: Driver | None = None
        self._count = 0

    @property
    def part_nbytes(self) -> int:
        """Part size, in bytes, of the smallest multipart object."""
        return max(self.traits.part_min_nbytes, 64 << 10)

    def open(self, uri: Uri | None = None) -> Driver:
        """Open another driver on the same root; ``uri`` may have other options."""
        self._opened.append(open_driver(uri or self.uri, **BARE))
        return self._opened[-1]

    @property
    def looker(self) -> Driver:
        """A second driver on the same root. Opened once, because connecting dominates the kit's run
        time."""
        if self._looker is None:
            self._looker = self.open()
        return self._looker

    @property
    def opened(self) -> int:
        """Number of drivers opened here."""
        return len(self._opened)

    def below(self) -> Place:
        """Return another empty root on the same loop. Its drivers are closed with this place."""
        self._count += 1
        place = Place(join(self.uri, f"below-{self._count}"), self._probe_class, self.traits)
        place._runner.close()
        place._runner = self._runner
        place._opened = self._opened
        return place

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result. Raises TimeoutError if it hangs."""
        return self._runner.run(_limited(work))

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the sorted keys that a second driver lists."""
        return sorted([info.key async for info in self.looker.list(prefix)])

    async def holds(self, *keys: str) -> None:
        """Assert that exactly these objects exist, as listed by a second driver and found by the
        probe."""
        assert await self.keys() == sorted(keys)
        if self.probe is not None:
            assert self.probe.list() == sorted(keys)

    def close(self) -> None:
        """Close all drivers, then the loop. Fails if any of their tasks is still running."""
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
    """Open descriptors and running threads of this process at one moment."""

    descriptors: Counter[str]
    """Number of descriptors of each kind: files by path, others by type."""
    threads: frozenset[threading.Thread]

    def outlived_by(self) -> list[str]:
        """Return what is held now but was not then, after waiting up to ``GRACE_S`` for it to
        disappear."""
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
    """Return what this process holds. Without /proc, only threads are counted."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        kinds[path if path.startswith("/") else path.partition(":")[0]] += 1
    # The default pool of another event loop, such as fsspec's, lives as long as its loop.
    threads = (thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    return Held(kinds, frozenset(threads))
