"""The API: save, async_save, load. Each is one call, on every rank alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..drivers.registry import open_driver
from ..errors import UsageError
from .begin import Destination, Lazy, UriLike, begin_save, closing, told
from .capture.lazy import fence
from .capture.state import flatten
from .format.packed import Compression, checked_compression
from .frameworks.process_group import current_rank, current_team
from .handle import SaveHandle
from .load import Exchanging, LoadJob, finish, run_build, run_load
from .pipeline.buffers import release_pools
from .pipeline.engine import start
from .report import LoadReport, SaveReport

__all__ = ["BUDGET_NBYTES", "DEADLINE_S", "async_save", "fence", "load", "release_memory", "save"]

BUDGET_NBYTES = 512 << 20
DEADLINE_S = 300.0
_BUDGET_MIN_NBYTES = 32 << 20


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
) -> SaveReport:
    """Save ``state`` as the checkpoint ``uri``; return when it is committed, on every rank.

    ``state`` is a nested dict (or list, tuple) of tensors, DTensors, arrays, numbers, strings, bytes, and objects with a
    state: modules, optimizers, schedulers, random generators. In a distributed job every rank calls this with its own
    part; plain tensors that are equal on all ranks are stored once, others per rank. ``step`` is recorded with the
    checkpoint (default: ``state["step"]`` if that is an int). Extra host memory stays within ``budget_nbytes``.
    ``storage_options`` are options of the storage, by name; those in the URI win over them.

    ``timeout_s`` after the call, a save that is not committed ends: what is under way is cut, what was written is removed as
    far as the storage answers, and DeadlineError is raised. None: every operation has a deadline, the save as a whole has
    none.

    ``compression="lz4"`` stores blocks that shrink compressed: for states that do, as trained weights do not, or storage
    that is slow. Such a checkpoint is read as any other, where lz4 is installed (``pip install 'holdfast[lz4]'``).

    Atomic: a checkpoint that was at ``uri`` is replaced whole, or, after any failure, untouched. Raises StateError for
    what cannot be saved and UriError, both before any I/O; SaveError, StorageError; RankFailedError when another rank
    fails; DeadlineError when one shows no sign of life for ``deadline_s`` seconds, or ``timeout_s`` are over.
    """
    _checked_budget(budget_nbytes)
    compression = checked_compression(compression)
    to = Destination(uri, storage_options)
    handle, future = begin_save(
        to, state, step, budget_nbytes, deadline_s, lazy=False, timeout_s=timeout_s, compression=compression
    )
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
) -> SaveHandle:
    """Begin to save ``state`` as the checkpoint ``uri``; return when every byte of it is copied to host memory.

    The state may change as soon as this returns. With ``budget_nbytes`` smaller than this rank's image, copying runs at
    the pace of the storage, and this returns accordingly later; None keeps room for the whole image, also between saves
    (see :func:`release_memory`). The rest as in :func:`save`; what fails later is raised by the handle's ``wait()``, and
    logged. A save to a URI to which this process is still saving waits for that one first.

    ``lazy``: return at once, and copy while training goes on. The next step of any torch optimizer waits for what is left
    of that; whatever else writes to the state calls :func:`fence` first. A write that came too early fails the save with a
    SaveError, if torch counts it. ``lazy="prove"`` reads every tensor twice more, and finds any change by digests.
    """
    if budget_nbytes is not None:
        _checked_budget(budget_nbytes)
    compression = checked_compression(compression)
    to = Destination(uri, storage_options)
    handle, _future = begin_save(
        to, state, step, budget_nbytes, deadline_s, lazy=lazy, timeout_s=timeout_s, compression=compression
    )
    if not lazy:
        handle.captured.wait()
    return handle


def load(
    uri: UriLike,
    into: Any = None,
    *,
    strict: bool = True,
    cast: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    exchange: Exchanging = "auto",
    on_report: Callable[[LoadReport], None] | None = None,
) -> Any:
    """Load the checkpoint ``uri`` into ``into``, whatever layouts the two have; return ``into``.

    Tensors, DTensors and arrays are filled in place; small values are replaced in their containers; modules, optimizers
    and other objects get their state back. Without ``into``, build and return the whole state, on the CPU, as this rank
    saved it. In a distributed job every rank calls this with its own part.

    ``strict``: what is in the state or in the checkpoint alone, and what differs in shape or dtype, is raised as one
    MismatchError that lists it all, before anything is read. ``strict=False`` fills what both have; shapes and dtypes
    must fit all the same, but ``cast=True`` converts dtypes. Every byte is verified before it is used.
    ``storage_options`` as in :func:`save`. ``on_report`` is told what was read, on this rank.

    ``exchange``: what several ranks want is read by one of them, which hands it to the others at once. "auto": among ranks
    of one host, through memory that they share, where it is enough to matter. True: among all ranks, over the network too.
    False: each rank reads for itself. All ranks give the same. Raises
    NotACheckpointError, DamagedError, StorageError, RankFailedError, DeadlineError; after those, tensors may be partly
    filled.
    """
    began_s = time.perf_counter()
    budget_nbytes = _checked_budget(budget_nbytes)
    if exchange not in (True, False, "auto"):
        raise UsageError(f"exchange={exchange!r}", advice='Give "auto", True or False.')
    fence()
    driver = open_driver(uri, **(storage_options or {}))
    if into is None:
        root, manifest, reader = start(closing(driver, run_build(driver, current_rank(), budget_nbytes))).result()
    else:
        team = current_team(deadline_s, saving=False)
        flat = told(team, driver, flatten, into, loading=True)
        job = LoadJob(flat, strict=strict, cast=cast, budget_nbytes=budget_nbytes, exchange=exchange)
        manifest, reader = start(closing(driver, run_load(driver, team, job))).result()
        root = finish(job, manifest, team.rank)
        root = into if any(s.parent < 0 for s in flat.subtrees) else root  # into is itself an object with a state
    if on_report is not None:
        seconds = time.perf_counter() - began_s
        read = (reader.bytes_wanted, reader.bytes_read)
        on_report(LoadReport(driver.uri, manifest.attempt, *read, seconds, reader.bytes_received))
    return root


def release_memory() -> None:
    """Give back the host memory that asynchronous saves keep for the next one."""
    release_pools()


def _checked_budget(budget_nbytes: int) -> int:
    if budget_nbytes < _BUDGET_MIN_NBYTES:
        raise UsageError(
            f"a budget of {budget_nbytes:,} bytes is too small", advice=f"Give at least {_BUDGET_MIN_NBYTES:,}."
        )
    return budget_nbytes
