"""The process of a saver: ``python -m holdfast.storage.saver.process SOCKET PIDFD``.

It inherits one end of a connection to its trainer, and a descriptor of the trainer's process. It
writes the images that the trainer hands over, finishes the saves under way, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ...core.aio import wait_out
from ...core.pool import Pool
from ...core.spans import Recorder, Summary, recording
from ...drivers.contract import Driver
from ...drivers.layers.metrics import take_snapshots
from ...drivers.registry import opened_driver
from ...drivers.uri import parse
from ...errors import HoldfastError
from ...planner.image import ImageLayout
from ..arenas.memory import Memory, release_unused
from ..arenas.sockets import Line, MessageError, Received
from ..format.packed import checked_compression
from ..pipeline.base import Base, Borrowing
from ..pipeline.borrowing import Incremental
from ..pipeline.image_writer import Callbacks, WrittenImage
from ..pipeline.memory_writer import write_memory
from ..ranks.failures import Failure
from ..runtime.buffers import release_pools
from ..runtime.engine import CPU_THREADS
from .finishing import finish
from .messages import (
    BEAT_S,
    Alive,
    Cancel,
    Counted,
    Failed,
    Forget,
    Message,
    Moved,
    Write,
    Wrote,
    decode,
    encode,
)

NICE = 10
"""Training goes before saving where both want a processor."""
MOVED_S = 0.1
"""Interval of progress messages."""
_TRAINER_STAGES = ("capture",)
"""Stages that the trainer records: here, chunks are only looked up."""

_log = logging.getLogger(__name__)


class Saver:
    """Serves one trainer over ``line``. ``trainer``: descriptor of its process."""

    def __init__(self, line: Line, trainer: int) -> None:
        self._line = line
        self._trainer = trainer
        self._saves: dict[int, _Save] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until the trainer has ended and nothing is left to finish."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._trainer, ended.set)
        receiving = asyncio.ensure_future(self._receive())
        waiting = asyncio.ensure_future(ended.wait())
        beating = asyncio.ensure_future(self._beat())
        await asyncio.wait([receiving, waiting], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
        if not self._saves:
            return
        await waiting  # a trainer that has only closed its end may still commit
        loop.remove_reader(self._trainer)
        for save in self._saves.values():
            save.lose_trainer()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await wait_out([receiving])

    async def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(BEAT_S)
                if self._saves:
                    await self._line.send(encode(0, Alive()))

    async def _receive(self) -> None:
        while True:
            try:
                received = await self._line.receive()
            except (ConnectionError, MessageError):
                return
            self._handle(received)

    def _handle(self, received: Received) -> None:
        number, message = decode(received.data)
        if isinstance(message, Write):
            save = self._saves[number] = _Save(self._line, number, message)
            task = asyncio.ensure_future(self._run(save, received.fds[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number in self._saves:
            if isinstance(message, Cancel):
                self._saves[number].cancel()
            elif isinstance(message, Forget):
                self._saves[number].forget()

    async def _run(self, save: _Save, memory: int) -> None:
        try:
            await save.run(memory)
        finally:
            del self._saves[save.number]
            if not self._saves:
                release_pools()
                release_unused()


class _Save:
    """One image to write, and perhaps its save to commit."""

    def __init__(self, line: Line, number: int, write: Write) -> None:
        self.number = number
        self._is_orphan = False
        self._is_forgotten = False
        self._trainer_is_done = asyncio.Event()
        """Set when the trainer has ended the save, or has died."""
        self._line = line
        self._write = write
        self._writing: asyncio.Future[WrittenImage] | None = None
        self._moved = Moved(0, 0, False)
        self._told_s = 0.0
        self._telling: set[asyncio.Task[None]] = set()

    def forget(self) -> None:
        """Note that the trainer has ended the save."""
        self._is_forgotten = True
        self._trainer_is_done.set()

    def lose_trainer(self) -> None:
        """Note that the trainer has died."""
        self._is_orphan = True
        self._trainer_is_done.set()

    def cancel(self) -> None:
        """End the write of the image, if it has not ended."""
        if self._writing is not None:
            self._writing.cancel()

    async def run(self, fd: int) -> None:
        """Write the image in the memory behind ``fd``, report that, and then wait for the trainer
        to end the save, or end it instead of the trainer."""
        write = self._write
        recorder = Recorder(write.rank) if write.records else None
        os.environ.update(write.environment)
        try:
            memory = Memory(fd, write.memory_nbytes, writable=False)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    opened = opened_driver(write.uri, write.world, **json.loads(write.options))
                    driver = await stack.enter_async_context(opened)
                except HoldfastError as error:
                    await self._fail(error, unopened=True)
                    return
                borrowing = Borrowing(_base_of(write), write.choice)
                with recording(recorder):
                    self._writing = asyncio.ensure_future(self._image(driver, memory, borrowing))
                written = await self._writing
                memory.close()
                summary = None if recorder is None else _summary(recorder)
                await self._answer(Wrote.of(written, borrowing, summary))
                await self._end(driver, written)
        except (Exception, asyncio.CancelledError) as error:
            await self._fail(error)

    async def _fail(self, error: BaseException, *, unopened: bool = False) -> None:
        if self._is_orphan:
            _log.warning("a save whose trainer has died failed: %s", error)
        await self._answer(Failed(Failure.of(error, self._write.rank), unopened))

    async def _answer(self, answer: Wrote | Failed) -> None:
        if counted := take_snapshots():
            await self._tell(Counted.of(counted))
        await self._tell(answer)

    async def _image(self, driver: Driver, memory: Memory, borrowing: Borrowing) -> WrittenImage:
        write = self._write
        layout = ImageLayout.of_sizes(
            write.hashed_end, write.nbytes, write.chunk_nbytes, write.block_nbytes
        )

        compression = checked_compression(write.compression or None)
        callbacks = Callbacks(lambda: None, self._sealed, wrote=self._wrote)
        return await write_memory(
            *(driver, write.key, layout, memory, compression),
            callbacks=callbacks,
            borrower=(borrowing, write.rank),
        )

    def _sealed(self) -> None:
        self._moved = Moved(self._moved.done_nbytes, self._write.hashed_end, True)
        self._tell_moved(at_once=True)

    def _wrote(self, done_nbytes: int, total_nbytes: int) -> None:
        self._moved = Moved(done_nbytes, total_nbytes, self._moved.sealed)
        self._tell_moved(at_once=done_nbytes == total_nbytes)

    def _tell_moved(self, *, at_once: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if at_once or now_s - self._told_s > MOVED_S:
            self._told_s = now_s
            telling = asyncio.ensure_future(self._tell(self._moved))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            await self._line.send(encode(self.number, message))

    async def _end(self, driver: Driver, written: WrittenImage) -> None:
        """Wait until the trainer has ended the save. Finish it if the trainer has died."""
        await self._trainer_is_done.wait()
        if self._is_forgotten:
            return
        if await finish(driver, self._write, written):
            step = self._write.step
            _log.warning("step %s is committed at %s, by the saver", step, driver.uri)


def _base_of(write: Write) -> Base | None:
    if not write.base:
        return None
    options, limits = json.loads(write.options), Incremental.of(write.limits)
    return Base.below(parse(write.base), options, lambda: write.choice.key, limits)


def _summary(recorder: Recorder) -> Summary:
    found = recorder.summary()
    stages = {name: one for name, one in found.stages.items() if name not in _TRAINER_STAGES}
    return Summary(stages, found.slowest, found.cpu_s, found.peak_nbytes, found.elapsed_s)


async def _serve(sock: socket.socket, trainer: int) -> None:
    asyncio.get_running_loop().set_default_executor(Pool(CPU_THREADS, "holdfast-cpu"))
    await Saver(Line(sock), trainer).serve()


def main(arguments: Sequence[str]) -> None:
    """Serve the trainer at the other end of the inherited socket."""
    sock, trainer = map(int, arguments)
    # A signal to the trainer's whole group must not end its saver, too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    logging.basicConfig(format="%(asctime)s saver %(levelname)s %(message)s")
    asyncio.run(_serve(socket.socket(fileno=sock), trainer))


if __name__ == "__main__":
    main(sys.argv[1:])
