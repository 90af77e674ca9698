"""One rank's access to the memory of its keeper: slots to capture into, and images to restore.

A keeper that has died, or does not answer in time, never holds up training: there is no slot then.
In the background the rank looks for a keeper, perhaps a new one, and hands over the images that it
still has mapped.

Runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ...core.aio import wait_out
from ...errors import CoordinationError, DamagedError, DeadlineError
from ..runtime.engine import offload
from . import messages
from .client import KeeperClient, Refusal, go_on
from .folder import KeeperFolder
from .hosts import KeeperHost
from .label import LABEL_NBYTES_MAX, GenerationId, Label
from .memory import Memory, read_sealed, sealed_bytes

PAUSES_S = (0.2, 1.0, 5.0, 30.0)
"""Pauses between attempts to find a keeper; the last one repeats."""
START_S = 60.0
"""Time limit for a keeper to start, unless answers take longer."""
REBUILD_S = 120.0
"""Time limit without progress while a keeper rebuilds an image from other hosts."""
_MAKING_SHARE = 0.5
"""Share of the deadline that a rank waits for the keeper to allocate memory."""
_CONNECT_PAUSE_S = 0.02

A = TypeVar("A")
Listener = Callable[["messages.GenerationEvent | KeeperLost"], bool]
"""Called with each event of its generation, and with the protection of a later one. Returns whether
it wants more events; after :class:`KeeperLost`, these come from the next keeper."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperLost:
    """No keeper is left to report on a sealed generation; another one may appear soon."""

    generation: GenerationId
    text: str


@dataclass(frozen=True, slots=True)
class FillingSlot:
    """A slot to capture an image into."""

    number: int
    memory: Memory


class Arena:
    """One rank's connection to the memory of its keeper.

    ``start(takes_over)`` starts a keeper if none is alive; with True, one that takes over the
    memory of a running keeper of another version; None: never start one. ``mapped(memory)`` is
    called in a thread once the memory of a slot is mapped for capturing; ``rank_lost(rank)``, once
    another rank of the epoch has died.
    """

    def __init__(
        self,
        folder: KeeperFolder,
        hello: messages.Hello,
        deadline_s: float,
        start: Callable[[bool], Awaitable[None]] | None = None,
        mapped: Callable[[Memory], object] = lambda memory: None,
        rank_lost: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._folder = folder
        self._hello = hello
        self._deadline_s = deadline_s
        self._start = start
        self._mapped = mapped
        self._rank_lost = rank_lost
        self._client: KeeperClient | None = None
        self._enters = messages.Enter(-1, None)
        self._slots: dict[int, Memory] = {}
        """Memory of slots, by number, mapped for writing."""
        self._sealed: dict[int, tuple[GenerationId, int]] = {}
        """Sealed generation of each slot, with the descriptor of its label."""
        self._listeners: dict[GenerationId, Listener] = {}
        self._outliving: dict[GenerationId, Listener] = {}
        """Listeners that wait for the next keeper."""
        self._wishes: dict[GenerationId, messages.Flush] = {}
        """Requested flushes whose end is not known."""
        self._capturing = 0
        """Number of slots being captured into. No other keeper is looked for until it is 0, since
        that keeper might give the same memory to the next capture."""
        self._no_capture = asyncio.Event()
        self._no_capture.set()
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        self.problem = "no keeper has been looked for"
        """Reason of the last failure."""
        self.is_silent = False
        """True if a keeper listens but has not answered the last request in time, or if nobody
        listens and someone else has to start it."""
        self._listened = False
        self._refused = ""
        """Answer of a keeper that has not been replaced yet."""

    @property
    def is_open(self) -> bool:
        """True while a keeper answers."""
        return self._client is not None

    async def open(self, goes_on: Callable[[], None] = lambda: None) -> bool:
        """Connect to the keeper, or start one, which may take longer. Return whether it answers in
        time; if not, see :attr:`problem`. Each sign of progress from a starting keeper extends the
        deadline and calls ``goes_on()``."""
        try:
            async with asyncio.timeout(self._deadline_s) as wait:
                await self._connect(wait, partial(go_on, wait, self._deadline_s, goes_on))
            self.is_silent = False
            return True
        except (TimeoutError, Refusal, CoordinationError, OSError) as error:
            within_s = self._deadline_s if self._listened else self._start_s
            late = self._refused or f"no keeper has answered within {within_s:g} s"
            self.problem = str(error) or late
            # A keeper that this rank has just started has nothing to say yet.
            is_late = isinstance(error, TimeoutError | BlockingIOError)
            self.is_silent = is_late if self._listened else self._start is None
            return False

    async def _connect(self, wait: asyncio.Timeout, goes_on: Callable[[], None]) -> None:
        """Connect; if nobody listens, or a keeper of another version of Holdfast, start a keeper
        and wait for it."""
        self._listened = True
        self._refused = ""
        problem = f"no keeper listens at {self._folder.socket}"
        takes_over = False
        try:
            await self._connect_once(goes_on, self._deadline_s)
            return
        except (FileNotFoundError, ConnectionError):
            self._listened = False
        except Refusal as refusal:
            if refusal.reason != messages.OTHER_VERSION:
                raise
            problem = refusal.text
            takes_over = True
        if self._start is None:
            raise CoordinationError(problem)
        wait.reschedule(asyncio.get_running_loop().time() + self._start_s)
        await self._start(takes_over)
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                if await self._connected_again(goes_on, takes_over=takes_over):
                    return
            await asyncio.sleep(_CONNECT_PAUSE_S)

    async def _connected_again(self, goes_on: Callable[[], None], *, takes_over: bool) -> bool:
        """Connect to a keeper that was started. Return False if the one that it ``takes_over`` from
        has still answered."""
        try:
            await self._connect_once(goes_on, self._start_s)
        except Refusal as refusal:
            self._refused = refusal.text
            if not takes_over or refusal.reason != messages.OTHER_VERSION:
                raise
            return False
        return True

    @property
    def _start_s(self) -> float:
        return max(START_S, self._deadline_s)

    async def _connect_once(self, goes_on: Callable[[], None], welcome_s: float) -> None:
        client = await KeeperClient.open(
            self._folder.socket,
            self._hello,
            self._deadline_s,
            self._told,
            self._lost,
            goes_on,
            welcome_s,
        )
        self._client = client

    @property
    def host(self) -> KeeperHost | None:
        """The connected keeper, if any."""
        return None if self._client is None else self._client.host

    @property
    def fixed(self) -> tuple[str, ...]:
        """Options of the connected keeper that differ from those requested."""
        return () if self._client is None else self._client.fixed

    async def enter(self, enters: messages.Enter) -> bool:
        """Enter an epoch. Return whether the keeper accepts that."""
        self._enters = enters
        return await self._done(enters)

    async def fill(self, step: int, nbytes: int) -> FillingSlot | None:
        """Return a slot for an image of this epoch, or None, with the reason in :attr:`problem`."""
        if self.is_open and self._reopening is not None and not self._reopening.done():
            # A keeper assumes that a rank which has moved on has no earlier images to hand over.
            self.problem = "images are still being handed to the next keeper"
            return None
        within_s = _MAKING_SHARE * self._deadline_s
        answer = await self._try(messages.Fill(step, nbytes, within_s), messages.Filled)
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
        """Map the memory of a slot for capturing. Return whether that worked."""
        client = self._client
        try:
            memory = self._slots[slot] = Memory(fd, nbytes)
        except OSError as error:
            self.problem = str(error)
            if client is not None:  # it sends each memory only once per connection
                await client.close()
                self._give_up(client)
            return False
        await offload(memory.populate)
        memory.is_populated = True
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
        """Unmap slots of a former size, once there are two of this one. The keeper's memory is not
        freed before."""
        sizes = [memory.nbytes for memory in self._slots.values()]
        if sizes.count(nbytes) < 2:
            return
        for number, memory in list(self._slots.items()):
            if memory.nbytes != nbytes:
                self._forget_label(number)
                memory.close()
                del self._slots[number]

    async def captured(self, image: messages.Captured, draft: bytes, listener: Listener) -> bool:
        """Hand a captured image to the keeper, with the ``draft`` of its label, and register
        ``listener`` for its events. Return whether the keeper accepts it."""
        generation = GenerationId(self._enters.epoch, image.step)
        self._listeners[generation] = listener
        taken = False
        try:
            draft_fd = sealed_bytes(draft)
            try:
                taken = await self._done(image, [draft_fd])
            finally:
                os.close(draft_fd)
        finally:
            self._capture_has_ended()
            if not taken:
                self._listeners.pop(generation, None)
        return taken

    async def dropped(self, slot: FillingSlot) -> None:
        """Return a slot into which nothing was captured."""
        self._capture_has_ended()
        await self._done(messages.Dropped(slot.number))

    async def flush(self, request: messages.Flush) -> bool:
        """Request that a generation is flushed once it is agreed. Return whether the keeper accepts
        that. If it dies before the flush has ended, the request is repeated to the next keeper."""
        generation = GenerationId(self._enters.epoch, request.step)
        if generation in self._listeners or generation in self._outliving:
            self._wishes[generation] = request
        taken = await self._done(request) or generation in self._outliving
        if not taken:
            self._wishes.pop(generation, None)
        return taken

    async def look_up(self) -> messages.Inventory | None:
        """Return the keeper's inventory; None if no keeper answers."""
        answer = await self._try(messages.LookUp(), messages.Inventory)
        return None if answer is None else answer[0]

    async def image(self, generation: GenerationId, rank: int) -> tuple[Label, Memory]:
        """Open an image for reading, and return it with its label. It stays unchanged until
        :meth:`release`. Raises DamagedError if it is missing or not the requested one."""
        answer = await self._try(messages.Open(generation, rank), messages.Opened)
        if answer is None:
            raise DamagedError(f"cannot open the image of rank {rank}: {self.problem}")
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
            raise DamagedError(f"the label of rank {rank} in memory belongs to another image")
        return label, memory

    async def rebuild(
        self, request: messages.Rebuild, goes_on: Callable[[], None] = lambda: None
    ) -> bool:
        """Have the keeper rebuild a lost image. Return whether it now holds it. Calls ``goes_on()``
        on progress."""
        answer = await self._try(request, messages.Done, deadline_s=REBUILD_S, goes_on=goes_on)
        return answer is not None

    async def release(self) -> None:
        """Allow all opened images to be overwritten."""
        await self._done(messages.Release())

    async def _done(self, request: messages.Request, fds: Sequence[int] = ()) -> bool:
        return await self._try(request, messages.Done, fds) is not None

    async def _try(
        self,
        request: messages.Request,
        answer: type[A],
        fds: Sequence[int] = (),
        deadline_s: float | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> tuple[A, tuple[int, ...]] | None:
        """Return the keeper's answer, or None if it refuses or has died, with the reason in
        :attr:`problem`. A keeper that misses the deadline counts as dead."""
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
            self.is_silent = isinstance(error, DeadlineError)
            if self.is_silent:
                await client.close()
            self._give_up(client)
            return None

    def _told(self, event: messages.Event, fds: Sequence[int]) -> None:
        if isinstance(event, messages.Sealed) and len(fds) == 1 and event.slot in self._slots:
            self._sealed[event.slot] = (event.generation, fds[0])
        else:
            for fd in fds:
                os.close(fd)
        if isinstance(event, messages.RankLost):
            self._rank_lost(event.rank)
            return
        if isinstance(event, messages.Replaced):
            self._replaced()
            return
        told = [event.generation]
        if isinstance(event, messages.Protected):
            told += [id for id in self._listeners if id < event.generation]
        for generation, listeners in itertools.product(told, (self._listeners, self._outliving)):
            listener = listeners.get(generation)
            if listener is not None and not listener(event):
                del listeners[generation]
        ended = event if isinstance(event, messages.FlushEnd) and event.final else None
        if ended is not None:
            self._enters = replace(self._enters, ended=ended)
        if ended is not None or isinstance(event, messages.FlushLost | messages.Voided):
            self._wishes.pop(event.generation, None)

    def _replaced(self) -> None:
        """Leave the keeper to another Checkpointer of this process. Both would otherwise replace
        each other for ever."""
        self.problem = "another Checkpointer of this process uses the keeper of this run"
        self._closed = True
        if self._client is not None:
            self._give_up(self._client)

    def _lost(self) -> None:
        if self._client is not None:
            self.problem = "the keeper is gone"
            self._give_up(self._client)

    def _give_up(self, client: KeeperClient) -> None:
        """Continue without a keeper, and look for one in the background."""
        if self._client is not client:
            return
        self._client = None
        _log.warning("rank %d continues without a keeper: %s", self._hello.rank, self.problem)
        listeners, self._listeners = self._listeners, {}
        for generation, _ in self._sealed.values():
            listener = listeners.pop(generation, None)
            if listener is not None and listener(KeeperLost(generation, self.problem)):
                self._outliving[generation] = listener
        self._void(listeners)
        self.look_on()

    def _void(self, listeners: Mapping[GenerationId, Listener]) -> None:
        for generation, listener in listeners.items():
            listener(messages.Voided(generation, f"not kept in memory: {self.problem}"))

    def _void_outliving(self) -> None:
        outliving, self._outliving = self._outliving, {}
        self._void(outliving)

    def look_on(self) -> None:
        """Look for a keeper in the background, unless one answers, and have it enter the epoch."""
        is_looking = self._reopening is not None and not self._reopening.done()
        if not (self._closed or self.is_open or is_looking):
            self._reopening = asyncio.ensure_future(self._reopen())

    async def _reopen(self) -> None:
        """Look for a keeper until one accepts this rank, and hand over the sealed images.
        Generations whose listeners wait are voided if that exceeds the deadline."""
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
            if self._client is not None:  # it refuses this rank
                await self._client.close()
                self._client = None

    async def _hand_over(self) -> bool:
        """Hand the sealed images of this epoch to a keeper, perhaps a new one. Return whether it
        accepts this rank."""
        slots, sealed = dict(self._slots), dict(self._sealed)
        self._slots.clear()
        self._sealed.clear()
        try:
            # Before an epoch begins, it only has to answer: a resume looks at it again.
            if self._enters.epoch >= 0 and not await self.enter(self._enters):
                return False
            # Oldest first: once a rank has handed over a step, no earlier one is expected of it.
            for number, (generation, label_fd) in sorted(sealed.items(), key=lambda one: one[1]):
                listener = self._outliving.pop(generation, None)
                if listener is not None:
                    self._listeners[generation] = listener
                memory = slots[number]
                adopted = await self._done(messages.Adopt(memory.nbytes), [memory.fd, label_fd])
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
        """Repeat a flush request after handing over an image, unless it has ended; void the
        generation if the keeper has not accepted the image or the request."""
        wish = self._wishes.pop(generation, None)
        if wish is not None and adopted:
            adopted = await self.flush(wish)
        listener = self._listeners.get(generation)
        if listener is not None and not adopted:
            del self._listeners[generation]
            self._void({generation: listener})

    async def leave(self, *, finished: bool) -> None:
        """Announce that this rank ends on purpose; see :class:`.messages.Leave`."""
        await self._done(messages.Leave(finished))

    async def close(self) -> None:
        """Disconnect; the keeper lives on. Safe to call twice."""
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
