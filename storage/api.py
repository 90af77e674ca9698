"""The top-level API: save, async_save, load. Every rank of a job calls them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar, overload

from .format.packed import Compression
from .format.part import Only
from .operations.call_errors import announcing_errors_of_call
from .operations.foreign_formats import explains
from .operations.loading.differences import Strict
from .operations.loading.load import Exchanging
from .operations.loading.start_load import load_state
from .operations.location import Place, UriLike
from .operations.options import DEADLINE_S, Lazy, LoadOptions, SaveOptions
from .operations.report import LoadReport, SaveReport
from .operations.saving.handle import SaveHandle, StageHandle
from .operations.saving.save_job import Admit
from .operations.saving.start_save import Destination, begin_save, step_of_state
from .operations.telemetry import Telemetry
from .ranks.process_group import Group, acting_in
from .runtime.buffers import release_pools
from .runtime.engine import check_may_wait, interrupt
from .runtime.progress import ProgressCallback
from .saver import image_memory
from .state.capture.lazy import fence
from .state.flattening.walk import Default

__all__ = ["async_save", "fence", "load", "release_memory", "save"]

T = TypeVar("T")


def save(
    uri: UriLike,
    state: object,
    *,
    step: int | None = None,
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    timeout_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    compression: Compression | None = None,
    allow_empty: bool = False,
    overwrite: bool = True,
    base: UriLike | None = None,
    default: Default | None = None,
    process_group: Group = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
) -> SaveReport:
    """Save ``state`` as the checkpoint ``uri``; return once it is committed, on every rank.

    ``state`` is a nested dict (or list, tuple) of tensors, DTensors, arrays, numbers, strings,
    bytes, and objects with a state: modules, optimizers, schedulers, random generators. In a
    distributed job every rank calls this with its own part. Plain tensors that are equal on all
    ranks are stored once, others per rank. ``step`` is recorded in the checkpoint (default:
    ``state["step"]`` if that is an int). All ranks of a host
    together take at most ``budget_nbytes`` of extra memory there; None: 512 MiB each.
    ``storage_options`` are storage options by name; options in the URI take precedence.

    ``timeout_s``: if the save is not committed this many seconds after the call, cancel it, delete
    the data already written if the storage still responds, and raise DeadlineError. None: every
    operation has a deadline, but the save as a whole has none.

    ``compression="lz4"`` compresses blocks that shrink. It pays off for compressible states
    (trained weights are not) and for slow storage. Compressed checkpoints load like any other,
    provided lz4 is installed (``pip install lz4``).

    A state whose tensors have no elements, or whose weights have none, raises StateError, because
    some frameworks keep the elements elsewhere. ``allow_empty=True`` saves it anyway.

    With ``overwrite=False`` every rank raises ExistsError if there is a checkpoint at ``uri``,
    before anything is written or at the commit. Of several such saves that overlap, one succeeds,
    except on storage without atomic exclusive puts. All ranks give the same value.

    ``base``: an earlier checkpoint on the same storage. Bytes that are equal there are copied by
    the storage and not sent, if it can do that; the new checkpoint is complete, and no longer needs
    the other one. Not with ``compression``. Everything is written if there is no such checkpoint,
    or its layout differs; ``SaveReport.why_whole`` says so.

    ``default`` works like the argument of :func:`json.dumps`: it is called with each value that
    cannot be stored, such as a set, an enum or a dataclass. It returns a replacement, which is
    converted in turn if need be, or raises TypeError, which becomes a StateError with the path. A
    load returns the replacement; nothing converts it back.

    ``process_group``: the ranks that take part, if not all ranks of the job; the checkpoint then
    describes a job of just these ranks. ``"self"``: this rank alone.

    ``progress(done_nbytes, total_nbytes)`` is called from time to time on a separate thread, with
    the bytes of this rank's image written so far and the size of the image. An exception from it
    aborts the save.

    ``telemetry``: the report includes the time spent in each stage. ``"off"`` records nothing.

    The save is atomic: an existing checkpoint at ``uri`` is replaced as a whole, or left untouched
    after any failure. Raises StateError if a value cannot be saved and UriError, both before any
    I/O; SaveError; StorageError; RankFailedError if another rank fails; DeadlineError if a rank
    shows no sign of life for ``deadline_s`` seconds, or after ``timeout_s``.
    """
    check_may_wait()
    options = SaveOptions(
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        compression=compression,
        allow_empty=allow_empty,
        overwrite=overwrite,
        default=default,
        progress=progress,
        telemetry=telemetry,
    )
    handle, future = begin(
        uri, state, step, options, storage_options, process_group, base=base, logs_failure=False
    )
    reach(handle.durable, future)
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
    overwrite: bool = True,
    base: UriLike | None = None,
    default: Default | None = None,
    process_group: Group = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
) -> SaveHandle:
    """Start saving ``state`` as the checkpoint ``uri``; return once it is copied to host memory.

    The state may change as soon as this returns. All ranks of a host share ``budget_nbytes``. If a
    share is smaller than the rank's image, copying runs at the speed of the storage, and this
    returns accordingly later. None holds a buffer for the whole image and keeps it between saves
    (see :func:`release_memory`). Other parameters as in :func:`save`. Later failures are logged,
    and raised by the handle's ``wait()``.
    If this process is already saving to ``uri``, the new save starts after that one.

    If another thread or process modifies or frees host memory while it is being copied, the save
    fails with a SaveError that names the tensor. On an accelerator the copy is ordered after
    pending work on the caller's current streams. An eager save does not detect writes by other
    streams, nor writes to non-contiguous host tensors.

    ``lazy``: return at once, and copy while training continues. The next step of any torch
    optimizer waits until the copy is complete. Any other write before that fails the save with a
    SaveError, and later saves copy that tensor during the call; to avoid both, call :func:`fence`
    before writing. Tensors that are saved for the first time are copied during the call.
    ``lazy="prove"`` also compares checksums of tensors in host memory.
    """
    if not lazy:
        check_may_wait()
    options = SaveOptions(
        asynchronous=True,
        lazy=lazy,
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        compression=compression,
        allow_empty=allow_empty,
        overwrite=overwrite,
        default=default,
        progress=progress,
        telemetry=telemetry,
    )
    handle, future = begin(uri, state, step, options, storage_options, process_group, base=base)
    if not lazy:
        reach(handle.captured, future)
    return handle


def begin(
    uri: UriLike,
    state: object,
    step: int | None,
    options: SaveOptions,
    storage_options: Mapping[str, object] | None = None,
    process_group: Group = None,
    *,
    base: UriLike | None = None,
    admit: Admit | None = None,
    logs_failure: bool = True,
) -> tuple[SaveHandle, Future[None]]:
    """Begin a save; for the arguments, see :func:`.operations.saving.start_save.begin_save`."""
    if step is None:
        step = step_of_state(state)
    with acting_in(process_group):
        with announcing_errors_of_call("save", uri, step, options.deadline_s):
            options.check()
            earlier = None
            if base is not None:
                earlier = options.base_at(Place.of(base, storage_options), lambda: "")
            to = Destination(uri, storage_options, base=earlier)
        return begin_save(to, state, step, options, admit=admit, logs_failure=logs_failure)


def reach(stage: StageHandle, future: Future[None]) -> None:
    """Wait until a save reaches a stage; cancel the save if the user interrupts that. Raises its
    error."""
    try:
        stage.wait()
    except KeyboardInterrupt:
        interrupt(future)
        raise


@overload
def load(
    uri: UriLike,
    into: None = ...,
    *,
    only: Only | None = ...,
    strict: Strict = ...,
    cast: bool = ...,
    budget_nbytes: int | None = ...,
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
    budget_nbytes: int | None = ...,
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
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    exchange: Exchanging = "auto",
    process_group: Group = None,
    on_report: Callable[[LoadReport], None] | None = None,
    progress: ProgressCallback | None = None,
    telemetry: Telemetry = "on",
) -> object:
    """Load the checkpoint ``uri`` into ``into``, from any layout into any other; return ``into``.

    Tensors, DTensors and arrays are filled in place; small values are replaced in their containers;
    modules, optimizers and other objects get their state back. Without ``into``, build and return
    the whole state on the CPU, as this rank saved it. In a distributed job every rank calls this
    with its own part.

    ``only``: the name of a part of the checkpoint, such as ``"model"`` or ``"model.encoder"``, or
    the tuple of its keys, such as ``("optim", 0)``. That part is loaded into ``into``, or
    returned; the rest of the checkpoint is ignored, also by ``strict``.

    ``strict``: which names must exist on both sides. True: all names of the state and of the
    checkpoint. ``"state"``: all names of the state; extra names in the checkpoint are skipped.
    ``"checkpoint"``: all names of the checkpoint; extra names in the state stay as they are. False:
    none; only the common names are loaded. A tensor whose memory is filled under other names, such
    as a tied weight, needs no name of its own in the checkpoint. Skipped names are logged, and
    listed in the report. All mismatches are raised together as one MismatchError, before anything
    is filled: missing names and, in every mode, different shapes or dtypes, objects where the
    checkpoint has something else, and a state with no name in common with the checkpoint.
    ``cast=True`` converts dtypes. Every byte is verified before use. ``storage_options`` and
    ``budget_nbytes`` as in :func:`save`. ``on_report`` is called with the report of this rank.

    ``exchange``: data that several ranks need is read by one of them, which passes it on to the
    others. "auto": among ranks of one host, through shared memory, if the amount is worth it. True:
    among all ranks, over the network too. False: each rank reads for itself. All ranks must pass
    the same value.

    ``process_group``: the ranks that take part, if not all ranks of the job; ``"self"``: this rank
    alone.

    ``progress(done_nbytes, total_nbytes)`` is called from time to time on a separate thread, with
    the bytes of the checkpoint that this rank has read or received so far, and the total it needs.
    An exception from it aborts the load. ``telemetry`` as in :func:`save`.

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
    """Free the host memory that asynchronous saves keep between saves."""
    release_pools()
    image_memory.release_memory()
