"""The keeper process: holds the lock of its run, accepts trainers, and exits when unused.

It is a newly executed process in a session of its own, never a fork of a trainer, so signals to the
trainer's group do not reach it. It does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ...errors import HoldfastError, UsageError
from ..arenas.folder import KeeperFolder
from ..arenas.hosts import KeeperHost
from ..arenas.label import GenerationId
from ..arenas.messages import Rebuild, Refused
from ..arenas.numa import reset_policy
from ..arenas.sockets import Line, listening
from ..runtime.engine import CPU_THREADS
from ..serving.options import (
    ServeOptions,
    address_and_port,
    interface_and_port,
    is_token,
    new_token,
)
from .decisions.choice import Choice, Stock, choices
from .descriptor_store import DescriptorStore
from .detached import UPGRADE
from .keeper import Keeper
from .options import KeeperOptions, confine
from .reading import Unheard, stock_of
from .serving.serve import serve
from .succession import Estate, RunningError, take_over

if TYPE_CHECKING:
    from .serving.memory_server import MemoryServer


TOKEN_VARIABLE = "HOLDFAST_PEER_TOKEN"
"""Environment variable with the token; without it, each keeper makes one."""
GRACE_S = 30.0
"""Time that a stopping keeper allows its tasks and trainers to finish."""
FILES_MAX = 1 << 16
"""Open files that a keeper asks for, if the system allows them."""
_LOOK_S = 1.0
_SPARE_LOOK_S = 2.0
_ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _locked(folder: KeeperFolder, fd: int) -> Iterator[int]:
    """Hold the lock of the run for the body, and yield its descriptor. ``fd``: the one that the
    previous keeper has handed over, -1 without one. Raises RunningError if another keeper holds the
    lock."""
    if fd < 0:
        fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunningError(f"a keeper of this run is already running: {folder.path}") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)


async def keep(
    options: KeeperOptions,
    folder: KeeperFolder,
    store: DescriptorStore | None = None,
    *,
    is_service: bool = True,
    estate: Estate | None = None,
    spare_of: Sequence[str] = (),
) -> None:
    """Run the keeper of a run until it is stopped (by SIGTERM, SIGINT or a message) or has been
    idle for ``linger_s``. ``store``: keeps the memory while a keeper service restarts.
    ``is_service``: False if a trainer has started it; then it also exits once training is finished
    and its last step in storage, or when a successor asks for its memory. ``estate``: memory of the
    previous keeper. ``spare_of``: addresses of keepers; while no trainer is connected, rebuild here
    what their job has lost. Raises RunningError, UsageError, OSError."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if spare_of and not token:
        raise UsageError(
            "a spare needs the token of the keepers that it stands in for",
            advice=f"Set {TOKEN_VARIABLE} to the same value for all keepers of the run.",
        )
    folder.make()
    estate = estate or Estate()
    with contextlib.closing(estate), _locked(folder, estate.lock) as lock:
        try:
            confine(options)
        except OSError as error:
            raise UsageError(
                f"a keeper cannot run on the CPUs {options.cpus}: {error.strerror}",
                advice="Name CPUs that this process may use.",
            ) from error
        _raise_file_limit()
        if not is_service:
            reset_policy()  # the rank that started this process may be bound to one node
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(CPU_THREADS, "holdfast-cpu"))
        name, port = folder.read_identity()
        name = name or f"keeper-{secrets.token_hex(4)}"
        keeper = Keeper(options, name, store, is_service=is_service)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, keeper.ended.set)
        try:
            is_over = False
            while not is_over:
                async with contextlib.AsyncExitStack() as serving:
                    async with _accepting(keeper, folder):
                        if store is not None:  # early: a service manager does not wait for long
                            store.say_ready()
                        await keeper.recall(estate)
                        await serving.enter_async_context(_served(keeper, folder, port))
                        keeper.welcomes()
                        await estate.confirm()
                        where = os.getpid(), folder.path
                        _log.info("keeper of run %s, process %d, %s", options.run, *where)
                        job = [KeeperHost("", "", one, token, keeper.host.tls) for one in spare_of]
                        async with _preparing(keeper, job):
                            await _until_ended(keeper)
                    await keeper.finish(GRACE_S)  # still together with the other keepers
                    if not keeper.succession.is_pending:
                        await keeper.reporting.close()
                    keeper.reporting.wake()
                is_over = await keeper.succession.hand_over(keeper.pool, keeper.options, lock)
                keeper.ended.clear()
            await keeper.reporting.close()
        finally:
            await keeper.close()
        _log.info("keeper of run %s is stopping", options.run)


def _raise_file_limit() -> None:
    """Allow as many open files as the system does: a leader has connections to all keepers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.asynccontextmanager
async def _accepting(keeper: Keeper, folder: KeeperFolder) -> AsyncIterator[None]:
    sock = listening(folder.socket)
    accepting = asyncio.ensure_future(_accept(sock, keeper))
    try:
        yield
    finally:
        accepting.cancel()
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder.socket)


@contextlib.asynccontextmanager
async def _served(keeper: Keeper, folder: KeeperFolder, port: int) -> AsyncIterator[None]:
    """Serve the keeper's memory over HTTP during the body, if configured.

    The token comes from the environment, else from the previous keeper, else it is new; it is
    written to the keeper's folder. ``port``: port of the previous keeper, reused if possible so
    that other hosts find this keeper in its place.
    """
    options = keeper.options
    if options.serve is None:
        folder.write_identity(keeper.name, 0)
        yield
        return
    interface, named_port = interface_and_port(options.serve)
    known = folder.read_token()
    token = os.environ.get(TOKEN_VARIABLE) or (known if is_token(known) else new_token())
    folder.write_token(token)
    served = ServeOptions(token, interface, named_port, options.certificate, options.key)
    async with contextlib.AsyncExitStack() as stack:
        server: MemoryServer | None = None
        if port and not named_port:
            with contextlib.suppress(OSError):  # somebody else has taken it
                preferred = serve(keeper.catalog, replace(served, port=port), keeper.reporting.hear)
                server = await stack.enter_async_context(preferred)
        if server is None:
            server = await stack.enter_async_context(
                serve(keeper.catalog, served, keeper.reporting.hear)
            )
        folder.write_identity(keeper.name, server.port)
        keeper.serves_at(address_and_port(server.address, server.port), token)
        _log.info("memory is served at %s", keeper.address)
        yield


class Spare:
    """A keeper without trainers that prepares to replace a lost one. ``job``: keepers of the job to
    begin with.

    It asks the keepers of the job, again and again, for their inventories. If the newest generation
    that can be resumed has lost images, it rebuilds them, so that a job which restarts on its host
    finds them there.
    """

    def __init__(self, keeper: Keeper, job: Sequence[KeeperHost]) -> None:
        self._keeper = keeper
        self._job = tuple(job)
        self._certificate = keeper.options.certificate
        self._made: GenerationId | None = None
        """Generation that this spare has rebuilt images of."""
        self._problem = ""

    async def look(self) -> bool:
        """Ask the keepers of the job once, and rebuild lost images. Return whether any keeper has
        answered. Does nothing while one of them is slow: its images are not lost."""
        answers = await asyncio.gather(*(stock_of(host, self._certificate) for host in self._job))
        stocks = [answer for answer in answers if isinstance(answer, Stock)]
        newest = max(stocks, key=lambda stock: stock.inventory.epoch, default=None)
        if newest is None:
            return False
        if newest.inventory.hosts and newest.inventory.hosts != self._job:
            self._job = newest.inventory.hosts  # these have names, which the first ones lack
            return True
        is_slow = any(isinstance(answer, Unheard) and answer.listens for answer in answers)
        if is_slow or not self._keeper.is_unused:
            return True
        own = Stock(self._keeper.host, self._keeper.inventory())
        found, _ = choices([*stocks, own], [own.host.name], lambda generation: True)
        if found:
            await self._prepare(found[0], tuple(stock.host for stock in stocks))
        return True

    async def _prepare(self, choice: Choice, hosts: tuple[KeeperHost, ...]) -> None:
        if self._made is not None and self._made != choice.generation:
            self._keeper.pool.discard(self._made)
            self._made = None
        for lost in choice.rebuilt:
            if not self._keeper.is_unused:
                return
            request = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, hosts)
            refused = await self._keeper.rebuilding.rebuild(request)
            if refused is None:
                self._made = choice.generation
            self._note(refused, choice.generation)

    def _note(self, refused: Refused | None, generation: GenerationId) -> None:
        problem = "" if refused is None else f"step {generation.step}: {refused.text}"
        if problem and problem != self._problem:
            _log.warning("this spare cannot hold everything: %s", problem)
        self._problem = problem


@contextlib.asynccontextmanager
async def _preparing(keeper: Keeper, job: Sequence[KeeperHost]) -> AsyncIterator[None]:
    """Rebuild what the job of these keepers has lost, during the body, while no trainer is
    connected. Does nothing without any."""
    spare = Spare(keeper, job)

    async def prepare() -> None:
        while job:
            await asyncio.sleep(_SPARE_LOOK_S)
            try:
                if keeper.is_unused and await spare.look():
                    keeper.note_use()
            except Exception:  # must not end the search for lost hosts
                _log.exception("this spare cannot look for lost images")

    preparing = asyncio.ensure_future(prepare())
    try:
        yield
    finally:
        preparing.cancel()
        await asyncio.wait([preparing])


async def _accept(sock: socket.socket, keeper: Keeper) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(sock)
        except OSError as error:  # too many open files, for example
            _log.warning("a connection cannot be accepted: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        keeper.run_later(keeper.attend(Line(connection)))


async def _until_ended(keeper: Keeper) -> None:
    while not keeper.ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await keeper.ended.wait()
        if not keeper.succession.is_service and keeper.is_finished:
            _log.info("training is finished, and its last step is in storage")
            return
        if keeper.idle_s > keeper.options.linger_s:
            _log.info("idle for %.0f s", keeper.options.linger_s)
            return


async def _keep(given: dict[str, Any], flags: Collection[str]) -> None:
    folder = KeeperFolder.of(given["run"])
    estate = Estate()
    if flags:
        estate = await take_over(folder, always=UPGRADE in flags)
    known = {one.name for one in fields(KeeperOptions)}
    wanted = {name: value for name, value in estate.options.items() if name in known} | given
    await keep(KeeperOptions(**wanted), folder, is_service=False, estate=estate)


def main(arguments: Sequence[str]) -> int:
    """Run a keeper started by a trainer, with its options as JSON. Return the exit status.
    With TAKE_OVER, take the memory of a running keeper of another version over, and its other
    options; with UPGRADE, of any version."""
    text, *flags = arguments
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        asyncio.run(_keep(json.loads(text), flags))
    except RunningError as error:
        _log.info("%s", error)
        return 0  # another process of this host was faster
    except (HoldfastError, OSError) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
