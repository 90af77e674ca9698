"""The process of a keeper: it holds its run's lock, listens to trainers, and ends when nobody needs
it any more.

It is executed anew, never forked from a trainer, in a session of its own: a signal to the trainer's
group does not reach it. It runs without torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import HoldfastError, UsageError
from ..arenas.folder import KeeperFolder
from ..arenas.line import Line, listening
from ..runtime.engine import CPU_THREADS
from .descriptor_store import DescriptorStore
from .keeper import Keeper
from .options import KeeperOptions, cpus_of
from .serve import address_and_port, interface_and_port, is_token, serve
from .serve_options import ServeOptions, new_token

if TYPE_CHECKING:
    from .http_server import MemoryServer

__all__ = ["RunningError", "keep", "main"]

TOKEN_VARIABLE = "HOLDFAST_PEER_TOKEN"
"""The variable that has the token, if that is not a new one for each keeper."""
RATE_VARIABLE = "HOLDFAST_PEER_MAX_BYTES_PER_S"
"""The variable by which drivers of other keepers' memory are told how much they may read."""
GRACE_S = 30.0
"""How long a keeper that is told to end goes on with what is under way, and for its trainers."""
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


class RunningError(UsageError):
    """Another keeper of the run is alive."""


@contextlib.contextmanager
def _locked(folder: KeeperFolder) -> Iterator[None]:
    """One keeper of a run at a time. Raises RunningError."""
    fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunningError(f"a keeper of this run is alive: {folder.path}") from error
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        yield
    finally:
        os.close(fd)


async def keep(
    options: KeeperOptions, folder: KeeperFolder, store: DescriptorStore | None = None
) -> None:
    """Be the keeper of a run until it is told to end (SIGTERM, SIGINT, or a message), or nobody
    has needed it for a while. ``store``: where this process is a service, what keeps its memory
    when it is started anew. Raises RunningError, UsageError, OSError."""
    folder.make()
    with _locked(folder):
        _confine(options)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(CPU_THREADS, "holdfast-cpu"))
        name, port = folder.read_identity()
        keeper = Keeper(options, name or f"keeper-{secrets.token_hex(4)}", store)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, keeper.ended.set)
        try:
            async with contextlib.AsyncExitStack() as serving:
                async with _accepting(keeper, folder):
                    if store is not None:  # not later: a service manager does not wait for long
                        store.say_ready()
                    await keeper.recall()
                    await serving.enter_async_context(_served(keeper, folder, port))
                    keeper.welcomes()
                    where = os.getpid(), folder.path
                    _log.info("keeper of run %s, process %d, %s", options.run, *where)
                    await _until_ended(keeper, options.linger_s)
                await keeper.finish(GRACE_S)  # together with other keepers, as before
                await keeper.leave()
        finally:
            await keeper.close()
        _log.info("keeper of run %s ends", options.run)


def _confine(options: KeeperOptions) -> None:
    """Keep this process within its limits, before it has begun any thread. Raises UsageError."""
    if options.cpus:
        try:
            os.sched_setaffinity(0, cpus_of(options.cpus))
        except OSError as error:
            raise UsageError(
                f"a keeper cannot run on the processors {options.cpus}: {error.strerror}",
                advice="Name processors that this process may use.",
            ) from error
    if options.max_bytes_per_s is not None:
        os.environ[RATE_VARIABLE] = str(options.max_bytes_per_s)


@contextlib.asynccontextmanager
async def _accepting(keeper: Keeper, folder: KeeperFolder) -> AsyncIterator[None]:
    """In the body, trainers can connect."""
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
    """In the body, what the keeper holds can be read over HTTP, if it is to be. The token is that
    of the environment, or that of the keeper before, or else a new one; it lies in the keeper's
    folder. ``port``: of the keeper before, whose place this one takes for other hosts, too, if it
    can."""
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
        server = await _bound(keeper, served, port, stack)
        folder.write_identity(keeper.name, server.port)
        keeper.serves_at(address_and_port(server.address, server.port), token)
        _log.info("memory is served at %s", keeper.address)
        yield


async def _bound(
    keeper: Keeper, options: ServeOptions, port: int, stack: contextlib.AsyncExitStack
) -> MemoryServer:
    """A server at the port that is named; else at ``port``; else at any."""
    if port and not options.port:
        with contextlib.suppress(OSError):  # somebody else has it by now
            preferred = replace(options, port=port)
            return await stack.enter_async_context(serve(keeper.shelf, preferred, keeper.hear))
    return await stack.enter_async_context(serve(keeper.shelf, options, keeper.hear))


async def _accept(sock: socket.socket, keeper: Keeper) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(sock)
        keeper.run_later(keeper.attend(Line(connection)))


async def _until_ended(keeper: Keeper, linger_s: float) -> None:
    while not keeper.ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await keeper.ended.wait()
        if keeper.idle_s > linger_s:
            _log.info("nobody has needed this keeper for %.0f s", linger_s)
            return


def main(arguments: Sequence[str]) -> int:
    """Be a keeper, as a trainer starts it: with its options as JSON."""
    (text,) = arguments
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        options = KeeperOptions(**json.loads(text))
        asyncio.run(keep(options, KeeperFolder.of(options.run)))
    except RunningError:
        return 0  # another process of this host was first
    except (HoldfastError, OSError) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
