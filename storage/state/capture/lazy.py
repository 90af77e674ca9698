"""Lazy capture: copies the state in the background while training continues.

A save stores the state as of the call, or fails and names a tensor that changed.

Between optimizer steps, parameters and optimizer state usually stay constant. Large tensors are
therefore copied in the background, and a hook makes every ``torch.optim.Optimizer`` of the process
wait for pending copies before it steps. Python switches threads more often during that time.

Correctness does not depend on that convention. Every byte copied after the call is checked against
the call, by means that no writer can bypass: the kernel reports which pages of host memory were
written to, digests cover host memory that others can write to unnoticed (:mod:`.host_snapshot`),
and sums cover tensors on an accelerator (:mod:`.device_snapshot`).

Eager saves differ in one way: the call returns only after everything is copied. They are checked as
well, because other threads and processes may write meanwhile. Accelerator tensors need no check
there: streams order those copies.

A tensor that is written to before it is copied cannot be recovered, so later saves avoid the race.
On first sight, a tensor is copied at the call and watched until the next fence
(:mod:`.write_watch`). If it is written to in that time, later saves copy it at the call, too
(:mod:`.write_watch`). The same happens after a save that failed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....core.forks.renewal import in_child, new_lock
from ....errors import SaveError
from ...runtime.engine import WAIT_S, check_may_wait
from ..adapters.composite import memories_of
from ..adapters.tensors import local_of
from ..bits import span_of
from ..compat import buffers_of, neg_view, never_compiled
from ..device import Queued, copied_to_host, devices_of, is_capturing
from ..flat_state import FlatState
from .device_snapshot import DeviceSnapshot, Doubt
from .host_snapshot import SMALL_NBYTES, ChangedError, HostSnapshot, Region
from .process_memory import GoneError, digests_of
from .switch_interval import short_switch_interval
from .unwritten import Unwritten
from .write_tracking import write_tracker
from .write_watch import Tensor, Watch, Watched, write_history

CLONED_NBYTES = 32 << 20
"""Bytes that may be copied at the call in any case. If more has to be copied at the call, and it is
most of the state, the call waits for the whole image instead of copying the data twice."""

_ADVICE = (
    "From now on it is copied at the call. To have it copied in the background, call fence() "
    "before anything but an optimizer's step writes to the state. Other threads and processes "
    "must not write to it during a save."
)
_ADVICE_EAGER = (
    "Another thread or process wrote to it. Make it write before or after the call, or save a "
    "copy of the tensor."
)

_active: dict[int, LazyCapture] = {}
_watches: dict[int, Watch] = {}
_lock = new_lock()


def fence() -> None:
    """Block until all lazy saves of this process have copied the state. It may be modified
    afterwards.

    Optimizers call this before each step. Does nothing while this thread captures a CUDA graph: a
    capture writes nothing, and synchronizing with the device would break it. Never raises for a
    failed save: the save's handle reports that.
    """
    if is_capturing():
        return
    for capture in list(_active.values()):
        capture.wait()
    _end_watches()


class LazyCapture:
    """The copies of one save, made while the trainer or other threads may be writing.

    Created in the trainer's thread when the save is called. ``eager``: the caller asked for an
    eager save. ``waits``: the save's call returns only after everything is copied.
    """

    def __init__(
        self,
        flat: FlatState,
        *,
        prove: bool = False,
        eager: bool = False,
        incremental: bool = False,
    ) -> None:
        """Prepare the capture. ``incremental``: find out what was not written since the last one.

        Raises SaveError if another thread or process keeps writing to memory that must be copied at
        once.
        """
        _end_watches()
        if not eager:
            hook_optimizers()
        self.eager = eager
        self._flat: FlatState | None = flat
        self._captured = threading.Event()
        self._changed: int | None = None
        self.waited_s = 0.0
        """Seconds that fences have waited for this capture."""
        rows = _sorted_eagerly(flat) if eager else _sorted(flat)
        self.waits = eager or _most_at_once(flat, rows)
        self._watched: dict[int, Watched] = {}
        self._cloned = set[int]()
        self.host = HostSnapshot([], None)
        """The contiguous rows in host memory."""
        self.unwritten = Unwritten()
        self._device = DeviceSnapshot({})
        self._short_interval = contextlib.ExitStack()
        try:
            self._take(flat, rows, prove, incremental)
        except ChangedError as error:
            self.host.close()
            raise self._error(error.row) from None
        _active[id(self)] = self
        self._short_interval.enter_context(short_switch_interval())

    def _take(self, flat: FlatState, rows: _Rows, prove: bool, incremental: bool) -> None:
        """Clone, arm and digest the rows. From here on, every write is detected or harmless."""
        for row in [*rows.host, *rows.device]:
            # The trainer may swap this tensor's memory or change its shape; the detached alias
            # keeps both.
            if flat.locals[row] is flat.origins[row] and flat.locals[row].nbytes > SMALL_NBYTES:
                flat.locals[row] = flat.locals[row].detach()
        if rows.pinned:
            Queued.now(devices_of(flat.locals)).wait()  # a device may not have filled them yet
        self._device = DeviceSnapshot({row: flat.locals[row] for row in rows.device})
        full = self._device.without_room
        early = [row for row in rows.device if row in rows.new or row in rows.soon]
        at_once = list(dict.fromkeys([*rows.clone, *([] if self.waits else early), *full]))
        rows.new.difference_update(full)
        originals = {row: flat.locals[row] for row in at_once}
        clones = _clone(flat, at_once)
        self._cloned.update(at_once)
        regions = [self._region(flat, row, rows) for row in rows.host]
        self.host = HostSnapshot(regions, write_tracker(), prove=prove, incremental=incremental)
        self.unwritten = self.host.unwritten
        self.host.confirm()
        watched = [row for row in rows.new if self._can_watch(row)]
        self._watched = {
            row: self._watch(row, originals.get(row, flat.locals[row])) for row in watched
        }
        for row, clone in clones.items():
            if not clone.is_still():
                raise ChangedError(row)

    def _region(self, flat: FlatState, row: int, rows: _Rows) -> Region:
        local = flat.locals[row]
        new = row in rows.new
        at_once = not self.waits and (new or row in rows.soon)
        pinned = row in rows.pinned
        return Region(row, local.data_ptr(), local.nbytes, at_once, watch=new, untracked=pinned)

    def copy(self, row: int, start: int, stop: int, to: torch.Tensor) -> Doubt | None:
        """Copy bytes [start, stop) of the local tensor in ``row`` to ``to``, uint8 in host memory.

        Called by copying threads. The caller must settle the returned doubt. Raises SaveError if
        the bytes have changed since the call.
        """
        if row in self._device:
            staged, doubt = self._device.staged(row, start, stop)
            to.copy_(staged, non_blocking=True)
            return doubt
        self.read(row, start, stop, to.data_ptr())
        return None

    def check(self, read: Sequence[tuple[int, int, int]]) -> None:
        """Raise SaveError if any (row, start, stop) in ``read`` has changed since the call.

        The checked bytes must not be read again.
        """
        try:
            self.host.check(read)
        except ChangedError as error:
            raise self._error(error.row) from None

    def staged(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, Doubt | None]:
        """Copy bytes of ``row`` like :meth:`copy`, but to memory on the tensor's own device."""
        if row in self._device:
            return self._device.staged(row, start, stop)
        data = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self.read(row, start, stop, data.data_ptr())
        return data, None

    def settle(self, doubts: Sequence[Doubt]) -> None:
        """Raise SaveError if any copy in ``doubts`` proves wrong. Waits for the device."""
        for doubt in doubts:
            if not bool(doubt.same):
                raise self._error(doubt.row)

    def read(self, row: int, start: int, stop: int, to: int, *, disarm: bool = True) -> None:
        """Copy bytes of a ``row`` in host memory to an address, like :meth:`copy`, without doubt.

        ``disarm``: they will not be read again.
        """
        try:
            self.host.copy(row, start, stop, to, disarm=disarm)
        except ChangedError:
            raise self._error(row) from None

    def __contains__(self, row: int) -> bool:
        """Return whether this capture copies ``row``.

        Other rows are read from the state's own tensors, which are clones already or stay constant
        until the call returns.
        """
        return row not in self._cloned and (row in self._device or row in self.host)

    def copied(self) -> None:
        """Record that everything is copied. Called by the engine."""
        assert self._flat is not None
        self.host.end_copying()
        self._let_go(watching=bool(self._watched))

    def end(self) -> None:
        """Release everything: the save has ended, whatever its outcome. Called by the engine."""
        if self._flat is None or self._changed is None:
            self._let_go(watching=False)
            return
        self.host.watch_again()
        for row, local in enumerate(self._flat.locals):
            if local.nbytes > SMALL_NBYTES and row not in self._cloned and self._can_watch(row):
                self._watched[row] = self._watch(row, local)
        self._let_go(watching=True)

    def wait(self) -> None:
        """Block until everything is copied or the save has failed; the save's deadlines bound the
        wait.

        Raises UsageError on the engine's thread, which does the copying.
        """
        began_s = time.perf_counter()
        self.wait_in_call()
        self.waited_s += time.perf_counter() - began_s

    def wait_in_call(self) -> None:
        """Block like :meth:`wait`, without counting the time as waited in a fence."""
        if not self._captured.is_set():
            check_may_wait()
        while not self._captured.wait(WAIT_S):
            pass

    def seen(self) -> None:
        """End the watch, since the trainer knows that everything is copied: later writes are not
        early."""
        if self._captured.is_set():
            _end_watch(id(self))

    def _can_watch(self, row: int) -> bool:
        return row in self._device or self.host.sees_writes(row)

    def _watch(self, row: int, local: torch.Tensor) -> Watched:
        """Return a watch entry for ``row``; :meth:`_can_watch` must hold for it."""
        assert self._flat is not None
        sums = None
        if row in self._device:
            sums = self._device.sums(row)
        return Watched(_known_as(self._flat, row), local, sums)

    def _let_go(self, *, watching: bool) -> None:
        """Drop all references to the state and release the waiting trainer."""
        self._short_interval.close()
        with _lock:
            if watching:
                _watches[id(self)] = Watch(self._watched, self.host, write_history)
            else:
                self.host.close()
        self._watched = {}
        self.host = HostSnapshot([], None)
        self._device = DeviceSnapshot({})
        self._flat = None
        self._captured.set()
        _active.pop(id(self), None)

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
    """The rows of a state, sorted by how they can be copied."""

    host: list[int] = field(default_factory=list)
    """Contiguous rows in host memory."""
    device: list[int] = field(default_factory=list)
    """Large contiguous rows on an accelerator."""
    clone: list[int] = field(default_factory=list)
    """Small rows on an accelerator, and all rows with any other layout."""
    pinned: set[int] = field(default_factory=set)
    """Rows in pinned memory, which devices can write to unnoticed."""
    soon: set[int] = field(default_factory=set)
    """Rows that are written to before an optimizer steps, or cannot be tracked."""
    new: set[int] = field(default_factory=set)
    """Large rows not seen before."""


def _sorted_eagerly(flat: FlatState) -> _Rows:
    """Return the contiguous rows in host memory; an eager save checks no others.

    It watches nothing, streams order the copies of accelerators, and cloning the non-contiguous
    rows would exceed the memory budget.
    """
    rows = _sorted(flat)
    rows.device.clear()
    rows.new.clear()
    rows.clone.clear()
    return rows


def _sorted(flat: FlatState) -> _Rows:
    rows = _Rows(soon=_buffers_and_arrays(flat))
    nbytes = [local.nbytes for local in flat.locals]
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
    """Return whether most of the state has to be copied at the call."""
    nbytes = [local.nbytes for local in flat.locals]
    at_once = sum(nbytes[row] for row in rows.soon | rows.new)
    return at_once > CLONED_NBYTES and 2 * at_once > sum(nbytes)


def _known_as(flat: FlatState, row: int) -> Tensor:
    return flat.names[row], flat.locals[row].nbytes


class _HostClone:
    """A contiguous copy, made at the call, of a tensor in host memory that is not contiguous.

    Other threads may write to the tensor or free it during the copy, so its memory is read in a way
    that survives both. :meth:`is_still` reads it again after everything else is copied: if it has
    not changed, all clones were valid at one single moment. Raises GoneError.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        span = torch.empty(span_of(tensor), dtype=dtype, device="cpu")
        self._memory = [(tensor.data_ptr(), span.nbytes)]
        self._digests = digests_of(self._memory, span.data_ptr())
        # A copy of bools would turn any byte but 0 into 1.
        self.copy = _laid_out_like(tensor, span).view(tensor.dtype)
        """The elements in row-major order, with lazy bits resolved."""

    def is_still(self) -> bool:
        """Return whether the memory still holds the copied bytes."""
        try:
            return digests_of(self._memory) == self._digests
        except GoneError:
            return False


def _laid_out_like(tensor: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    view = span.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    if tensor.is_neg():
        view = neg_view(view)
    return view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _clone(flat: FlatState, rows: Sequence[int]) -> dict[int, _HostClone]:
    """Replace tensors by clones. Returns the clones that another thread could have raced with."""
    found = {}
    for row in rows:
        local = flat.locals[row]
        if local.is_cpu:
            try:
                clone = _HostClone(local)
            except GoneError:
                raise ChangedError(row) from None
            found[row] = clone
            flat.locals[row] = clone.copy
            continue
        try:
            flat.locals[row] = local.clone()
        except torch.OutOfMemoryError:  # its device is full
            flat.locals[row] = copied_to_host(local)
    return found


def _buffers_and_arrays(flat: FlatState) -> set[int]:
    """Return the rows that a forward pass, or numpy, may write to."""
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


@functools.cache
def hook_optimizers() -> None:
    """Register a hook of every optimizer, once per process: any may train the state being saved.

    The first lazy save calls this. A compiled step only sees hooks registered before its
    compilation.
    """
    register_optimizer_step_pre_hook(never_compiled(lambda *_: fence()))


def _forget_parent() -> None:
    """Drop all captures in a forked child: it copies nothing, and its memory is not tracked."""
    _active.clear()
    _watches.clear()


in_child(_forget_parent)
