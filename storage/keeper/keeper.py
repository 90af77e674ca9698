"""What a keeper does with what trainers tell it: the shell around :mod:`.generations` and
:mod:`.votes`, which decide.

All of this runs on one event loop. Trainers are known by their processes: a process that has ended
has no memory mapped any more, and only the kernel knows when (by a pidfd), since a forked child
keeps a line open.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CoordinationError, DamagedError, HoldfastError
from ..arenas.label import LABEL_NBYTES_MAX, GenerationId, Label, check_sizes
from ..arenas.line import Line, MessageError
from ..arenas.memory import Memory, read_sealed, sealed_bytes, sealed_memory
from ..arenas.messages import (
    VERSION,
    Adopt,
    Agreed,
    Answer,
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
    HeldGeneration,
    Hello,
    Inventory,
    LookUp,
    Message,
    Open,
    Opened,
    Refused,
    Release,
    Sealed,
    Status,
    StatusAsked,
    Stop,
    Voided,
    Welcome,
    decode,
    encode,
)
from ..arenas.room import available_nbytes
from ..runtime.engine import offload
from .flush import flush_to
from .generations import Generations, Grant, Reason, Refusal
from .local_level import LocalLevel
from .options import KeeperOptions
from .sealing import seal
from .status import Counters, KeeperStatus
from .tiers import HeldImage
from .votes import Ballot, Outcome, Vote

__all__ = ["Keeper"]

HELLO_S = 10.0
"""How long a process that connects may take to say who it is."""
TELL_S = 5.0
"""How long a trainer may take to receive what it is told."""
FLUSH_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""How long a keeper waits after each failed flush; then the last of them again and again."""
RESERVE_NBYTES = 256 << 20
"""So much memory is left to the system."""

_log = logging.getLogger(__name__)
_Reply = tuple[Answer, Sequence[int]]


@dataclass(eq=False)
class _Trainer:
    """A process that has connected. ``number``: for the state machine. ``handed``: the slots whose
    memory it has."""

    number: int
    pid: int
    rank: int
    world: int
    host: str
    line: Line
    pidfd: int
    epoch: int = -1
    handed: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Slot:
    """The memory of a slot; and its label, once the image in it is whole."""

    memory: Memory
    label: Label | None = None
    label_fd: int = -1

    def unlabel(self) -> None:
        """What is in it is no image any more."""
        self.label = None
        if self.label_fd >= 0:
            os.close(self.label_fd)
            self.label_fd = -1

    def close(self) -> None:
        """Give its memory back to the system."""
        self.unlabel()
        self.memory.close()


@dataclass(frozen=True, slots=True)
class _Wish:
    """A flush that was asked for."""

    generation: GenerationId
    request: Flush


class Keeper:
    """The keeper of one run on one host."""

    def __init__(self, options: KeeperOptions) -> None:
        """Raises OSError where the system does not say how much memory it has."""
        self.options = options
        spare_nbytes = max(0, available_nbytes() - RESERVE_NBYTES)
        budget_nbytes = min(spare_nbytes, options.budget_nbytes or spare_nbytes)
        self._generations = Generations(budget_nbytes)
        self._ballot = Ballot()
        self._slots: dict[int, _Slot] = {}
        self._trainers: dict[int, _Trainer] = {}
        """By process."""
        self._numbers = itertools.count(1)
        self._wishes: dict[GenerationId, _Wish] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counters = Counters()
        self._flushing: GenerationId | None = None
        self._flush_turn = asyncio.Lock()
        self._began_s = time.time()
        self._used_s = time.monotonic()
        self._local: LocalLevel | None = None
        if options.local is not None:
            self._local = LocalLevel(options.local, options.local_every, options.run)
        self._writing_locally = False
        self.ended = asyncio.Event()
        self._handlers: dict[type, Callable[[_Trainer, Any, Sequence[int]], Awaitable[_Reply]]] = {
            Enter: self._enter,
            Fill: self._fill,
            Captured: self._captured,
            Dropped: self._dropped,
            LookUp: self._look_up,
            Open: self._open,
            Release: self._release,
            Adopt: self._adopt,
            Flush: self._flush,
        }

    async def recall(self) -> None:
        """Have in memory again what is on storage of this host: before the first trainer comes."""
        if self._local is None:
            return
        for image in await self._local.read():
            label = image.label
            number = self._generations.recall(
                label.generation, label.rank, label.world, label.nbytes
            )
            if isinstance(number, Refusal):
                _log.warning("rank %d: %s", label.rank, number.text)
                continue
            label_fd = sealed_bytes(await offload(label.encode))
            self._slots[number] = _Slot(image.memory, label, label_fd)
            if self._ballot.cast(Vote.of(label)) is Outcome.AGREED:
                self._generations.agreed(label.generation)
                _log.info("step %d is in memory again", label.generation.step)

    async def attend(self, line: Line) -> None:
        """Serve one line until it ends. Whatever comes over it, the keeper lives."""
        trainer: _Trainer | None = None
        try:
            trainer = await self._welcome(line)
            while trainer is not None:
                received = await line.receive()
                try:
                    number, message = decode(received.data)
                    answer, out = await self._answer(trainer, message, received.fds)
                finally:
                    for fd in received.fds:
                        os.close(fd)
                await line.send(encode(number, answer), out)
        except (MessageError, CoordinationError) as error:
            _log.warning("a line is closed: %s", error)
        except OSError as error:
            _log.debug("a line has ended: %s", error)
        finally:
            line.close()

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside all else; what it raises is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the keeper has failed", exc_info=task.exception())

    async def _welcome(self, line: Line) -> _Trainer | None:
        """The trainer at the other end; None where it is refused, or only asks for a status."""
        if line.peer_uid != os.getuid():
            raise MessageError(f"it belongs to the user {line.peer_uid}")
        async with asyncio.timeout(HELLO_S):
            received = await line.receive()
        received.close()
        number, message = decode(received.data)
        if isinstance(message, StatusAsked):
            await line.send(encode(number, Status(json.dumps(self.status().as_json()))))
            return None
        if isinstance(message, Stop):
            await line.send(encode(number, Done()))
            self.ended.set()
            return None
        if not isinstance(message, Hello):
            raise MessageError(f"its first message is a {type(message).__name__}")
        refused = self._refused(message)
        if refused is not None:
            self._counters.refused += 1
            _log.warning("process %d is refused: %s", line.peer_pid, refused.text)
            await line.send(encode(number, refused))
            return None
        trainer = self._known(line, message)
        await line.send(encode(number, Welcome(os.getpid())))
        return trainer

    def _refused(self, hello: Hello) -> Refused | None:
        if hello.version != VERSION:
            return Refused("version", f"this keeper speaks version {VERSION}")
        if hello.run != self.options.run:
            return Refused("run", f"this keeper is that of the run {self.options.run}")
        if not 0 <= hello.rank < hello.world:
            return Refused("rank", f"rank {hello.rank} of {hello.world}")
        return None

    def _known(self, line: Line, hello: Hello) -> _Trainer:
        """The process at the other end of ``line``, watched until its end. One that was connected
        before has lost what it was filling."""
        pid = line.peer_pid
        before = self._trainers.get(pid)
        if before is not None:
            before.line.close()
            self._generations.drop_unfinished(before.number)
            before.line = line
            before.handed.clear()  # it has closed what it was handed, or has given it to us
            before.rank, before.world, before.host = hello.rank, hello.world, hello.host
            return before
        pidfd = line.peer_pidfd()
        trainer = _Trainer(
            next(self._numbers), pid, hello.rank, hello.world, hello.host, line, pidfd
        )
        self._trainers[pid] = trainer
        self._used_s = time.monotonic()
        asyncio.get_running_loop().add_reader(pidfd, self._gone, trainer)
        return trainer

    def _gone(self, trainer: _Trainer) -> None:
        """A process has ended, and its memory is gone."""
        self._unwatch(trainer)
        self._used_s = time.monotonic()
        if self._trainers.get(trainer.pid) is trainer:
            del self._trainers[trainer.pid]
        trainer.line.close()
        self._generations.client_gone(trainer.number)
        _log.info("rank %d (process %d) has ended", trainer.rank, trainer.pid)

    def _unwatch(self, trainer: _Trainer) -> None:
        asyncio.get_running_loop().remove_reader(trainer.pidfd)
        os.close(trainer.pidfd)

    async def _answer(self, trainer: _Trainer, message: Message, fds: Sequence[int]) -> _Reply:
        """The answer to a request, and the descriptors that go with it; ``fds`` came with it."""
        self._used_s = time.monotonic()
        handler = self._handlers.get(type(message))
        if handler is None:
            raise MessageError(f"rank {trainer.rank} has sent a {type(message).__name__}")
        try:
            return await handler(trainer, message, fds)
        except (DamagedError, OSError, ValueError) as error:
            self._counters.refused += 1
            return Refused("bad", str(error)), []

    async def _enter(self, trainer: _Trainer, message: Enter, fds: Sequence[int]) -> _Reply:
        refusal = self._generations.enter(
            trainer.number, trainer.rank, message.epoch, message.chosen
        )
        if refusal is not None:
            return self._refuse(trainer, refusal), []
        trainer.epoch = message.epoch
        self._forget_unheld()
        return Done(), []

    def _stale(self, trainer: _Trainer) -> Refused | None:
        """Why a trainer of an older epoch may change nothing."""
        if trainer.epoch == self._generations.epoch:
            return None
        text = f"epoch {trainer.epoch} is over: this is epoch {self._generations.epoch}"
        return self._refuse(trainer, Refusal(Reason.STALE_EPOCH, text))

    def _refuse(self, trainer: _Trainer, refusal: Refusal) -> Refused:
        self._counters.refused += 1
        _log.info("rank %d is refused: %s", trainer.rank, refusal.text)
        return Refused(refusal.reason.value, refusal.text)

    async def _fill(self, trainer: _Trainer, message: Fill, fds: Sequence[int]) -> _Reply:
        stale = self._stale(trainer)
        if stale is not None:
            return stale, []
        grant = self._generations.fill(
            trainer.number, trainer.rank, message.step, message.nbytes, trainer.world
        )
        self._forget_unheld()
        if isinstance(grant, Refusal):
            self._counters.skipped += 1
            return self._refuse(trainer, grant), []
        if grant.fresh:
            refused = await self._make(trainer, grant, message)
            if refused is not None:
                return refused, []
        slot = self._slots[grant.slot]
        slot.unlabel()
        filled = Filled(grant.slot, message.nbytes)
        if grant.slot in trainer.handed:
            return filled, []
        trainer.handed.add(grant.slot)
        return filled, [slot.memory.fd]

    async def _make(self, trainer: _Trainer, grant: Grant, message: Fill) -> Refused | None:
        """Take the memory of a slot from the system; or say why not."""
        nbytes = message.nbytes
        spare_nbytes = available_nbytes() - RESERVE_NBYTES
        problem = ""
        if nbytes > spare_nbytes:
            problem = f"{nbytes:,} bytes are wanted, and the system can spare {spare_nbytes:,}"
        else:
            try:
                fd = await offload(lambda: sealed_memory(nbytes, reserve=True))
                memory = Memory(fd, nbytes)
                await offload(memory.populate)
            except OSError as error:
                problem = f"{nbytes:,} bytes are wanted: {error}"
        if problem:
            self._generations.unmade(grant.slot)
            return self._refuse(trainer, Refusal(Reason.NO_MEMORY, problem))
        self._slots[grant.slot] = _Slot(memory)
        self._generations.made(grant.slot)
        id = GenerationId(trainer.epoch, message.step)
        if self._generations.is_filling(grant.slot, trainer.number, id):
            return None
        text = f"step {message.step} was given up while its memory was made"
        return self._refuse(trainer, Refusal(Reason.STALE_EPOCH, text))

    async def _dropped(self, trainer: _Trainer, message: Dropped, fds: Sequence[int]) -> _Reply:
        if not self._generations.dropped(message.slot, trainer.number):
            raise ValueError(f"slot {message.slot} is not being filled by rank {trainer.rank}")
        return Done(), []

    async def _captured(self, trainer: _Trainer, message: Captured, fds: Sequence[int]) -> _Reply:
        stale = self._stale(trainer)
        if stale is not None:
            return stale, []
        slot = self._slots.get(message.slot)
        generation = GenerationId(trainer.epoch, message.step)
        filling = self._generations.is_filling(message.slot, trainer.number, generation)
        if slot is None or not filling or not fds:
            raise ValueError(f"slot {message.slot} is not being filled by rank {trainer.rank}")
        label = Label(
            run=self.options.run,
            generation=generation,
            rank=trainer.rank,
            world=trainer.world,
            nbytes=slot.memory.nbytes,
            hashed_end=message.hashed_end,
            chunk_nbytes=message.chunk_nbytes,
            block_nbytes=message.block_nbytes,
            created_s=message.created_s,
            accord=message.accord,
            equal=dict(message.equal),
            host=trainer.host,
            draft=read_sealed(fds[0], LABEL_NBYTES_MAX),
        )
        check_sizes(label)
        self._generations.captured(message.slot)
        self.run_later(self._seal(trainer, message.slot, slot, label))
        return Done(), []

    async def _seal(self, trainer: _Trainer, number: int, slot: _Slot, draft: Label) -> None:
        """Hash the image, label it, and vote for it."""
        try:
            digests = await seal(
                slot.memory, draft.hashed_end, draft.chunk_nbytes, draft.block_nbytes
            )
            label = replace(draft, digests=digests)
            label_fd = sealed_bytes(await offload(label.encode))
        except BaseException:
            self._generations.unsealed(number)
            raise
        if not self._generations.is_sealing(number, draft.generation):
            self._generations.unsealed(number)  # a resume has dropped it meanwhile
            os.close(label_fd)
            return
        slot.label_fd = label_fd
        slot.label = label
        self._generations.sealed(number)
        self._counters.sealed += 1
        await self._tell(trainer, Sealed(number, label.generation), [slot.label_fd])
        await self._vote(label)

    async def _vote(self, label: Label) -> None:
        outcome = self._ballot.cast(Vote.of(label))
        if outcome is None:
            return
        if outcome is Outcome.VOID:
            self._generations.void(label.generation)
            self._counters.void += 1
            text = "ranks have captured what does not belong together"
            await self._tell_all(Voided(label.generation, text))
            return
        if not self._generations.agreed(label.generation):
            text = "later steps have taken the place of some of its images"
            await self._tell_all(Voided(label.generation, text))
            return
        self._counters.agreed += 1
        await self._tell_all(Agreed(label.generation))
        wish = self._wishes.get(label.generation)
        if wish is not None:
            self.run_later(self._flush_until_durable(wish))
        self._write_locally(label.generation)

    def _write_locally(self, generation: GenerationId) -> None:
        """If it is due. One that is due while another is being written is left out."""
        local = self._local
        if local is None or generation.epoch < self._generations.epoch:
            return
        if local.due(generation.step) and not self._writing_locally:
            self.run_later(self._written_locally(local, generation))

    async def _written_locally(self, local: LocalLevel, generation: GenerationId) -> None:
        self._writing_locally = True
        self._generations.flushing(generation)
        try:
            await local.write(self._images(generation))
            self._counters.local += 1
        except (HoldfastError, OSError) as error:
            self._counters.local_failures += 1
            _log.warning("step %d is not on local storage: %s", generation.step, error)
        finally:
            self._writing_locally = False
            self._generations.flushed(generation)
            self._forget_unheld()

    async def _tell(self, trainer: _Trainer, event: Event, fds: Sequence[int] = ()) -> None:
        """Tell a trainer, if it is still there."""
        try:
            async with asyncio.timeout(TELL_S):
                await trainer.line.send(encode(0, event), fds)
        except TimeoutError:  # it does not read: it is stopped, and finds its line closed
            trainer.line.close()
        except OSError as error:
            _log.debug("rank %d is not told: %s", trainer.rank, error)

    async def _tell_all(self, event: Event) -> None:
        for trainer in list(self._trainers.values()):
            if trainer.epoch == self._generations.epoch:
                await self._tell(trainer, event)

    def _inventory(self) -> Inventory:
        held = self._generations.restorable()
        return Inventory(
            self._generations.epoch,
            tuple(
                HeldGeneration(one.id, one.world, tuple(sorted(one.ranks)), one.agreed)
                for one in held
            ),
        )

    async def _look_up(self, trainer: _Trainer, message: LookUp, fds: Sequence[int]) -> _Reply:
        return self._inventory(), []

    async def _release(self, trainer: _Trainer, message: Release, fds: Sequence[int]) -> _Reply:
        self._generations.released(trainer.number)
        return Done(), []

    async def _open(self, trainer: _Trainer, message: Open, fds: Sequence[int]) -> _Reply:
        number = self._generations.open(trainer.number, message.generation, message.rank)
        if number is None:
            text = f"no image of rank {message.rank} of step {message.generation.step} is held"
            return Refused("missing", text), []
        slot = self._slots[number]
        return Opened(slot.memory.nbytes), [slot.memory.fd, slot.label_fd]

    async def _adopt(self, trainer: _Trainer, message: Adopt, fds: Sequence[int]) -> _Reply:
        if len(fds) != 2:
            raise ValueError(f"an image with {len(fds)} descriptors")
        label = Label.decode(read_sealed(fds[1], LABEL_NBYTES_MAX))
        if label.run != self.options.run or label.nbytes != message.nbytes:
            raise ValueError("that image is not of this run")
        check_sizes(label)
        memory = Memory(os.dup(fds[0]), message.nbytes)
        budget_nbytes = self._generations.budget_nbytes
        self._generations.budget_nbytes = self._budget_with(label.nbytes)
        number = self._generations.adopt(
            trainer.number, label.generation, label.rank, label.world, label.nbytes
        )
        if isinstance(number, Refusal):
            self._generations.budget_nbytes = budget_nbytes
            memory.close()
            return Refused(number.reason.value, number.text), []
        self._slots[number] = _Slot(memory, label, os.dup(fds[1]))
        self.run_later(self._vote(label))
        return Done(), []

    def _budget_with(self, nbytes: int) -> int:
        """With what is adopted: the system could not spare it because it was in use already."""
        budget_nbytes = self._generations.budget_nbytes + nbytes
        return min(budget_nbytes, self.options.budget_nbytes or budget_nbytes)

    async def _flush(self, trainer: _Trainer, message: Flush, fds: Sequence[int]) -> _Reply:
        stale = self._stale(trainer)
        if stale is not None:
            return stale, []
        generation = GenerationId(trainer.epoch, message.step)
        wish = self._wishes[generation] = _Wish(generation, message)
        if self._generations.is_agreed(generation):
            self.run_later(self._flush_until_durable(wish))
        return Done(), []

    async def _flush_until_durable(self, wish: _Wish) -> None:
        """Flush, and try again where that fails, until it is durable, a later one is to be flushed,
        or memory no longer holds what was sealed."""
        self._generations.flushing(wish.generation)
        try:
            async with self._flush_turn:
                self._flushing = wish.generation
                for tried in itertools.count():
                    if await self._flushed(wish):
                        return
                    if self._is_overtaken(wish):
                        return
                    await asyncio.sleep(FLUSH_PAUSES_S[min(tried, len(FLUSH_PAUSES_S) - 1)])
        finally:
            self._flushing = None
            self._wishes.pop(wish.generation, None)
            self._generations.flushed(wish.generation)
            self._forget_unheld()

    def _is_overtaken(self, wish: _Wish) -> bool:
        return any(other > wish.generation for other in self._wishes)

    async def _flushed(self, wish: _Wish) -> bool:
        """Whether there is nothing left to do for ``wish``."""
        if not self._generations.is_agreed(wish.generation):
            text = "a resume has dropped it"
            await self._tell_all(FlushFailed(wish.generation, text, True))
            return True
        images = self._images(wish.generation)
        request = wish.request
        began_s = time.perf_counter()
        try:
            attempt = await flush_to(request, images)
        except (HoldfastError, OSError) as error:
            self._counters.flush_failures += 1
            final = isinstance(error, DamagedError) or self._is_overtaken(wish)
            _log.warning("step %d is not flushed: %s", wish.generation.step, error)
            await self._tell_all(FlushFailed(wish.generation, str(error), final))
            if isinstance(error, DamagedError):
                self._ballot.void(wish.generation)
                self._generations.void(wish.generation)
            return final
        nbytes = sum(image.label.nbytes for image in images if image.label.digests)
        seconds = time.perf_counter() - began_s
        _log.info("step %d is durable after %.1f s", wish.generation.step, seconds)
        self._counters.flushed += 1
        self._generations.durable(wish.generation)
        await self._tell_all(Durable(wish.generation, attempt, nbytes))
        return True

    def _images(self, generation: GenerationId) -> list[HeldImage]:
        """Of all ranks, in order."""
        found = [
            HeldImage(slot.label, slot.memory)
            for slot in self._slots.values()
            if slot.label is not None and slot.label.generation == generation
        ]
        return sorted(found, key=lambda image: image.label.rank)

    def _forget_unheld(self) -> None:
        """Close what the state machine has given up."""
        held = self._generations.slots
        for number in [number for number in self._slots if number not in held]:
            self._close_slot(number)

    def _close_slot(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            slot.close()
        for trainer in self._trainers.values():
            trainer.handed.discard(number)

    def status(self) -> KeeperStatus:
        """What it does now."""
        return KeeperStatus(
            run=self.options.run,
            host=self.options.host,
            pid=os.getpid(),
            began_s=self._began_s,
            epoch=self._generations.epoch,
            budget_nbytes=self._generations.budget_nbytes,
            held_nbytes=sum(slot.memory.nbytes for slot in self._slots.values()),
            ranks=sorted({trainer.rank for trainer in self._trainers.values()}),
            generations=self._inventory().generations,
            flushing=self._flushing,
            counters=self._counters,
        )

    @property
    def idle_s(self) -> float:
        """How long it has been of no use to anyone."""
        if self._trainers or self._tasks:
            return 0.0
        return time.monotonic() - self._used_s

    async def close(self, grace_s: float) -> None:
        """Finish what is under way, for ``grace_s`` at most; then let go of all memory."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for trainer in self._trainers.values():
            self._unwatch(trainer)
        for number in list(self._slots):
            self._close_slot(number)
        if self._local is not None:
            await self._local.close()
