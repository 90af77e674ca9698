"""The memory of this host's keeper, as one rank uses it: slots to capture into, what the keeper
makes of them, and images to go on from.

A keeper that is gone, or does not answer in time, is never in training's way: there is no slot
then, and in the background the rank looks for the keeper, or for the one that takes its place,
which it hands the images that it still has mapped.

For the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ...core.aio import wait_out
from ...errors import CoordinationError, DamagedError, DeadlineError
from ...planner.image import ImageLayout
from ..runtime.engine import offload
from .client import KeeperClient, Refusal, go_on
from .folder import KeeperFolder
from .hosts import KeeperHost
from .label import LABEL_NBYTES_MAX, GenerationId, Label
from .memory import Memory, read_sealed, sealed_bytes
from .messages import (
    Adopt,
    Captured,
    Done,
    Dropped,
    Durable,
    Enter,
    Event,
    Fill,
    Filled,
    Flush,
    FlushFailed,
    Hello,
    Inventory,
    LookUp,
    Open,
    Opened,
    Protected,
    Rebuild,
    Release,
    Request,
    Sealed,
    Voided,
)

__all__ = ["Arena", "Capture", "FillingSlot", "KeeperLost", "Listener"]

PAUSES_S = (0.2, 1.0, 5.0, 30.0)
"""How long a rank waits before it looks for a keeper again; then the last of them again and
again."""
REBUILD_S = 120.0
"""How long a keeper that makes a lost image again may say nothing of getting on: it pulls it from
other hosts."""
_MAKING_SHARE = 0.5
"""Of the deadline: so long a rank waits for memory that the keeper takes from the system."""
_CONNECT_PAUSE_S = 0.02

A = TypeVar("A")
Listener = Callable[["Event | KeeperLost"], bool]
"""Is told what becomes of its generation, and which later one is protected in its place; whether
it wants to be told more. One that does so after :class:`KeeperLost` is told by the next keeper."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperLost:
    """There is no keeper any more that would say what becomes of a sealed generation; there may be
    another one soon."""

    generation: GenerationId
    text: str


@dataclass(frozen=True, slots=True)
class FillingSlot:
    """A slot to capture an image into."""

    number: int
    memory: Memory


@dataclass(frozen=True)
class Capture:
    """What is known of an image that was captured. ``has_shards``: whether there is anything in
    it. The others as in :class:`.label.Label`."""

    layout: ImageLayout
    has_shards: bool
    created_s: float
    draft: bytes
    accord: str = ""
    equal: Mapping[str, str] = field(default_factory=dict)


class Arena:
    """One rank's part of its keeper's memory.

    ``start()`` starts a keeper where none is alive; None: one is only looked for.
    ``mapped(memory)`` is called in a thread with the memory of each slot, once it is mapped to be
    captured into.
    """

    def __init__(
        self,
        folder: KeeperFolder,
        hello: Hello,
        deadline_s: float,
        start: Callable[[], Awaitable[None]] | None = None,
        mapped: Callable[[Memory], object] = lambda memory: None,
    ) -> None:
        self._folder = folder
        self._hello = hello
        self._deadline_s = deadline_s
        self._start = start
        self._mapped = mapped
        self._client: KeeperClient | None = None
        self._enters = Enter(-1, None)
        self._slots: dict[int, Memory] = {}
        """Memory of slots, by number, mapped to be written to."""
        self._sealed: dict[int, tuple[GenerationId, int]] = {}
        """What is sealed, by slot, with the descriptor of its label."""
        self._listeners: dict[GenerationId, Listener] = {}
        self._outliving: dict[GenerationId, Listener] = {}
        """Those that wait for the next keeper."""
        self._wishes: dict[GenerationId, Flush] = {}
        """What a keeper was to write to storage, and has not said the end of."""
        self._capturing = 0
        """Slots that are being captured into: as long as there are any, no other keeper is looked
        for, since it might give the same memory to the next capture."""
        self._no_capture = asyncio.Event()
        self._no_capture.set()
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        self.problem = "no keeper was looked for"
        """Why there is no slot."""

    @property
    def is_open(self) -> bool:
        """Whether there is a keeper that answers."""
        return self._client is not None

    async def open(self, goes_on: Callable[[], None] = lambda: None) -> bool:
        """Find the keeper, or start one; whether one has answered in time. If not,
        :attr:`problem` says why. One that says that it gets on with what it begins with has more
        time, and ``goes_on()`` is called."""
        try:
            async with asyncio.timeout(self._deadline_s) as wait:
                await self._connect(partial(go_on, wait, self._deadline_s, goes_on))
            return True
        except (TimeoutError, Refusal, CoordinationError, OSError) as error:
            self.problem = str(error) or f"no keeper has answered within {self._deadline_s:g} s"
            return False

    async def _connect(self, goes_on: Callable[[], None]) -> None:
        """Connect; where nobody listens, start a keeper, and wait for it."""
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            await self._connect_once(goes_on)
            return
        if self._start is None:
            raise CoordinationError(f"no keeper listens at {self._folder.socket}")
        await self._start()
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                await self._connect_once(goes_on)
                return
            await asyncio.sleep(_CONNECT_PAUSE_S)

    async def _connect_once(self, goes_on: Callable[[], None]) -> None:
        client = await KeeperClient.open(
            self._folder.socket, self._hello, self._deadline_s, self._told, self._lost, goes_on
        )
        self._client = client

    @property
    def host(self) -> KeeperHost | None:
        """The keeper; None where there is none."""
        return None if self._client is None else self._client.host

    async def enter(self, enters: Enter) -> bool:
        """Training goes on in an epoch; whether the keeper agrees."""
        self._enters = enters
        return await self._done(enters)

    async def fill(self, step: int, nbytes: int) -> FillingSlot | None:
        """A slot for an image of this epoch; None where there is none: :attr:`problem` says
        why."""
        if self.is_open and self._reopening is not None and not self._reopening.done():
            # A rank that has gone on has nothing earlier, as far as a keeper can tell.
            self.problem = "the next keeper has yet to be handed what there is"
            return None
        within_s = _MAKING_SHARE * self._deadline_s
        answer = await self._try(Fill(step, nbytes, within_s), Filled)
        if answer is None:
            return None
        filled, fds = answer
        if fds and not await self._map(filled.slot, fds[0], nbytes):
            return None
        memory = self._slots.get(filled.slot)
        if memory is None or filled.nbytes != nbytes:
            self.problem = f"the keeper has given slot {filled.slot} without its memory"
            return None
        self._forget_label(filled.slot)
        self._forget_other_sizes(nbytes)
        self._capturing += 1
        self._no_capture.clear()
        return FillingSlot(filled.slot, memory)

    async def _map(self, slot: int, fd: int, nbytes: int) -> bool:
        """Map the memory of a slot to be captured into; whether it could be."""
        client = self._client
        try:
            memory = self._slots[slot] = Memory(fd, nbytes)
        except OSError as error:
            self.problem = str(error)
            if client is not None:  # it would not hand out the same memory over this line again
                await client.close()
                self._give_up(client)
            return False
        await offload(memory.populate)
        await offload(self._mapped, memory)
        return True

    def _capture_has_ended(self) -> None:
        self._capturing -= 1
        if not self._capturing:
            self._no_capture.set()

    def _forget_label(self, number: int) -> None:
        sealed = self._sealed.pop(number, None)
        if sealed is not None:
            os.close(sealed[1])

    def _forget_other_sizes(self, nbytes: int) -> None:
        """Unmap slots of a former layout, once there are two of this one: the memory that the
        keeper gives up is not free before."""
        sizes = [memory.nbytes for memory in self._slots.values()]
        if sizes.count(nbytes) < 2:
            return
        for number, memory in list(self._slots.items()):
            if memory.nbytes != nbytes:
                self._forget_label(number)
                memory.close()
                del self._slots[number]

    async def captured(
        self, slot: FillingSlot, step: int, capture: Capture, listener: Listener
    ) -> bool:
        """Hand over an image that was captured; ``listener`` is told what becomes of it. Whether
        the keeper has taken it."""
        generation = GenerationId(self._enters.epoch, step)
        layout = capture.layout
        message = Captured(
            slot.number,
            step,
            layout.hashed_end if capture.has_shards else 0,
            layout.chunk_nbytes,
            layout.block_nbytes,
            capture.created_s,
            capture.accord,
            dict(capture.equal),
        )
        self._listeners[generation] = listener
        taken = False
        try:
            draft_fd = sealed_bytes(capture.draft)
            try:
                taken = await self._done(message, [draft_fd])
            finally:
                os.close(draft_fd)
        finally:
            self._capture_has_ended()
            if not taken:
                self._listeners.pop(generation, None)
        return taken

    async def dropped(self, slot: FillingSlot) -> None:
        """Give back a slot into which nothing was captured."""
        self._capture_has_ended()
        await self._done(Dropped(slot.number))

    async def flush(self, request: Flush) -> bool:
        """Have a generation written to storage, once it is agreed on; whether the keeper has taken
        that on. Where it dies before that has come to an end, the next one is asked."""
        generation = GenerationId(self._enters.epoch, request.step)
        if generation in self._listeners:
            self._wishes[generation] = request
        taken = await self._done(request) or generation in self._outliving
        if not taken:
            self._wishes.pop(generation, None)
        return taken

    async def look_up(self) -> Inventory | None:
        """What there is to go on from; None where no keeper answers."""
        answer = await self._try(LookUp(), Inventory)
        return None if answer is None else answer[0]

    async def image(self, generation: GenerationId, rank: int) -> tuple[Label, Memory]:
        """An image of a generation, to be read, and its label. It stays as it is until
        :meth:`release`. Raises DamagedError where it is not there, or not what it should be."""
        answer = await self._try(Open(generation, rank), Opened)
        if answer is None:
            raise DamagedError(f"the image of rank {rank} cannot be had: {self.problem}")
        opened, fds = answer
        try:
            if len(fds) != 2:
                raise OSError(f"it came with {len(fds)} descriptors")
            label = Label.decode(read_sealed(fds[1], LABEL_NBYTES_MAX))
            memory = Memory(os.dup(fds[0]), opened.nbytes, writable=False)
        except OSError as error:
            raise DamagedError(f"the image of rank {rank} in memory: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        if (label.run, label.generation, label.rank) != (self._hello.run, generation, rank):
            raise DamagedError(f"the label of rank {rank} in memory is that of another image")
        return label, memory

    async def rebuild(self, request: Rebuild, goes_on: Callable[[], None] = lambda: None) -> bool:
        """Have a lost image made again, in the keeper's memory; whether it is there then.
        ``goes_on()`` is called each time that the keeper says that it gets on."""
        answer = await self._try(request, Done, deadline_s=REBUILD_S, goes_on=goes_on)
        return answer is not None

    async def release(self) -> None:
        """What was opened may be written over."""
        await self._done(Release())

    async def _done(self, request: Request, fds: Sequence[int] = ()) -> bool:
        return await self._try(request, Done, fds) is not None

    async def _try(
        self,
        request: Request,
        answer: type[A],
        fds: Sequence[int] = (),
        deadline_s: float | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> tuple[A, tuple[int, ...]] | None:
        """The keeper's answer; None where it refuses, or is gone: :attr:`problem` says why. One
        that does not answer in time is as good as gone."""
        client = self._client
        if client is None:
            return None
        try:
            return await client.ask(request, answer, fds, deadline_s, goes_on)
        except Refusal as refusal:
            self.problem = refusal.text
            return None
        except CoordinationError as error:
            self.problem = error.message
            if isinstance(error, DeadlineError):
                await client.close()
            self._give_up(client)
            return None

    def _told(self, event: Event, fds: Sequence[int]) -> None:
        """The keeper has something to tell."""
        if isinstance(event, Sealed) and len(fds) == 1 and event.slot in self._slots:
            self._sealed[event.slot] = (event.generation, fds[0])
        else:
            for fd in fds:
                os.close(fd)
        told = [event.generation]
        if isinstance(event, Protected):
            told += [id for id in self._listeners if id < event.generation]
        for generation in told:
            listener = self._listeners.get(generation)
            if listener is not None and not listener(event):
                del self._listeners[generation]
        if _is_end(event):
            self._wishes.pop(event.generation, None)

    def _lost(self) -> None:
        """The line is gone: the keeper has died, or has closed it."""
        self.problem = "the keeper is gone"
        if self._client is not None:
            self._give_up(self._client)

    def _give_up(self, client: KeeperClient) -> None:
        """Go on without a keeper, and look for one in the background."""
        if self._client is not client:
            return
        self._client = None
        _log.warning("rank %d goes on without a keeper: %s", self._hello.rank, self.problem)
        listeners, self._listeners = self._listeners, {}
        for generation, _ in self._sealed.values():
            listener = listeners.pop(generation, None)
            if listener is not None and listener(KeeperLost(generation, self.problem)):
                self._outliving[generation] = listener
        self._void(listeners)
        if not self._closed and (self._reopening is None or self._reopening.done()):
            self._reopening = asyncio.ensure_future(self._reopen())

    def _void(self, listeners: Mapping[GenerationId, Listener]) -> None:
        for generation, listener in listeners.items():
            listener(Voided(generation, f"not kept in memory: {self.problem}"))

    def _void_outliving(self) -> None:
        outliving, self._outliving = self._outliving, {}
        self._void(outliving)

    async def _reopen(self) -> None:
        """Look for a keeper until there is one, and hand it what this rank has sealed. Nobody waits
        for one for longer than for an answer."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._deadline_s
        for tried in itertools.count():
            await asyncio.sleep(PAUSES_S[min(tried, len(PAUSES_S) - 1)])
            await self._no_capture.wait()
            if loop.time() > end_s:
                self._void_outliving()
            if not await self.open():
                _log.info("rank %d has no keeper: %s", self._hello.rank, self.problem)
                continue
            if await self._hand_over():
                _log.info("rank %d has a keeper again", self._hello.rank)
                return
            if self._client is not None:  # it does not let this rank in
                await self._client.close()
                self._client = None

    async def _hand_over(self) -> bool:
        """Give a keeper, which may be a new one, the images that this rank has sealed in this
        epoch; whether it has let this rank in."""
        slots, sealed = dict(self._slots), dict(self._sealed)
        self._slots.clear()
        self._sealed.clear()
        try:
            if not await self.enter(self._enters):
                return False
            # In order: of a rank that has handed over a step, nothing earlier is waited for.
            for number, (generation, label_fd) in sorted(sealed.items(), key=lambda one: one[1]):
                listener = self._outliving.pop(generation, None)
                if listener is not None:
                    self._listeners[generation] = listener
                memory = slots[number]
                adopted = await self._done(Adopt(memory.nbytes), [memory.fd, label_fd])
                await self._wish_again(generation, adopted=adopted)
            if self.is_open:
                self._void_outliving()
            return self.is_open
        finally:
            if self.is_open:
                for _, label_fd in sealed.values():
                    os.close(label_fd)
                for memory in slots.values():
                    memory.close()
            else:
                self._slots, self._sealed = slots, sealed

    async def _wish_again(self, generation: GenerationId, *, adopted: bool) -> None:
        """The next keeper has been handed an image, and may not have taken it. Have it written, if
        that was wanted, and the keeper before has not said the end of it."""
        wish = self._wishes.pop(generation, None)
        if wish is not None and adopted:
            adopted = await self.flush(wish)
        listener = self._listeners.get(generation)
        if listener is not None and not adopted:
            del self._listeners[generation]
            self._void({generation: listener})

    async def close(self) -> None:
        """Let go of the keeper, which goes on. Safe to call twice."""
        self._closed = True
        if self._reopening is not None:
            self._reopening.cancel()
            await wait_out([self._reopening])
        if self._client is not None:
            await self._client.close()
            self._client = None
        self._forget()

    def _forget(self) -> None:
        self._outliving.clear()
        for _, label_fd in self._sealed.values():
            os.close(label_fd)
        self._sealed.clear()
        for memory in self._slots.values():
            memory.close()
        self._slots.clear()


def _is_end(event: Event) -> bool:
    """Whether nothing more comes of a flush."""
    if isinstance(event, FlushFailed):
        return event.final
    return isinstance(event, Durable | Voided)
