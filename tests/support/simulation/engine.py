"""The real engine, without threads, on virtual time, with chunks of one page.

These parts are replaced: the clock, random names, the host name, the worker threads, the system
calls of the local driver, and the pauses between two looks at the job's store (looks that cannot
find anything new are left out). Everything else is the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import time as real_time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial, wraps
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from holdfast.drivers.local import driver as local
from holdfast.drivers.local import files as local_files
from holdfast.drivers.local import io as local_io
from holdfast.drivers.local import names as local_names
from holdfast.drivers.local import tree as local_tree
from holdfast.drivers.threads import Threads
from holdfast.errors import StorageError
from holdfast.planner import image
from holdfast.storage.format import fragment, manifest, packed
from holdfast.storage.operations.loading import load
from holdfast.storage.operations.maintenance import copy, prune
from holdfast.storage.operations.reading import reader
from holdfast.storage.operations.saving import global_plan, image_save, plan_leader, save
from holdfast.storage.operations.saving import keeper_save as kept_save
from holdfast.storage.pipeline import (
    base,
    borrowing,
    capture,
    chunks,
    image_copier,
    image_reader,
    image_writer,
    unpacking,
    verifier,
)
from holdfast.storage.protocol import attempt, commit
from holdfast.storage.protocol import current as committed
from holdfast.storage.ranks import member, rendezvous, store_team
from holdfast.storage.saver import finishing
from holdfast.storage.state import plan

from .loop import PROCESS, check_alive

if TYPE_CHECKING:
    from .world import World


CHUNK_NBYTES = 8192
BLOCK_NBYTES = 4096
PIECE_NBYTES = 4096
"""Half a chunk, so that reads of object stores arrive in several pieces."""
PACKED_PAGE_NBYTES = 256
_FOLDERS = (local, local_files, local_io, local_tree)


_host: World | _Calm | None = None
_memory: dict[str, dict[Any, Any]] = {}


def hosted(host: World, sim_os: Any, sim_fcntl: Any, sim_io: Any) -> None:
    """Let the engine run on ``host`` from now on."""
    global _host  # noqa: PLW0603
    _host = host
    for module in _FOLDERS:
        if hasattr(module, "os"):
            module.os = sim_os  # type: ignore[attr-defined]
    local_tree.fcntl, local.io = sim_fcntl, sim_io  # type: ignore[attr-defined]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run the engine, within a ``with`` block, on a host where nothing takes time."""
    global _host  # noqa: PLW0603
    before, _host = _host, _Calm()
    try:
        yield
    finally:
        _host = before


class _Calm:
    """A host where nothing takes time."""

    def __init__(self) -> None:
        self._tokens = 0

    def wall_s(self) -> float:
        return 1e9

    def token(self) -> int:
        self._tokens += 1
        return self._tokens

    def cpu_s(self) -> float:
        return 0.0

    def delay_s(self) -> float:
        return 0.0

    def after(self, delay_s: float) -> Awaitable[None]:
        return asyncio.sleep(delay_s)

    def committing(self, root: str, attempt: str) -> None:
        pass


def forget() -> None:
    """Forget the cached results, which an engine broken on purpose computes differently."""
    for remembered in _memory.values():
        remembered.clear()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Run the engine of this process, within a ``with`` block, only in simulations."""
    patches = list(_patches())
    patches += [(m, "os", m.os) for m in _FOLDERS if hasattr(m, "os")]
    patches += [(local_tree, "fcntl", local_tree.fcntl), (local, "io", local.io)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    defaults = manifest.Manifest.__init__.__defaults__
    assert defaults is not None
    try:
        manifest.Manifest.__init__.__defaults__ = (CHUNK_NBYTES, BLOCK_NBYTES, *defaults[2:])
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        manifest.Manifest.__init__.__defaults__ = defaults
        forget()


def _patches() -> Iterator[tuple[ModuleType | type, str, Any]]:
    from .savers import SimSaverSave  # which needs this module

    engine = (
        capture,
        chunks,
        finishing,
        global_plan,
        committed,
        copy,
        image_copier,
        image_reader,
        image_writer,
        kept_save,
        load,
        member,
        plan_leader,
        reader,
        save,
        store_team,
        unpacking,
        verifier,
    )
    for module in engine:
        if hasattr(module, "offload"):
            yield module, "offload", _offload
    clock = SimpleNamespace(
        time=lambda: _here().wall_s(),
        perf_counter=lambda: _here().wall_s(),
        gmtime=lambda: real_time.gmtime(_here().wall_s() // 3600 * 3600),
        strftime=real_time.strftime,
    )
    for module in (attempt, prune, local_tree):
        yield module, "time", clock
    names = SimpleNamespace(token_hex=lambda n: f"{_here().token():0{2 * n}x}")
    for module in (attempt, local_names):
        yield module, "secrets", names
    yield commit, "check_images", _committing(commit.check_images)
    yield (
        plan,
        "lay_out",
        partial(image.lay_out, chunk_nbytes=CHUNK_NBYTES, block_nbytes=BLOCK_NBYTES),
    )
    yield packed, "PAGE_NBYTES", PACKED_PAGE_NBYTES
    for module in (base, fragment):
        yield module, "CHUNK_NBYTES", CHUNK_NBYTES
        yield module, "BLOCK_NBYTES", BLOCK_NBYTES
    yield borrowing, "RUN_BLOCKS_MIN", 1
    yield local, "Threads", _NoThreads
    yield image_save, "SaverSave", SimSaverSave
    for module in (member, rendezvous, store_team):
        yield module, "asyncio", _Patient()
    yield member, "host_key", lambda: getattr(PROCESS.get(), "host", None)


def _here() -> World | _Calm:
    assert _host is not None
    return _host


async def _offload(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` after the delay of a thread; run it even if the caller is cancelled."""
    check_alive()
    wait_s = _here().cpu_s()
    if wait_s:
        try:
            await _here().after(wait_s)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                function(*args)
            raise
    return function(*args)


def _committing(real: Any) -> Any:
    @wraps(real)
    async def see_all(driver: Any, manifest: Any) -> None:
        if driver.traits.exclusive_is_atomic:
            _here().committing(driver.uri, manifest.attempt)
        await real(driver, manifest)

    return see_all


class _NoThreads(Threads):
    """``drivers.threads.Threads`` without threads.

    A call waits for its turn, and then runs instantaneously.
    """

    def __init__(self, count: int, *, uri: str) -> None:
        self._uri, self._closed = uri, False

    async def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise StorageError("the driver is closed", uri=self._uri)
        check_alive()
        await _here().after(_here().delay_s())
        return call(*args, **kwargs)

    async def close(self, timeout_s: float) -> None:
        self._closed = True


class _Patient:
    """``asyncio`` for the modules in which ranks wait for each other.

    A short pause lasts until the job's store changes, or for a second.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay_s: float) -> None:
        process = PROCESS.get()
        store = getattr(process, "store", None)
        if store is None or delay_s > 0.1:
            await asyncio.sleep(delay_s)
        else:
            await store.changed(1.0)


def remembered(name: str) -> dict[Any, Any]:
    """Return the cache of that name; clear it when it has grown too large."""
    known = _memory.setdefault(name, {})
    if len(known) > 3000:
        known.clear()
    return known
