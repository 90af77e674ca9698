"""The API: save, async_save, load. Each is one call, on every rank alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from ..drivers.contract import Driver
from ..drivers.registry import open_driver
from ..errors import UsageError
from .format.manifest import Manifest
from .format.packed import Compression, checked_compression
from .operations.differences import Differences, Strict
from .operations.foreign import explains
from .operations.handle import SaveHandle
from .operations.load import Exchanging, LoadJob, finish, run_build, run_load
from .operations.report import LoadReport, SaveReport
from .operations.start_save import (
    Destination,
    Lazy,
    UriLike,
    begin_save,
    closing,
    named,
    step_of_state,
    telling,
    telling_of,
)
from .protocol.current import read_manifest
from .ranks.calls import Call
from .ranks.process_group import current_rank, current_team
from .ranks.team import Solo, Team
from .runtime.buffers import release_pools
from .runtime.engine import check_may_wait, run, start
from .runtime.progress import ProgressCallback, ProgressReporter
from .state.flatten import flatten
from .state.lazy import fence

__all__ = [
    "BUDGET_NBYTES",
    "DEADLINE_S",
    "LoadOptions",
    "async_save",
    "fence",
    "load",
    "load_after",
    "release_memory",
    "save",
]

BUDGET_NBYTES = 512 << 20
DEADLINE_S = 300.0
_BUDGET_MIN_NBYTES = 32 << 20

T = TypeVar("T")


def save(
    uri: UriLike,
    state: Any,
    *,
    step: int | None = None,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    timeout_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    progress: ProgressCallback | None = None,
) -> SaveReport:
    """Save ``state`` as the checkpoint ``uri``; return when it is committed, on every rank.

    ``state`` is a nested dict (or list, tuple) of tensors, DTensors, arrays, numbers, strings,
    bytes, and objects with a state: modules, optimizers, schedulers, random generators. In a
    distributed job every rank calls this with its own part; plain tensors that are equal on all
    ranks are stored once, others per rank. ``step`` is recorded with the checkpoint (default:
    ``state["step"]`` if that is an int). Extra host memory stays within ``budget_nbytes``.
    ``storage_options`` are options of the storage, by name; those in the URI win over them.

    ``timeout_s`` after the call, a save that is not committed ends: what is under way is cut, what
    was written is removed as far as the storage answers, and DeadlineError is raised. None: every
    operation has a deadline, the save as a whole has none.

    ``compression="lz4"`` stores blocks that shrink compressed: for states that do, as trained
    weights do not, or storage that is slow. Such a checkpoint is read as any other, where lz4 is
    installed (``pip install 'holdfast-checkpoint[lz4]'``).

    A state whose tensors have no elements at all, or have none where its weights should be, is a
    StateError: some frameworks keep the elements elsewhere. ``allow_empty=True`` saves it.

    ``progress(done_nbytes, total_nbytes)`` is called now and then on a thread of its own, with the
    bytes of this rank's image that are written, and all of them. What it raises ends the save.

    Atomic: a checkpoint that was at ``uri`` is replaced whole, or, after any failure, untouched.
    Raises StateError for what cannot be saved and UriError, both before any I/O; SaveError,
    StorageError; RankFailedError when another rank fails; DeadlineError when one shows no sign of
    life for ``deadline_s`` seconds, or ``timeout_s`` are over.
    """
    check_may_wait()
    with telling_of("save", uri, step_of_state(state) if step is None else step, deadline_s):
        _checked_budget(budget_nbytes)
        compression = checked_compression(compression)
        to = Destination(uri, storage_options)
    handle, future = begin_save(
        to, state, step, budget_nbytes, deadline_s, lazy=False, timeout_s=timeout_s, compression=compression,
        allow_empty=allow_empty, asks=True, progress=progress,
    )  # fmt: skip
    try:
        handle.wait()
    except KeyboardInterrupt:
        future.cancel()
        raise
    assert handle.report is not None
    return handle.report


def async_save(
    uri: UriLike,
    state: Any,
    *,
    step: int | None = None,
    lazy: Lazy = False,
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    timeout_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    progress: ProgressCallback | None = None,
) -> SaveHandle:
    """Begin to save ``state`` as the checkpoint ``uri``; return when every byte of it is copied to
    host memory.

    The state may change as soon as this returns. With ``budget_nbytes`` smaller than this rank's
    image, copying runs at the pace of the storage, and this returns accordingly later; None keeps
    room for the whole image, also between saves (see :func:`release_memory`). The rest as in
    :func:`save`; what fails later is raised by the handle's ``wait()``, and logged. A save to a URI
    to which this process is still saving waits for that one first.

    ``lazy``: return at once, and copy while training goes on. The next step of any torch optimizer
    waits for what is left of that. A write that came too early, by whatever means, fails the save
    with a SaveError, and that tensor is copied at the call in later saves; :func:`fence` before it
    avoids both. Tensors that are saved for the first time are copied at the call. ``lazy="prove"``
    compares sums of tensors in host memory, too.
    """
    if not lazy:
        check_may_wait()
    with telling_of("save", uri, step_of_state(state) if step is None else step, deadline_s):
        if budget_nbytes is not None:
            _checked_budget(budget_nbytes)
        compression = checked_compression(compression)
        to = Destination(uri, storage_options)
    handle, future = begin_save(
        to, state, step, budget_nbytes, deadline_s, lazy=lazy, timeout_s=timeout_s, compression=compression,
        allow_empty=allow_empty, progress=progress,
    )  # fmt: skip
    if not lazy:
        try:
            handle.captured.wait()
        except KeyboardInterrupt:
            future.cancel()
            raise
    return handle


@overload
def load(
    uri: UriLike,
    into: None = ...,
    *,
    strict: Strict = ...,
    cast: bool = ...,
    budget_nbytes: int = ...,
    deadline_s: float = ...,
    storage_options: Mapping[str, object] | None = ...,
    exchange: Exchanging = ...,
    on_report: Callable[[LoadReport], None] | None = ...,
    progress: ProgressCallback | None = ...,
) -> Any: ...
@overload
def load(
    uri: UriLike,
    into: T,
    *,
    strict: Strict = ...,
    cast: bool = ...,
    budget_nbytes: int = ...,
    deadline_s: float = ...,
    storage_options: Mapping[str, object] | None = ...,
    exchange: Exchanging = ...,
    on_report: Callable[[LoadReport], None] | None = ...,
    progress: ProgressCallback | None = ...,
) -> T: ...
@explains("uri", "storage_options")
def load(
    uri: UriLike,
    into: Any = None,
    *,
    strict: Strict = True,
    cast: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    exchange: Exchanging = "auto",
    on_report: Callable[[LoadReport], None] | None = None,
    progress: ProgressCallback | None = None,
) -> Any:
    """Load the checkpoint ``uri`` into ``into``, whatever layouts the two have; return ``into``.

    Tensors, DTensors and arrays are filled in place; small values are replaced in their containers;
    modules, optimizers and other objects get their state back. Without ``into``, build and return
    the whole state, on the CPU, as this rank saved it. In a distributed job every rank calls this
    with its own part.

    ``strict``: which names must be on both sides. True: all, of the state and of the checkpoint.
    ``"state"``: those of the state; what else the checkpoint has is left. False: none; what both
    have is loaded. What is left is logged, and listed in the report. Names that must fit and do
    not, and, in every mode, shapes and dtypes that differ and a state of which nothing is stored at
    all, are raised as one MismatchError that lists them, before anything is read. ``cast=True``
    converts dtypes. Every byte is verified before it is used. ``storage_options`` as in
    :func:`save`. ``on_report`` is told what was read, on this rank.

    ``exchange``: what several ranks want is read by one of them, which hands it to the others at
    once. "auto": among ranks of one host, through memory that they share, where it is enough to
    matter. True: among all ranks, over the network too. False: each rank reads for itself. All
    ranks give the same.

    ``progress(done_nbytes, total_nbytes)`` is called now and then on a thread of its own, with the
    bytes of the checkpoint that this rank has read or received, and all that it will have. What it
    raises ends the load.

    Raises NotACheckpointError, DamagedError, StorageError, RankFailedError, DeadlineError; after
    those, tensors may be partly filled.
    """
    options = LoadOptions(
        strict=strict,
        cast=cast,
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        storage_options=storage_options,
        exchange=exchange,
        on_report=on_report,
        progress=progress,
    )
    return load_after(set(), uri, into, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What :func:`load` can be told besides the checkpoint and the state; see there."""

    strict: Strict = True
    cast: bool = False
    budget_nbytes: int = BUDGET_NBYTES
    deadline_s: float = DEADLINE_S
    storage_options: Mapping[str, object] | None = None
    exchange: Exchanging = "auto"
    on_report: Callable[[LoadReport], None] | None = None
    progress: ProgressCallback | None = None

    def check(self) -> None:
        """Raises UsageError for values that are none of those that are known."""
        _checked_budget(self.budget_nbytes)
        if self.exchange not in (True, False, "auto"):
            raise UsageError(f"exchange={self.exchange!r}", advice='Give "auto", True or False.')
        if self.strict not in (True, False, "state"):
            raise UsageError(f"strict={self.strict!r}", advice='Give True, "state" or False.')


def load_after(touched: set[str], uri: UriLike, into: Any, options: LoadOptions) -> Any:
    """As :func:`load`, for a state that earlier loads, which failed, have filled in part:
    ``touched`` are the names that they began to fill. Raises MismatchError, before anything is
    read, where the checkpoint does not have all of them, in every mode. This load adds those that
    it begins to fill itself."""
    began_s = time.perf_counter()
    check_may_wait()
    team: Team = Solo()
    if into is not None:
        team = current_team(Call("load", named(uri)), options.deadline_s, saving=False)
    left = Differences()
    with telling(team):
        options.check()
        fence()
        driver = open_driver(uri, **(options.storage_options or {}))
    if into is None:
        with ProgressReporter(options.progress) as reporter:
            building = run_build(driver, current_rank(), options.budget_nbytes, reporter.report)
            root, manifest, reader = run(closing(driver, building))
    else:
        with telling(team, driver), _reading_early(driver, team) as early:
            flat = flatten(into, loading=True)
            job = LoadJob(
                flat,
                strict=options.strict,
                cast=options.cast,
                budget_nbytes=options.budget_nbytes,
                exchange=options.exchange,
            )
            job.touched = touched
            job.early = early
        with ProgressReporter(options.progress) as reporter:
            job.progress = reporter.report
            manifest, reader = run(closing(driver, run_load(driver, team, job)))
        root = finish(job, manifest, team.rank)
        left = job.left
        if any(subtree.parent < 0 for subtree in flat.subtrees):
            root = into  # it is itself an object with a state
    if options.on_report is not None:
        report = LoadReport(
            uri=driver.uri,
            attempt=manifest.attempt,
            bytes_wanted=reader.bytes_wanted,
            bytes_read=reader.bytes_read,
            seconds=time.perf_counter() - began_s,
            bytes_received=reader.bytes_received,
            missing=left.missing,
            unexpected=left.unexpected,
            missing_count=left.missing_count,
            unexpected_count=left.unexpected_count,
        )
        options.on_report(report)
    return root


@contextlib.contextmanager
def _reading_early(driver: Driver, team: Team) -> Iterator[Future[tuple[Manifest, bytes]] | None]:
    """The manifest, on its way while the body looks at the state; None where ranks read it once for
    all of a host. Where the body raises, it is not read on."""
    if team.world > 1:
        yield None
        return
    early = start(read_manifest(driver))
    try:
        yield early
    except BaseException:
        early.cancel()
        raise


def release_memory() -> None:
    """Give back the host memory that asynchronous saves keep for the next one."""
    release_pools()


def _checked_budget(budget_nbytes: int) -> int:
    if budget_nbytes < _BUDGET_MIN_NBYTES:
        raise UsageError(
            f"a budget of {budget_nbytes:,} bytes is too small",
            advice=f"Give at least {_BUDGET_MIN_NBYTES:,}.",
        )
    return budget_nbytes
