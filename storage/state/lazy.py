"""Copies the state while training goes on. What is stored is the state at the call; otherwise the
save fails and names a tensor.

Between two steps of an optimizer, what it trains does not change, as a rule. So large tensors are
copied in the background, and before any ``torch.optim.Optimizer`` of the process steps, a hook
waits for what is left to copy. The interpreter switches threads more often meanwhile.

Correctness does not depend on that rule. Each byte that is copied later is checked against the
call, by means that no writer can get around: the kernel reports which pages of host memory were
written to, and digests show it for host memory that others may write to unseen
(:mod:`.host_snapshot`), as sums do for tensors on an accelerator (:mod:`.device_snapshot`).

Eager saves differ in one way: their call returns when all is copied. It is checked likewise, for
other threads and processes may write meanwhile. Accelerators are left out: there, copies are
ordered by the streams.

What was written to before it was copied is lost, so later saves avoid it. A tensor that is seen for
the first time is copied at the call, and watched until the next fence (:mod:`.write_watch`). If it
was written to, later saves copy it at the call, too (:mod:`.write_history`). The same happens after
a save that failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...core.forks.renewal import in_child, new_lock
from ...errors import SaveError
from ..runtime.engine import check_may_wait
from .adapters.made_of import memories_of
from .adapters.tensors import local_of
from .compat import buffers_of, never_compiled
from .device import Queued, copied_to_host, devices_of, is_capturing
from .device_snapshot import DeviceSnapshot, Doubt
from .flat_state import FlatState
from .host_clone import HostClone
from .host_snapshot import SMALL_NBYTES, ChangedError, HostSnapshot, Region
from .process_memory import GoneError
from .switch_interval import switch_interval
from .write_history import Tensor, write_history
from .write_tracking import write_tracker
from .write_watch import Watch, Watched

__all__ = ["LazyCapture", "fence", "hook_optimizers"]

CLONED_NBYTES = 32 << 20
"""So much is copied at the call in any case. Where there is more, and it is most of the state, the
call waits until all of the image is copied, rather than copy it twice."""

_ADVICE = (
    "From now on it is copied at the call. To have it copied in the background, call fence() "
    "before anything but an optimizer's step writes to the state. Other threads and processes may "
    "not write to it during a save."
)
_ADVICE_EAGER = (
    "Another thread or process wrote to it. Let it write before or after the call of the save, "
    "or save a copy of the tensor."
)

_under_way: dict[int, LazyCapture] = {}
_watches: dict[int, Watch] = {}
_lock = new_lock()
_hooked = False


def fence() -> None:
    """Return when lazy saves of this process have copied all that they have to. Then the state may
    be written to. Does nothing while this thread captures a CUDA graph: nothing is written then,
    and to ask the device would break the capture.

    Optimizers call it before each step, by themselves. It does not raise: the handle of a save
    reports its outcome.
    """
    if is_capturing():
        return
    for capture in list(_under_way.values()):
        capture.wait()
    _end_watches()


class LazyCapture:
    """What one save copies, beside the trainer or other threads. Made in the trainer's thread, at
    the call of the save.

    ``waits``: the call of the save returns when all is copied. ``eager``: so it was asked for.
    """

    def __init__(self, flat: FlatState, *, prove: bool = False, eager: bool = False) -> None:
        """Raises SaveError where another thread or process keeps writing to what is to be copied at
        once."""
        _end_watches()
        if not eager:
            hook_optimizers()
        self.eager = eager
        self._flat: FlatState | None = flat
        self._captured = threading.Event()
        self._changed: int | None = None
        self.waited_s = 0.0
        """How long fences have waited for this."""
        rows = _sorted_eagerly(flat) if eager else _sorted(flat)
        self.waits = eager or _most_at_once(flat, rows)
        self._watched: dict[int, Watched] = {}
        self._cloned = set[int]()
        self._host: HostSnapshot | None = None
        self._device = DeviceSnapshot({})
        try:
            self._take(flat, rows, prove)
        except ChangedError as error:
            if self._host is not None:
                self._host.close()
            raise self._error(error.row) from None
        _under_way[id(self)] = self
        switch_interval.shorten(self)

    def _take(self, flat: FlatState, rows: _Rows, prove: bool) -> None:
        """From here on, a write is noticed, or does not matter."""
        for row in [*rows.host, *rows.device]:
            # If the trainer gives a tensor other memory, or another shape, this one stays as it is.
            if flat.locals[row] is flat.origins[row] and flat.locals[row].nbytes > SMALL_NBYTES:
                flat.locals[row] = flat.locals[row].detach()
        if rows.pinned:
            Queued.now(devices_of(flat.locals)).wait()  # a device may not have filled them yet
        self._device = DeviceSnapshot({row: flat.locals[row] for row in rows.device})
        full = self._device.without_room
        at_once = list(dict.fromkeys([*self._to_clone(rows), *full]))
        rows.new.difference_update(full)
        originals = {row: flat.locals[row] for row in at_once}
        clones = _clone(flat, at_once)
        self._cloned.update(at_once)
        regions = [self._region(flat, row, rows) for row in rows.host]
        self._host = HostSnapshot(regions, write_tracker(), prove=prove)
        self._host.confirm()
        watched = [row for row in rows.new if self._can_watch(row)]
        self._watched = {
            row: self._watch(row, originals.get(row, flat.locals[row])) for row in watched
        }
        for row, clone in clones.items():
            if not clone.is_still():
                raise ChangedError(row)

    @property
    def arena_nbytes(self) -> int:
        """Host memory that copies of small tensors take."""
        return 0 if self._host is None else self._host.arena_nbytes

    def _to_clone(self, rows: _Rows) -> list[int]:
        """Rows of which a copy takes the place, since they can be copied in no other way."""
        at_once = list(rows.clone)
        if not self.waits:
            at_once += [row for row in rows.device if row in rows.new or row in rows.soon]
        return at_once

    def _region(self, flat: FlatState, row: int, rows: _Rows) -> Region:
        local = flat.locals[row]
        new = row in rows.new
        at_once = not self.waits and (new or row in rows.soon)
        pinned = row in rows.pinned
        return Region(row, local.data_ptr(), local.nbytes, at_once, watch=new, untracked=pinned)

    def copy(self, row: int, start: int, stop: int, to: torch.Tensor) -> Doubt | None:
        """Copy bytes [start, stop) of the local tensor in ``row`` to ``to``, uint8 in host memory.
        For threads that copy.

        Raises SaveError where they are not what they were at the call. What is returned has to be
        settled.
        """
        if row in self._device:
            staged, doubt = self._device.staged(row, start, stop)
            to.copy_(staged, non_blocking=True)
            return doubt
        self._read(row, start, stop, to.data_ptr())
        return None

    def is_tracked_only(self, row: int) -> bool:
        """Whether :meth:`copy_tracked` is for ``row``."""
        return self._host is not None and row in self._host and not self._host.compares(row)

    def segments(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """For a row that is tracked only: where bytes [start, stop) of it are to be read from, in
        order, as addresses and numbers of bytes. They are as they were at the call if
        :meth:`check` says so later."""
        assert self._host is not None
        return self._host.segments(row, start, stop)

    def check(self, read: Sequence[tuple[int, int, int]]) -> None:
        """Raise SaveError unless what was read is what was there at the call: of rows, bytes
        [start, stop) each, which are not asked for again."""
        assert self._host is not None
        try:
            self._host.check(read)
        except ChangedError as error:
            raise self._error(error.row) from None

    def copy_tracked(self, row: int, start: int, stop: int, to: int) -> None:
        """As :meth:`copy`, to an address, with nothing to be settled."""
        self._read(row, start, stop, to)

    def staged(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, Doubt | None]:
        """As :meth:`copy`, to memory of the device that the tensor is on."""
        if row in self._device:
            return self._device.staged(row, start, stop)
        data = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self._read(row, start, stop, data.data_ptr())
        return data, None

    def settle(self, doubts: Sequence[Doubt]) -> None:
        """Raise SaveError unless all of them turn out well. Waits for the device."""
        for doubt in doubts:
            if not bool(doubt.same):
                raise self._error(doubt.row)

    def peek(self, row: int, start: int, stop: int, to: int) -> None:
        """Copy bytes of ``row`` in host memory to an address, as :meth:`copy` does, to be copied
        once more later."""
        self._read(row, start, stop, to, disarm=False)

    def __contains__(self, row: int) -> bool:
        """Whether ``row`` is to be copied by this, rather than from the state's own tensor, which
        is a copy already, or does not change before the call returns."""
        return row not in self._cloned and (row in self._device or self.has_in_host_memory(row))

    def has_in_host_memory(self, row: int) -> bool:
        """Whether it is tracked."""
        return self._host is not None and row in self._host

    def copied(self) -> None:
        """For the engine: all is copied."""
        assert self._flat is not None
        if self._host is not None:
            self._host.end_copying()
        self._let_go(watching=bool(self._watched))

    def end(self) -> None:
        """For the engine: the save is over, whatever its outcome. Nothing waits any more."""
        changed = self._flat is not None and self._changed is not None
        if changed:
            self._watch_all()
        self._let_go(watching=changed)

    def _watch_all(self) -> None:
        assert self._flat is not None
        if self._host is not None:
            self._host.watch_again()
        for row, local in enumerate(self._flat.locals):
            if local.nbytes > SMALL_NBYTES and row not in self._cloned and self._can_watch(row):
                self._watched[row] = self._watch(row, local)

    def wait(self) -> None:
        """Return when all is copied, or the save has failed: its own deadlines bound the wait.
        Raises UsageError on the engine's thread, which copies."""
        began_s = time.perf_counter()
        self.wait_in_call()
        self.waited_s += time.perf_counter() - began_s

    def wait_in_call(self) -> None:
        """The same, for the call of the save."""
        if not self._captured.is_set():
            check_may_wait()
        self._captured.wait()

    def seen(self) -> None:
        """The trainer has seen that all is copied: what it writes from now on is not early."""
        if self._captured.is_set():
            _end_watch(id(self))

    def _read(self, row: int, start: int, stop: int, to: int, *, disarm: bool = True) -> None:
        """From host memory."""
        assert self._host is not None
        try:
            self._host.copy(row, start, stop, to, disarm=disarm)
        except ChangedError:
            raise self._error(row) from None

    def _can_watch(self, row: int) -> bool:
        return row in self._device or (self._host is not None and self._host.sees_writes(row))

    def _watch(self, row: int, local: torch.Tensor) -> Watched:
        """For what can be watched."""
        assert self._flat is not None
        sums = None
        if row in self._device:
            sums = self._device.sums(row)
        return Watched(_known_as(self._flat, row), local, sums)

    def _let_go(self, *, watching: bool) -> None:
        """Hold nothing of the state any more, and let the trainer go on."""
        switch_interval.restore(self)
        with _lock:
            if watching:
                _watches[id(self)] = Watch(self._watched, self._host, write_history)
            elif self._host is not None:
                self._host.close()
        self._watched = {}
        self._host = None
        self._device = DeviceSnapshot({})
        self._flat = None
        self._captured.set()
        _under_way.pop(id(self), None)

    def _error(self, row: int) -> SaveError:
        assert self._flat is not None
        self._changed = row
        write_history.learn([_known_as(self._flat, row)], early=True)
        return SaveError(
            f"{self._flat.path(row)} changed while it was being copied",
            advice=_ADVICE_EAGER if self.eager else _ADVICE,
        )


@dataclass(slots=True)
class _Rows:
    """The rows of a state, sorted by what can be done about them."""

    host: list[int] = field(default_factory=list)
    """Contiguous, in host memory."""
    device: list[int] = field(default_factory=list)
    """Large, contiguous, on an accelerator."""
    clone: list[int] = field(default_factory=list)
    """Small ones on an accelerator, and all that is laid out otherwise."""
    pinned: set[int] = field(default_factory=set)
    """Devices may write to these unseen."""
    soon: set[int] = field(default_factory=set)
    """Written to before an optimizer steps, or cannot be tracked."""
    new: set[int] = field(default_factory=set)
    """Large ones that were not seen before."""


def _sorted_eagerly(flat: FlatState) -> _Rows:
    """Return the contiguous rows in host memory. Nothing is watched, accelerators copy in order,
    and a copy of what is not contiguous would need more memory than the budget."""
    rows = _sorted(flat)
    rows.device.clear()
    rows.new.clear()
    rows.clone.clear()
    return rows


def _sorted(flat: FlatState) -> _Rows:
    rows = _Rows(soon=_buffers_and_arrays(flat))
    nbytes = _nbytes(flat)
    pins = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for row, local in enumerate(flat.locals):
        if not nbytes[row]:
            continue
        plain = local.is_contiguous() and not local.is_conj() and not local.is_neg()
        small = nbytes[row] <= SMALL_NBYTES
        early = write_history.is_early((flat.names[row], nbytes[row]))
        if early is None and not small:
            rows.new.add(row)
        if early or local.is_inference():  # optimizers do not train these
            rows.soon.add(row)
        if local.is_cpu and plain:
            rows.host.append(row)
            if pins and local.is_pinned():
                rows.pinned.add(row)
        elif local.is_cuda and plain and not small:
            rows.device.append(row)
        else:
            rows.clone.append(row)
            rows.new.discard(row)
            if not small:
                rows.soon.add(row)
    return rows


def _most_at_once(flat: FlatState, rows: _Rows) -> bool:
    """Whether what is to be copied at the call is most of the state."""
    nbytes = _nbytes(flat)
    at_once = sum(nbytes[row] for row in rows.soon | rows.new)
    return at_once > CLONED_NBYTES and 2 * at_once > sum(nbytes)


def _nbytes(flat: FlatState) -> list[int]:
    return [local.nbytes for local in flat.locals]


def _known_as(flat: FlatState, row: int) -> Tensor:
    return flat.names[row], flat.locals[row].nbytes


def _clone(flat: FlatState, rows: Sequence[int]) -> dict[int, HostClone]:
    """Replace tensors by copies. Returns copies that another thread may have written to
    meanwhile."""
    found = {}
    for row in rows:
        local = flat.locals[row]
        if local.is_cpu:
            try:
                clone = HostClone(local)
            except GoneError:
                raise ChangedError(row) from None
            found[row] = clone
            flat.locals[row] = clone.copy
        else:
            flat.locals[row] = _clone_on_device(local)
    return found


def _clone_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device of ``tensor``, or in host memory where the device is full."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return copied_to_host(tensor)


def _buffers_and_arrays(flat: FlatState) -> set[int]:
    """Rows that a forward pass, or numpy, may write to."""
    found = set[int]()
    parts = [part for walked in flat.modules for _, part in walked.parts if buffers_of(part)]
    buffers = {
        _storage(local_of(memory))
        for part in parts
        for buffer in buffers_of(part).values()
        if buffer is not None
        for memory in memories_of(buffer)
    }
    if buffers:
        found |= {row for row, local in enumerate(flat.locals) if _storage(local) in buffers}
    if flat.tree.arrays:
        found |= {row for row, name in enumerate(flat.names) if name in flat.tree.arrays}
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _end_watches() -> None:
    for key in list(_watches):
        _end_watch(key)


def _end_watch(key: int) -> None:
    with _lock:
        watch = _watches.pop(key, None)
    if watch is not None:
        watch.end()


def hook_optimizers() -> None:
    """Once per process: all optimizers, since whichever it is, it may train what is being saved.
    The first lazy save does it; a step that is compiled sees only what is hooked before."""
    global _hooked  # noqa: PLW0603
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


@never_compiled
def _before_step(*_: object) -> None:
    fence()


def _forget_parent() -> None:
    """A forked child copies nothing, and its memory is not tracked."""
    _under_way.clear()
    _watches.clear()


in_child(_forget_parent)
