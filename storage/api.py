"""The API: save, async_save, load. Each is one call, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from .format.packed import Compression
from .operations.call_errors import announcing_errors_of_call
from .operations.differences import Strict
from .operations.foreign import explains
from .operations.handle import SaveHandle
from .operations.load import Exchanging
from .operations.options import (
    BUDGET_NBYTES,
    DEADLINE_S,
    Lazy,
    LoadOptions,
    Only,
    SaveOptions,
    UriLike,
)
from .operations.report import LoadReport, SaveReport
from .operations.start_load import load_state
from .operations.start_save import Destination, begin_save, step_of_state
from .operations.telemetry import Telemetry
from .ranks.process_group import Group, acting_in
from .runtime.buffers import release_pools
from .runtime.engine import check_may_wait, interrupt
from .runtime.progress import ProgressCallback
from .state.default import Default
from .state.lazy import fence

__all__ = ["async_save", "fence", "load", "release_memory", "save"]

T = TypeVar("T")


def save(
    uri: UriLike,
    state: object,
    *,
    step: int | None = None,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    timeout_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    default: Default | None = None,
    process_group: Group = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
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

    ``default``: as that of :func:`json.dumps`. Called with each value that cannot be stored as it
    is, such as a set, an enum or a dataclass, it returns what is stored instead, of which the same
    holds; or it raises TypeError, which becomes a StateError with the path. Nothing undoes it: a
    load gives what it has returned.

    ``process_group``: the ranks that call this, where those are not all ranks of the job; the
    checkpoint is that of a job of these ranks. ``"self"``: this rank alone.

    ``progress(done_nbytes, total_nbytes)`` is called now and then on a thread of its own, with the
    bytes of this rank's image that are written, and all of them. What it raises ends the save.

    ``telemetry``: the report says where the time went, stage by stage. ``"off"`` records nothing.

    Atomic: a checkpoint that was at ``uri`` is replaced whole, or, after any failure, untouched.
    Raises StateError for what cannot be saved and UriError, both before any I/O; SaveError,
    StorageError; RankFailedError when another rank fails; DeadlineError when one shows no sign of
    life for ``deadline_s`` seconds, or ``timeout_s`` are over.
    """
    check_may_wait()
    if step is None:
        step = step_of_state(state)
    with acting_in(process_group):
        with announcing_errors_of_call("save", uri, step, deadline_s):
            options = SaveOptions(
                budget_nbytes=budget_nbytes,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                compression=compression,
                allow_empty=allow_empty,
                default=default,
                progress=progress,
                telemetry=telemetry,
            )
            options.check()
            to = Destination(uri, storage_options)
        handle, future = begin_save(to, state, step, options, logs_failure=False)
    try:
        handle.wait()
    except KeyboardInterrupt:
        interrupt(future)
        raise
    assert handle.report is not None
    return handle.report


def async_save(
    uri: UriLike,
    state: object,
    *,
    step: int | None = None,
    lazy: Lazy = False,
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    timeout_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    default: Default | None = None,
    process_group: Group = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
) -> SaveHandle:
    """Begin to save ``state`` as the checkpoint ``uri``; return when every byte of it is copied to
    host memory.

    The state may change as soon as this returns. With ``budget_nbytes`` smaller than this rank's
    image, copying runs at the pace of the storage, and this returns accordingly later; None keeps
    room for the whole image, also between saves (see :func:`release_memory`). The rest as in
    :func:`save`; what fails later is raised by the handle's ``wait()``, and logged. A save to a URI
    to which this process is still saving waits for that one first.

    Host memory that another thread or process writes to, or frees, while it is copied fails the
    save with a SaveError that names the tensor. On an accelerator the copy follows the work of the
    caller's current streams; an eager save does not notice writes by other streams, nor to host
    tensors that are not contiguous.

    ``lazy``: return at once, and copy while training goes on. The next step of any torch optimizer
    waits for what is left of that. A write that came too early, by whatever means, fails the save
    with a SaveError, and that tensor is copied at the call in later saves; :func:`fence` before it
    avoids both. Tensors that are saved for the first time are copied at the call. ``lazy="prove"``
    compares sums of tensors in host memory, too.
    """
    if not lazy:
        check_may_wait()
    if step is None:
        step = step_of_state(state)
    with acting_in(process_group):
        with announcing_errors_of_call("save", uri, step, deadline_s):
            options = SaveOptions(
                lazy=lazy,
                budget_nbytes=budget_nbytes,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                compression=compression,
                allow_empty=allow_empty,
                default=default,
                progress=progress,
                telemetry=telemetry,
            )
            options.check()
            to = Destination(uri, storage_options)
        handle, future = begin_save(to, state, step, options)
    if not lazy:
        try:
            handle.captured.wait()
        except KeyboardInterrupt:
            interrupt(future)
            raise
    return handle


@overload
def load(
    uri: UriLike,
    into: None = ...,
    *,
    only: Only | None = ...,
    strict: Strict = ...,
    cast: bool = ...,
    budget_nbytes: int = ...,
    deadline_s: float = ...,
    storage_options: Mapping[str, object] | None = ...,
    exchange: Exchanging = ...,
    process_group: Group = ...,
    on_report: Callable[[LoadReport], None] | None = ...,
    progress: ProgressCallback | None = ...,
    telemetry: Telemetry = ...,
) -> Any: ...
@overload
def load(
    uri: UriLike,
    into: T,
    *,
    only: Only | None = ...,
    strict: Strict = ...,
    cast: bool = ...,
    budget_nbytes: int = ...,
    deadline_s: float = ...,
    storage_options: Mapping[str, object] | None = ...,
    exchange: Exchanging = ...,
    process_group: Group = ...,
    on_report: Callable[[LoadReport], None] | None = ...,
    progress: ProgressCallback | None = ...,
    telemetry: Telemetry = ...,
) -> T: ...
@explains("uri", "storage_options")
def load(
    uri: UriLike,
    into: object = None,
    *,
    only: Only | None = None,
    strict: Strict = True,
    cast: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    exchange: Exchanging = "auto",
    process_group: Group = None,
    on_report: Callable[[LoadReport], None] | None = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
) -> object:
    """Load the checkpoint ``uri`` into ``into``, whatever layouts the two have; return ``into``.

    Tensors, DTensors and arrays are filled in place; small values are replaced in their containers;
    modules, optimizers and other objects get their state back. Without ``into``, build and return
    the whole state, on the CPU, as this rank saved it. In a distributed job every rank calls this
    with its own part.

    ``only``: the name of a part of the checkpoint, such as ``"model"`` or ``"model.encoder"``, or
    the keys that lead to it, such as ``("optim", 0)``. ``into`` is filled with that part, or that
    part is returned; the rest of the checkpoint is left alone, and not what ``strict`` is about.

    ``strict``: which names must be on both sides. True: all, of the state and of the checkpoint.
    ``"state"``: those of the state; what else the checkpoint has is left. False: none; what both
    have is loaded. What is left is logged, and listed in the report. Names that must fit and do
    not, and, in every mode, shapes and dtypes that differ, objects in whose place something else is
    stored, and a state of which nothing is stored at all, are raised as one MismatchError that
    lists them, before anything is filled. ``cast=True`` converts dtypes. Every byte is verified
    before it is used. ``storage_options`` as in :func:`save`. ``on_report`` is told what was read,
    on this rank.

    ``exchange``: what several ranks want is read by one of them, which hands it to the others at
    once. "auto": among ranks of one host, through memory that they share, where it is enough to
    matter. True: among all ranks, over the network too. False: each rank reads for itself. All
    ranks give the same.

    ``process_group``: the ranks that call this, where those are not all ranks of the job;
    ``"self"``: this rank alone.

    ``progress(done_nbytes, total_nbytes)`` is called now and then on a thread of its own, with the
    bytes of the checkpoint that this rank has read or received, and all that it will have. What it
    raises ends the load. ``telemetry`` as in :func:`save`.

    Raises NotACheckpointError, DamagedError, StorageError, RankFailedError, DeadlineError; after
    those, tensors may be partly filled.
    """
    options = LoadOptions(
        only=only,
        strict=strict,
        cast=cast,
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        storage_options=storage_options,
        exchange=exchange,
        on_report=on_report,
        progress=progress,
        telemetry=telemetry,
    )
    with acting_in(process_group):
        return load_state(uri, into, options)


def release_memory() -> None:
    """Give back the host memory that asynchronous saves keep for the next one."""
    release_pools()
