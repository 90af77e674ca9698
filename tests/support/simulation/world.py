"""One run: processes and their clocks, storage, and faults at their moment."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any

from holdfast.drivers.contract import CopyTraits, Driver
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.mounts import Mount
from holdfast.drivers.uri import Uri
from holdfast.storage.operations.location import Place

from .engine import CHUNK_NBYTES, hosted
from .loop import PROCESS, Crashed, Process, SimLoop, check_alive
from .posix import FileSystem, Folder, Inode, SimFcntl, SimFileIO, SimOs
from .remote import HdfsDriver, ObjectDriver, Server
from .schedule import COPY_FAULTS, Fault, Schedule

EPOCH_S = 1_767_225_600.0  # 2026
BASE_S = 0.001
DELAYS_S = (0.002, 0.003, 0.005, 0.005, 0.01, 0.01, 0.02, 0.05, 0.2, 1.0)
RETRIES = 5
OP_TIMEOUT_S = 120.0
SLIPPING_CPU_S = 0.05
"""Longest CPU delay if a rank slips. A rank seen in another call for a second counts as lost, even
if it is about to look."""
_COPIES = {"copies": CopyTraits(), "large copies": CopyTraits(min_nbytes=CHUNK_NBYTES)}
_CODES = {"eio": errno.EIO, "full": errno.ENOSPC}
_KINDS = dict.fromkeys(("rename", "link", "unlink", "rmdir", "put", "commit", "delete"), "change")
_KINDS |= dict.fromkeys(("list", "scandir"), "list") | dict.fromkeys(("pwrite", "write"), "write")
_KINDS["copy"] = "copy"
_KINDS |= dict.fromkeys(("read", "pread"), "read")
_WRITES = {"creat", "pwrite", "fsync", "rename", "link", "put", "write", "close"}
_CHANGING = {
    "rename",
    "link",
    "unlink",
    "rmdir",
    "put",
    "commit",
    "delete",
    "fsync",
    "fsync folder",
}
_WRITING = {"manifest": "commit", "fate": "claim"}
_GROWING = {"creat", "mkdir", "pwrite", "copy", "rename", "link"}


class World:
    """The machines of one schedule. If given, ``log`` gets a line for each event."""

    def __init__(
        self, schedule: Schedule, log: Callable[[str], None] | None = None, *, chance: int = 1
    ) -> None:
        """``chance`` and the schedule's seed determine all random draws."""
        self.schedule, self.log = schedule, log
        self.loop = SimLoop()
        self.rng = random.Random(schedule.seed * 2 + chance)
        self.delays: dict[int, float] = {}
        self.processes: list[Process] = []
        self.struck: Counter[str] = Counter()
        self.refused_copies: Counter[str] = Counter()
        """Faults that struck only copies: no reason for a save to fail."""
        self.copies = 0
        self.savers: list[Process] = []
        """Savers at work, including those that have died."""
        self.finished = 0
        """Saves that savers have finished without their trainers."""
        self.operations = 0
        self.calm_s = 0.0
        """Time at which the last disturbance ends."""
        self.on_change: Callable[[str], None] = lambda path: None
        self.on_power_cut: Callable[[], None] = lambda: None
        self.on_copy: Callable[[str], None] = lambda path: None
        self.on_commit: Callable[[str, str], None] = lambda root, attempt: None
        self.on_moment: Callable[[], None] | None = None
        """Called before each operation that changes the storage."""
        self.answers_again = True
        self._faults = {(f.target, f.count): f for f in schedule.faults}
        self._seen: dict[str, int] = {}
        self._delay_count = 0
        self._tokens = 0
        self._stalled_s = 0.0
        self._cuts: dict[str, float] = {}
        self._outages: dict[str, float] = {}
        self._sync_fails = False
        self._slipping = any(actor.slip for actor in schedule.actors)
        self.is_posix = "posix" in schedule.storage
        self.fs = FileSystem(self.loop.time, self._syscall, self._changed, self.copied)
        self.server = Server(self.loop.time, self._changed, behind="late" in schedule.storage)

    def be_host(self) -> None:
        """Run the engine on this world from now on."""
        sim_os = SimOs(self.fs)
        hosted(self, sim_os, SimFcntl(self.fs), SimFileIO(sim_os))

    def left_behind(self) -> World:
        """Return another world with the data stored now, and without processes."""
        other = _CalmWorld(
            replace(self.schedule, faults=(), delays={}), self.log, chance=self.operations
        )
        other.loop.now_s = self.loop.now_s
        other.fs.take_over(self.fs)
        other.server.take_over(self.server)
        return other

    # Called by the engine and the storage.

    def wall_s(self, at_s: float | None = None) -> float:
        """Return the clock of the current process or, at the time ``at_s``, of the storage."""
        if at_s is not None:
            return EPOCH_S + at_s
        process = PROCESS.get()
        return EPOCH_S + self.loop.now_s + (process.skew_s if process else 0.0)

    def token(self) -> int:
        """Return a unique number."""
        self._tokens += 1
        return self._tokens

    def chance(self) -> float:
        """Return a random number in [0, 1)."""
        return self.rng.random()

    def below(self, n: int) -> int:
        """Return a random number below ``n``."""
        return int(self.rng.random() * n)

    def delay_s(self) -> float:
        """Return the duration of one trip to storage."""
        return BASE_S + self._drawn(self.schedule.restless) + self._stalled()

    def cpu_s(self) -> float:
        """Return the duration of a call in a thread, mostly zero."""
        drawn_s = self._drawn(self.schedule.restless * 0.1)
        return min(drawn_s, SLIPPING_CPU_S) if self._slipping else drawn_s

    def after(self, delay_s: float) -> Awaitable[None]:
        """Sleep."""
        return self.loop.after(delay_s)

    def cut_s(self) -> float:
        """Return how much longer the current process's host cannot reach the storage."""
        process = PROCESS.get()
        return (
            max(0.0, self._cuts.get(process.host, 0.0) - self.loop.now_s)
            if process and self._cuts
            else 0.0
        )

    @property
    def is_out(self) -> bool:
        """True while no answer reaches the current process: its requests fail, executed or not."""
        process = PROCESS.get()
        return bool(process and self._outages.get(process.host, -1.0) > self.loop.now_s)

    def _drawn(self, likely: float) -> float:
        self._delay_count += 1
        if self.schedule.delays is not None:
            drawn = self.schedule.delays.get(self._delay_count, 0.0)
        elif self.rng.random() < likely:
            drawn = DELAYS_S[self.below(len(DELAYS_S))]
        else:
            drawn = 0.0
        if drawn:
            self.delays[self._delay_count] = drawn
        return drawn

    def _stalled(self) -> float:
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    # Processes and storage.

    def process(self, name: str, host: str) -> Process:
        """Add a process. A local disk has only one host."""
        process = Process(name, "host" if self.is_posix else host)
        process.skew_s = self.below(3) * 20.0 if not self.is_posix else 0.0
        self.processes.append(process)
        return process

    def committing(self, root: str, attempt: str) -> None:
        """Record that the current process has claimed an attempt and will put its manifest."""
        self.on_commit(root, attempt)

    def copied(self, path: str) -> None:
        """Record that bytes of this object were copied into an upload."""
        self.copies += 1
        self.on_copy(path.lstrip("/"))

    def driver(self, path: str) -> Driver:
        """Return a driver rooted at ``path``, for the current process."""
        if self.is_posix:
            shared, copies = (word in self.schedule.storage for word in ("shared", "copies"))
            kind = "nfs4" if shared else "xfs" if copies else "ext4"
            mount = Mount(kind, device="0:1", options="vers=4.2" if copies else "")
            return LocalDriver("/" + path, direct="off", mount_of=lambda path: mount)
        if self.schedule.storage == "hdfs":
            inner: ObjectDriver = HdfsDriver(self, self.server, path + "/")
        else:
            inner = ObjectDriver(
                self,
                self.server,
                path + "/",
                exclusive="no exclusive" not in self.schedule.storage,
                copies=_COPIES.get(self.schedule.storage.rpartition(", ")[2]),
                links="links" in self.schedule.storage,
            )
        return RetryLayer(inner, RetryPolicy(RETRIES, OP_TIMEOUT_S), chance=self.chance)

    def files(self) -> dict[str, bytes]:
        """Return all stored files, visible or not, by path."""
        if self.is_posix:
            return {path: inode.data for path, inode in self.fs.walk()}  # type: ignore[misc]
        return {path: data for path, (data, _) in self.server.objects.items()}

    def file(self, path: str) -> bytes | bytearray | None:
        """Return one stored file, or None if it does not exist."""
        if self.is_posix:
            node = self.fs.find(path)
            return node.data if isinstance(node, Inode) else None
        found = self.server.objects.get(path)
        return None if found is None else found[0]

    def modified_s(self, path: str) -> float | None:
        """Return when a file was put, or None if it does not exist."""
        if self.is_posix:
            node = self.fs.find(path)
            return node.mtime_s if isinstance(node, Inode) else None
        found = self.server.objects.get(path)
        return None if found is None else found[1]

    def plant(self, path: str, data: bytes) -> None:
        """Store a durable file as if it had always existed."""
        if not self.is_posix:
            self.server.objects[path] = (data, self.loop.now_s)
            return
        *above, name = path.split("/")
        folder = self.fs.root
        for part in above:
            node = folder.entries.get(part) or Folder(self.fs.number())
            assert isinstance(node, Folder)
            folder.entries[part] = folder.durable[part] = node
            folder = node
        inode = Inode(self.fs.number(), self.loop.now_s, bytearray(data), data, links=1)
        folder.entries[name] = folder.durable[name] = inode

    # Faults.

    def operation(self, name: str, key: str) -> Fault | None:
        """Begin a request. Return a fault that strikes it alone; apply any wider fault here."""
        fault = self._next_fault(name, key)
        if fault is None or self._befalls_more(fault):
            return None
        return fault

    def _syscall(self, name: str, path: str) -> None:
        fault = self._next_fault(name, path)
        if fault is not None and not self._befalls_more(fault):
            if fault.kind == "fsync":
                self._sync_fails = True
            elif fault.kind == "hang":
                self._stalled_s += (
                    fault.value
                )  # in addition to earlier stalls of the same driver call
                self.calm_s = max(self.calm_s, self.loop.now_s + self._stalled_s)
            elif fault.kind in _CODES and (fault.kind != "full" or name in _GROWING):
                raise OSError(_CODES[fault.kind], os.strerror(_CODES[fault.kind]), path)
        if self._sync_fails and name == "fsync":
            self._sync_fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _next_fault(self, name: str, key: str) -> Fault | None:
        check_alive()
        self.operations += 1
        if self.on_moment is not None and name in _CHANGING:
            self.on_moment()
        fault = self._due_fault(name, key) if self._faults else None
        if self.log is not None:
            self.log(
                f"{self.loop.now_s:12.4f} {PROCESS.get() or '-'}: {name} {key}"
                + (f"  << {fault.kind}" if fault else "")
            )
        if fault is not None:
            is_harmless = _kind(name, key) == "copy" and fault.kind in COPY_FAULTS
            (self.refused_copies if is_harmless else self.struck)[fault.kind] += 1
            self.calm_s = max(self.calm_s, self.loop.now_s + fault.value)
        return fault

    def _due_fault(self, name: str, key: str) -> Fault | None:
        fault = self._faults.pop(("any", self.operations), None)
        about = _target(key)
        for target in (about, _kind(name, key), _WRITING.get(about) if name in _WRITES else None):
            if target is not None:
                self._seen[target] = count = self._seen.get(target, 0) + 1
                fault = fault or self._faults.pop((target, count), None)
        return fault

    def _befalls_more(self, fault: Fault) -> bool:
        process = PROCESS.get()
        if process is None:
            return False
        if fault.kind == "die":
            self.kill(process)
            raise Crashed
        if fault.kind == "power":
            self.power_cut(process.host)
            raise Crashed
        if fault.kind == "pause":
            process.paused_until_s = self.loop.now_s + fault.value
        elif fault.kind == "cut":
            self._cuts[process.host] = self.loop.now_s + fault.value
        elif fault.kind == "outage":
            self._outages[process.host] = self.loop.now_s + fault.value
        elif fault.kind == "store":
            store = getattr(process, "store", None)
            if store is not None:
                store.away_until_s = self.loop.now_s + fault.value
        else:
            return False
        return True

    def kill(self, process: Process) -> None:
        """Kill a process."""
        process.alive = False
        self.calm_s = max(self.calm_s, self.loop.now_s)

    def power_cut(self, host: str) -> None:
        """Kill all processes of a host; a local disk loses all data that is not durable."""
        for process in self.processes:
            if process.host == host and process.alive:
                self.kill(process)
        if self.is_posix:
            self.fs.power_cut(self.below)
            self.on_power_cut()

    def settle(self) -> None:
        """Stop all faults."""
        self._faults.clear()
        self._cuts.clear()
        self._outages.clear()
        self._sync_fails, self._stalled_s = False, 0.0

    def as_nobody(self, wait_s: float, callback: Callable[[], Any]) -> None:
        """Call back after a while, outside of any process."""
        self.calm_s = max(self.calm_s, self.loop.now_s + wait_s)
        self.loop.call_later(wait_s, callback, context=Context())

    def _changed(self, path: str) -> None:
        self.on_change(path)


class SimPlace(Place):
    """The folder of all checkpoints of a world."""

    def __init__(self, world: World) -> None:
        super().__init__(Uri("sim", "run"), {})
        object.__setattr__(self, "_world", world)

    @contextlib.asynccontextmanager
    async def opened(self, path: str = "") -> AsyncIterator[Any]:
        """See :meth:`Place.opened`."""
        driver = self._world.driver(f"run/{path}" if path else "run")  # type: ignore[attr-defined]
        try:
            yield driver
        finally:
            await driver.close()


class _CalmWorld(World):
    """A world without faults or delays. All such worlds generate the same names, so results derived
    from a name are computed once and cached."""

    def __init__(
        self, schedule: Schedule, log: Callable[[str], None] | None, *, chance: int
    ) -> None:
        super().__init__(schedule, log, chance=chance)
        self._tokens = _LATER_TOKENS
        if log is None:
            self.fs.syscall = self._counted

    def delay_s(self) -> float:
        return 0.0

    cpu_s = cut_s = delay_s

    def after(self, delay_s: float) -> Awaitable[None]:
        return _AT_ONCE

    def _counted(self, name: str, path: str) -> None:
        self.operations += 1


class _AtOnce:
    def __await__(self) -> Iterator[None]:
        return iter(())


_AT_ONCE = _AtOnce()
_LATER_TOKENS = 1 << 24
"""More tokens than any run uses."""


def _kind(name: str, key: str) -> str | None:
    """Return the kind of an operation. A link to borrowed data is as harmless as a copy."""
    return "copy" if name == "link" and "/lent/" in key else _KINDS.get(name)


def _target(key: str) -> str:
    name = key.rpartition("/")[2]
    if "manifest" in name:
        return "manifest"
    if "fate" in name:
        return "fate"
    if "attempt.json" in name:
        return "marker"
    return "image" if ".safetensors" in name or ".blocks" in name else "other"
