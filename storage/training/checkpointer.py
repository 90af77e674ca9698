"""The Checkpointer: saves a training run periodically, and resumes it.

It decides when to save and which checkpoints to keep, starts saves in the background, and reports
their outcome. All ranks of a job make the same calls and reach the same decisions, without
exchanging messages at every step.

Scope: all it knows of the training loop is the step number.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import reprlib
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Literal, Self, SupportsFloat, SupportsIndex

from ...core.pool import is_exiting
from ...drivers.registry import open_driver
from ...drivers.uri import join
from ...errors import CoordinationError, HoldfastError, UsageError
from ..format.packed import Compression, checked_compression
from ..operations.loading.differences import Strict
from ..operations.location import Place, UriLike
from ..operations.options import DEADLINE_S, Lazy, LoadOptions, SaveOptions
from ..operations.saving.handle import SaveHandle
from ..operations.saving.keeper_request import ByKeeper, Storage
from ..operations.saving.save_job import Deadline
from ..operations.saving.start_save import Destination, begin_memory_step, begin_save
from ..operations.telemetry import Telemetry, check_telemetry
from ..pipeline.borrowing import Incremental
from ..ranks.process_group import Group, acting_in, check_group
from ..runtime.engine import start
from ..runtime.progress import ProgressCallback
from ..state.capture.lazy import fence, hook_optimizers
from ..state.flattening.walk import Default
from .decisions import Decision, Decisions
from .keeper_option import KeeperOption, checked_keeper
from .memory_level import MemoryLevel
from .preemption import Preemption
from .resume import Resumed, begin_run, resumed
from .retention import Keep, Retention
from .run_lineage import Back, RunLineage, below, checkpoint_name
from .schedule import schedule_of
from .stats import Counters, PendingSave, Stats, follow, follow_memory, log_if_unsaved

GRACE_S = 25.0
"""Launchers and schedulers commonly kill a process 30 s after SIGTERM."""

JOIN_PAUSE_MAX = 64
"""Most steps between two attempts to join keepers. All ranks take part in an attempt."""

WhenBusy = Literal["skip", "wait", "queue"]
OnError = Literal["warn", "raise"]

_log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints of one run, in the folder ``uri``: ``step-00000500`` and so on.

    Use it as a context manager. Every rank creates one, with the same arguments.

    ``every``: the interval between saves, in steps (``500``) or time (``"10min"``, ``"90s"``,
    ``"2h"``, by the clock of rank 0); None saves only when :meth:`save` is called. ``keep``: how
    many of the last checkpoints to keep, or a :class:`Keep`; None keeps all.

    ``when_busy``: what to do if a save is due while another is in flight. ``skip`` skips the new
    one. ``wait`` blocks training until the other has ended. ``queue`` copies the state now, into
    memory of its own, and writes it after the other has ended; at most one save is queued. Every
    case is logged and counted, see :attr:`counters`.

    ``on_error``: ``warn`` logs and counts failed saves; ``raise`` also raises the error in the next
    call. Until the first save has succeeded, errors are raised in either case, and once more by
    :meth:`close`, so that a run that cannot be saved at all fails early. If close is never called,
    the error is logged.

    ``grace_s``: after SIGTERM, how long to save the current step and finish saves in flight before
    the previous signal handler runs; None leaves the signal alone. ``lazy``, ``deadline_s``,
    ``timeout_s``, ``budget_nbytes``, ``storage_options``, ``compression``, ``allow_empty``,
    ``default``, ``process_group`` and ``telemetry`` as in :func:`async_save`, except that ``lazy``
    is on by default.

    ``incremental``: saves borrow what has not changed since the newest checkpoint, if the storage
    can; see ``base`` of :func:`save`. An :class:`Incremental` sets limits.

    ``keeper``: a :class:`Keeper`, or ``"auto"`` for the default one. Steps are then also kept in
    host memory, outside the trainer. Saves to storage go through that memory if all ranks have room
    there, and :meth:`resume` loads from memory if it holds a newer step than storage.

    Raises UsageError, UriError; StorageError only from :meth:`resume`.
    """

    def __init__(
        self,
        uri: UriLike,
        *,
        every: int | str | None = None,
        keep: int | Keep | None = None,
        when_busy: WhenBusy = "skip",
        on_error: OnError = "warn",
        lazy: Lazy = True,
        grace_s: float | None = GRACE_S,
        deadline_s: float = DEADLINE_S,
        timeout_s: float | None = None,
        budget_nbytes: int | None = None,
        storage_options: Mapping[str, object] | None = None,
        compression: Compression | None = None,
        allow_empty: bool = False,
        default: Default | None = None,
        incremental: bool | Incremental = False,
        process_group: Group = None,
        telemetry: Telemetry = "on",
        keeper: KeeperOption = None,
    ) -> None:
        _one_of("when_busy", when_busy, ("skip", "wait", "queue"))
        _one_of("on_error", on_error, ("warn", "raise"))
        _one_of("lazy", lazy, (True, False, "prove"))
        check_group(process_group)
        check_telemetry(telemetry)
        self._group = process_group
        self._root = Place.of(uri, storage_options)
        # Open a driver now, so that misspelled options fail here rather than at the first save.
        driver = open_driver(join(self._root.uri, "0"), **self._root.options)
        start(driver.close()).result()
        self._printed = driver.uri.removesuffix("0")
        Deadline.of(timeout_s)
        self._schedule = schedule_of(every)
        keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._retention = None if keep is None else Retention(self._root, keep)
        self._when_busy = when_busy
        self._on_error = on_error
        self._save_options = SaveOptions(
            asynchronous=True,
            lazy=lazy,
            budget_nbytes=budget_nbytes,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            compression=checked_compression(compression),
            allow_empty=allow_empty,
            default=default,
            telemetry=telemetry,
        )
        self._decisions = Decisions(deadline_s, self._printed)
        self._stats = stats = Stats()
        self._base = self._save_options.base_at(self._root, lambda: stats.newest, incremental)
        self._lineage = RunLineage(self._root)
        option = checked_keeper(keeper)
        self._memory = None if option is None else MemoryLevel(option, self._printed)
        self._keeping: list[PendingSave] = []
        """Steps in flight to keeper memory."""
        self._accord_made = False
        self._join_at = 0
        self._join_pause = 1
        self.resumed: Resumed | None = None
        """The outcome of :meth:`resume`: the step, and its tier."""
        self._pending: list[PendingSave] = []
        self._last: int | None = None
        """The step that was saved last or resumed from."""
        self._newest: int | None = None
        """The same, ignoring saves that could not start."""
        self._at = 0
        """The current step of training."""
        self._stop_at: int | None = None
        self._closed = False
        self._pid = os.getpid()
        self._unclosed = weakref.finalize(
            self, log_if_unsaved, self._pid, self._stats, on_error, self._printed
        )
        if lazy:
            hook_optimizers()
        self._preemption: Preemption | None = None
        if grace_s is not None and not is_exiting():
            self._preemption = preemption = Preemption(grace_s)
            preemption.install()
            if self._memory is not None:
                # Without all ranks, no save can complete, so there is nothing to wait for.
                self._memory.rank_lost = lambda rank: preemption.cut_short()

    @property
    def counters(self) -> Counters:
        """The outcomes of all saves so far, on this rank."""
        return self._stats.counters

    @property
    def unsaved_steps(self) -> int:
        """Return the number of steps that would be lost if the job died now.

        Counted from the newest step that this rank knows to be durable.
        """
        return max(0, self._at - self._stats.durable_step)

    @property
    def preempted(self) -> bool:
        """Return whether SIGTERM has arrived."""
        return self._preemption is not None and self._preemption.asked

    def resume(
        self,
        state: object,
        *,
        step: int | None = None,
        before: int | None = None,
        strict: Strict = True,
        cast: bool = False,
        progress: ProgressCallback | None = None,
    ) -> int:
        """Load the newest good checkpoint into ``state``; return its step, or 0 if the run has
        none.

        ``step``: load the checkpoint of that step instead. ``before``: load the newest good one
        before that step. Either goes back: all later checkpoints are abandoned, durably once this
        returns. An abandoned checkpoint is not resumed, is not counted by ``keep``, and is deleted
        once the run has passed its step (see :class:`Keep`); ``resume(step=…)`` revives it.

        Steps in the memory of keepers count, too, if they are newer than all checkpoints in storage
        that match. Every checkpoint directly in the run's folder that has a step counts, whatever
        its name. All ranks load the same one. A damaged checkpoint is skipped with a warning,
        unless requested by ``step``, and counts as abandoned once training saves again. Raises
        UsageError if no checkpoint matches the request; DamagedError if there are checkpoints but
        none is whole; and what :func:`load` raises for a state that does not fit. ``strict``,
        ``cast`` and ``progress`` as in :func:`load`.
        """
        self._check_open()
        back = Back(step, before)
        self._settle()
        options = LoadOptions(
            strict=strict,
            cast=cast,
            progress=progress,
            deadline_s=self._save_options.deadline_s,
            storage_options=self._root.options,
            budget_nbytes=self._save_options.budget_nbytes,
            telemetry=self._save_options.telemetry,
        )
        with acting_in(self._group):
            self.resumed = resumed(self._lineage, self._root, back, state, options, self._memory)
        found = self.resumed.step
        self._schedule.begin_at(found or 0)
        self._decisions.begin_run()
        self._accord_made = False
        self._join_at = 0
        self._join_pause = 1
        self._last = found or None
        self._newest = found
        self._at = found or 0
        self._stats.durable_step = self._at
        self._stats.newest = self.resumed.stored
        if found is None:
            _log.info("step 0: nothing is saved in %s", self._root.uri.redacted)
        else:
            _log.info("resuming from step %d of %s", found, self._root.uri.redacted)
        return found or 0

    def step(
        self, step: int, state: object, *, metric: SupportsFloat | None = None
    ) -> SaveHandle | None:
        """Start a save if one is due, and return its handle. Call this after every training step.

        ``state`` is everything to save. ``step`` increases from call to call, and is the same on
        all ranks; to go back, call :meth:`resume` with a step. ``metric`` rates this step for
        ``Keep(best=…)``: anything that :class:`float` accepts; only rank 0's counts. Raises
        UsageError for a step below the newest one, and for a metric that is not a number. With
        ``on_error="raise"``, and until the first save has succeeded, raises the error of a failed
        save.
        """
        self._check_open()
        self._check_step(step)
        _check_metric(metric)
        self._at = step
        self._stats.raise_first(self._on_error)
        with acting_in(self._group):
            return self._step(step, state, metric)

    def _step(self, step: int, state: object, metric: SupportsFloat | None) -> SaveHandle | None:
        if (
            self._preemption is not None
            and self._preemption.pending
            and self._stops(step, state, metric)
        ):
            return None
        due = False
        try:
            has_joined = self._has_joined(step)
            kept = self._memory is not None and self._memory.due(step)
            due = self._schedule.due(step, self._decisions) and step != self._last
            if due:
                self._stats.count(due=1)
                return self._due(step, state, metric)
            if kept and has_joined:
                return self._keep(step, state)
            if kept:
                self._stats.count(not_kept=1)  # the reason is logged already
            return None
        except CoordinationError as error:  # the ranks could not reach a decision
            self._stats.undecided(step, error, is_counted=due)
            self._stats.raise_first(self._on_error)
            return None

    def save(
        self, step: int, state: object, *, metric: SupportsFloat | None = None
    ) -> SaveHandle | None:
        """Start saving ``step``, due or not, after any save in flight. Every rank calls this.

        Returns None if the save could not start and ``on_error`` is ``"warn"``. Raises as
        :meth:`step`.
        """
        self._check_open()
        self._check_step(step)
        number = _number_of(metric)
        self._at = step
        self._stats.raise_first(self._on_error)
        self._stats.count(due=1)
        self._wait_for_room()
        with acting_in(self._group):
            return self._begin(step, state, number)

    def fence(self) -> None:
        """Block until lazy saves have copied everything, so that the state may be modified.

        Optimizer steps do this automatically. Call it before any other write to the state.
        """
        fence()

    def wait(self) -> None:
        """Block until no save is in flight, bounded by save deadlines. Raises as :meth:`step`."""
        self._settle()
        self._stats.raise_first(self._on_error)

    def close(self) -> None:
        """Finish saves in flight, and stop handling SIGTERM. May be called twice.

        Raises as :meth:`step`, and also if saves have failed and none has succeeded. Does nothing
        in a forked child: saves in flight belong to the parent.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._unclosed.detach()
        try:
            self._settle()
            self._stats.raise_at_end(self._on_error)
            if self._memory is not None and not failed:
                self._memory.leave(finished=not self.preempted)
        finally:
            if self._memory is not None:
                self._memory.close()
            if self._preemption is not None:
                self._preemption.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(failed=True)
        except Exception as failure:
            # The error that ended the loop takes precedence.
            _log.error("closing the Checkpointer failed: %s", failure)

    def _due(self, step: int, state: object, metric: SupportsFloat | None) -> SaveHandle | None:
        if self._when_busy == "skip" and self._is_busy(step):
            self._stats.skipped(step)
            return None
        number = _number_of(metric)
        if self._when_busy != "skip":
            self._wait_for_room()
        return self._begin(step, state, number)

    def _has_joined(self, step: int) -> bool:
        """Return whether this run has joined its keepers; try again after doubling pauses, at the
        same steps on all ranks."""
        memory = self._memory
        if memory is None or (memory.joined and not memory.may_join_later):
            return memory is not None and not memory.problem
        if step < self._join_at:
            return False
        is_late = memory.joined
        self._join_at = step + self._join_pause
        self._join_pause = min(2 * self._join_pause, JOIN_PAUSE_MAX)
        try:
            begin_run(memory, self._root, self._save_options.deadline_s)
        except HoldfastError as error:
            _log.warning("step %d: not kept in memory, there are no keepers: %s", step, error)
            return False
        if memory.problem:
            return False
        if is_late and self._decisions.leads:
            missed = self.counters.not_kept
            _log.warning("steps are kept in memory from %d on, after %d were not", step, missed)
        return True

    def _keep(self, step: int, state: object) -> SaveHandle | None:
        """Start keeping a step in memory. A failure is counted and otherwise ignored."""
        assert self._memory is not None
        self._keeping = [kept for kept in self._keeping if not kept.followed.done()]
        if any(not kept.handle.captured.done() for kept in self._keeping):
            self._stats.not_kept(step, "the previous step is still being copied")
            return None
        agrees = not self._accord_made
        self._accord_made = True
        began_s = time.perf_counter()
        by = self._memory.by()
        assert by is not None  # otherwise the step would not be due
        try:
            handle, ended, is_new = begin_memory_step(
                self._printed + checkpoint_name(step),
                state,
                step,
                self._save_options,
                by,
                agrees=agrees,
                meets=self._memory.meets(step, self._stats.not_kept_in_a_row),
            )
            self._memory.note_layout(step, is_new=is_new)
            if not self._save_options.lazy:
                handle.captured.wait()
        except Exception as error:
            self._stats.not_kept(step, str(error))
            return None
        self._stats.count(stalled_s=time.perf_counter() - began_s)
        followed = start(follow_memory(step, handle, self._stats))
        self._keeping.append(PendingSave(step, handle, ended, followed))
        return handle

    def _in_flight(self) -> list[PendingSave]:
        self._pending = [save for save in self._pending if not save.followed.done()]
        return [save for save in self._pending if not save.ended.done()]

    def _is_busy(self, step: int) -> bool:
        """Return the leader's decision whether to skip this save because another is in flight."""
        decision = self._decisions.ask(
            "busy", step, lambda: Decision(step, int(bool(self._in_flight())), step + 1)
        )
        return decision is None or bool(decision.value)

    def _wait_for_room(self) -> None:
        """Block until at most one other save is in flight with a queue, or none without."""
        room = 1 if self._when_busy == "queue" else 0
        in_flight = self._in_flight()
        if len(in_flight) <= room:
            return
        began_s = time.perf_counter()
        for save in in_flight[: len(in_flight) - room]:
            _settled(save.ended)
        self._stats.waited(time.perf_counter() - began_s)

    def _settle(self) -> None:
        for save in self._pending:
            _settled(save.ended)
            _settled(save.followed)
        self._pending.clear()
        for kept in self._keeping:
            _settled(kept.followed)
        self._keeping.clear()

    def _begin(self, step: int, state: object, metric: float | None) -> SaveHandle | None:
        began_s = time.perf_counter()
        name = checkpoint_name(step)
        in_flight = self._in_flight()
        after = None
        if in_flight and self._when_busy == "queue":
            after = in_flight[-1].ended
        self._last = step
        self._accord_made = True
        try:
            handle, ended = begin_save(
                Destination(
                    self._root.uri,
                    self._root.options,
                    name,
                    self._printed + name,
                    self._by(step, name),
                    self._base,
                ),
                state,
                step,
                self._save_options,
                after=after,
                admit=partial(self._lineage.admit, step),
                logs_failure=False,
            )
            if not self._save_options.lazy:
                handle.captured.wait()
        except Exception as error:
            self._stats.failed(step, error)
            self._stats.raise_first(self._on_error)
            return None
        self._newest = step
        self._stats.begun(step, time.perf_counter() - began_s, queued=after is not None)
        retention = self._retention if self._decisions.leads else None
        followed = start(
            follow(step, handle, metric, self._stats, retention, self._steps_in_flight)
        )
        self._pending.append(PendingSave(step, handle, ended, followed))
        return handle

    def _by(self, step: int, name: str) -> ByKeeper | None:
        if self._memory is None or not self._has_joined(step):
            return None
        uri = str(join(self._root.uri, name))
        compression = self._save_options.compression
        return self._memory.by(Storage(uri, self._root.options, compression, self._base))

    def _steps_in_flight(self) -> list[int]:
        return [save.step for save in list(self._pending) if not save.ended.done()]

    def _stops(self, step: int, state: object, metric: SupportsFloat | None) -> bool:
        """Handle SIGTERM: save at the step of the furthest rank, then hand the signal over."""
        assert self._preemption is not None
        if self._preemption.left_s <= 0:  # other Checkpointers of this process may still have time
            _log.error("step %d is not saved: the grace period is over", step)
            self._preemption.leave()
            return True
        if self._stop_at is None:
            _log.warning("SIGTERM: saving, and ending within %.0f s", self._preemption.left_s)
            self._stop_at = self._decisions.highest("stop", step, self._preemption.left_s)
            if self._stop_at is None:
                _log.error("not all ranks got the signal: only finishing the saves in flight")
        if self._stop_at is not None and step < self._stop_at:
            return False
        if self._stop_at is not None and step != self._last:
            self._stats.count(due=1)
            self._begin(step, state, _number_of(metric))
        for save in self._pending:
            _settled(save.ended, self._preemption.left_s)
        # The leader's process may serve the job's store, so it leaves last.
        self._decisions.highest(
            "stopped", step, self._preemption.left_s if self._decisions.leads else 0.0
        )
        if self._memory is not None:
            self._memory.leave(finished=False)
        self._preemption.leave()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this checkpointer is closed")
        if self._pid != os.getpid():
            raise UsageError(
                "this checkpointer belongs to the parent of this process",
                advice="Create one in the process that trains.",
            )

    def _check_step(self, step: int) -> None:
        if self._newest is not None and step < self._newest:
            raise below(step, self._newest, self._root.uri.redacted)


def _check_metric(metric: object) -> SupportsFloat | SupportsIndex | None:
    """Raise UsageError for an invalid metric, without reading a tensor, which would block."""
    if metric is None or isinstance(metric, SupportsFloat | SupportsIndex):
        return metric
    raise _no_number(metric)


def _number_of(metric: object) -> float | None:
    given = _check_metric(metric)
    if given is None:
        return None
    try:
        number = float(given)
    except Exception as error:
        raise _no_number(metric) from error
    return number if math.isfinite(number) else None


def _no_number(metric: object) -> UsageError:
    return UsageError(
        f"metric is {reprlib.repr(metric)}, which is not a number",
        advice="Give a number, or a tensor or array of one element.",
    )


def _settled(future: Future[None], timeout_s: float | None = None) -> None:
    try:
        with contextlib.suppress(CancelledError):
            future.exception(timeout_s)
    except TimeoutError:
        _log.warning("a save was still in flight when the grace period ended")


def _one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UsageError(
            f"{name} is {value!r}", advice=f"It is one of {', '.join(map(repr, known))}."
        )
