"""Serves the trainers of one host: the shell around :mod:`.decisions.generations`, which decides
about slots. :mod:`.agreement` coordinates with other keepers.

Everything runs on one event loop. Trainers are identified by their processes. Only after a process
has ended is its memory no longer mapped, and only a pidfd tells when: a forked child may keep its
connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from ...core.units import size_text
from ...errors import CoordinationError, DamagedError, HoldfastError
from ..arenas import messages
from ..arenas.hosts import KeeperHost
from ..arenas.label import LABEL_NBYTES_MAX, GenerationId, Label, check_sizes
from ..arenas.memory import read_sealed, sealed_bytes
from ..arenas.sockets import Line, MessageError
from ..runtime.engine import offload
from .agreement import Agreement
from .decisions.slots import Grant, Reason, Refusal
from .descriptor_store import DescriptorStore
from .flushing.local_level import LocalLevel
from .options import KeeperOptions, confine, wanted_options
from .parity.guards import Guards
from .rebuilding import Rebuilding
from .sealing import seal
from .serving.memory_catalog import MemoryCatalog
from .slot_memory import PooledSlot, SlotPool
from .status import Counters, KeeperStatus
from .succession import Estate, Succession
from .trainers import Startup, Trainer, Trainers, other_version, refusal_of

HELLO_S = 10.0
"""Time limit for a connecting process to identify itself."""

_log = logging.getLogger(__name__)
_OF_THIS_EPOCH = messages.Fill | messages.Captured | messages.Flush
_Fds = Sequence[int]
_Reply = tuple[messages.Answer, _Fds]


class Keeper:
    """The keeper of one run on one host. ``name``: unique among the keepers of the run; ``store``:
    keeps the memory while a keeper service restarts; ``is_service``: it was not started by a
    trainer, so nothing but its service manager may replace it."""

    def __init__(
        self,
        options: KeeperOptions,
        name: str = "keeper",
        store: DescriptorStore | None = None,
        *,
        is_service: bool = True,
    ) -> None:
        """Raise OSError if the system does not tell how much memory is available."""
        self.succession = Succession(is_service=is_service)
        self.options = options
        self.name = name
        self._store = store
        self.pool = SlotPool(*options.limits)
        self._generations = self.pool.generations
        self._trainers = Trainers(self._gone, self._back)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sealing = set[asyncio.Task[Any]]()
        self._counters = Counters()
        self._began_s = time.time()
        self._used_s = time.monotonic()
        self._guards = Guards(options.run, options.certificate, self._guards_changed)
        self.rebuilding = Rebuilding(self.pool, options, self._counters)
        self._agreement = Agreement(
            name,
            self.pool,
            self._guards,
            self._counters,
            self._tell_all,
            self.run_later,
        )
        self.reporting = self._agreement.reporting
        self._writing = self._agreement.writing
        self._locals: list[LocalLevel] = []
        """Local levels, the current one last."""
        self._set_local(options)
        self.catalog = MemoryCatalog(
            self.pool,
            self._guards,
            options.run,
            self.status,
            self.inventory,
            lambda: len(self.reporting.hosts),
        )
        """The contents served over HTTP."""
        self.address = ""
        """HTTP address, "" if not served."""
        self._token = ""
        self.ended = asyncio.Event()
        self._startup = Startup()
        self._finished = set[int]()
        """Ranks of this epoch and host that have finished training."""
        self._all_finished = False
        self._problem = ""
        """The reason why the job keeps no steps in this epoch."""
        self._handlers: dict[type, Callable[[Trainer, Any, _Fds], Awaitable[_Reply]]] = {
            messages.Enter: self._enter,
            messages.Fill: self._fill,
            messages.Captured: self._captured,
            messages.Dropped: self._dropped,
            messages.LookUp: self._look_up,
            messages.Open: self._open,
            messages.Rebuild: self._rebuild,
            messages.Release: self._release,
            messages.Leave: self._leave,
            messages.Adopt: self._adopt,
            messages.Flush: self._flush,
        }

    async def recall(self, estate: Estate | None = None) -> None:
        """Restore the images of the previous keeper and of the local level, once. Trainers that
        connect meanwhile wait until :meth:`welcomes`."""
        if self._startup.over.is_set():
            return
        if estate is not None:
            estate.recall(self.pool, self.options.run)
        if self._store is not None:
            self._store.recall(self.pool, self.options.run)
            self.keep_over()
        for local in self._locals:
            async for image in local.read(self.pool.has, self._startup.moved):
                slot = await PooledSlot.sealed(image.label, image.memory)
                if self.pool.recall(slot, outlived=False):  # only agreed ones are written there
                    self._generations.agreed(image.label.generation)

    def keep_over(self) -> None:
        """Hand all images to the descriptor store, if any, so that they outlive this process."""
        if self._store is not None:
            self._store.keep(self.pool)

    def welcomes(self) -> None:
        """Let trainers in."""
        self._startup.over.set()

    def serves_at(self, address: str, token: str) -> None:
        """Set the HTTP address, and the token that readers need."""
        self.address = address
        self._token = token

    @property
    def host(self) -> KeeperHost:
        """This keeper's entry in the list of hosts, without its ranks."""
        tls = bool(self.options.certificate)
        return KeeperHost(self.name, self.options.host, self.address, self._token, tls)

    async def attend(self, line: Line) -> None:
        """Serve one connection until it ends. A bad message closes it, never the keeper."""
        trainer: Trainer | None = None
        try:
            trainer = await self._welcome(line)
            while trainer is not None:
                received = await line.receive()
                try:
                    number, message = messages.decode(received.data)
                    trainer.asks = number
                    answer, out = await self._answer(trainer, message, received.fds)
                    self.keep_over()  # before a slot is overwritten
                finally:
                    for fd in received.fds:
                        os.close(fd)
                await line.send(messages.encode(number, answer), out)
        except (MessageError, CoordinationError) as error:
            _log.warning("a connection is closed: %s", error)
        except OSError as error:
            _log.debug("a connection has ended: %s", error)
        finally:
            if not self.succession.uses(line):
                line.close()

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Schedule ``work``. Exceptions are logged."""
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._sealing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the keeper has failed", exc_info=task.exception())

    async def _welcome(self, line: Line) -> Trainer | None:
        """Return the connecting trainer, or None if it is refused or was a command such as
        status."""
        if line.peer_uid != os.getuid():
            raise MessageError(f"it belongs to the user {line.peer_uid}")
        async with asyncio.timeout(HELLO_S):
            received = await line.receive()
        received.close()
        try:
            number, message = messages.decode(received.data)
        except CoordinationError as error:
            number = messages.number_of(received.data)
            await line.send(messages.encode(number, other_version(error.message)))
            return None
        if not isinstance(message, messages.Hello):
            await self._command(line, number, message)
            return None
        trainer: Trainer | messages.Refused | None = refusal_of(message, self.options.run)
        if trainer is None:
            progress = messages.encode(number, messages.Progress())
            await self._startup.wait(partial(line.send, progress))
            trainer = self._trainers.at(line, message)
        if isinstance(trainer, messages.Refused):
            self._counters.refused += 1
            _log.warning("process %d is refused: %s", line.peer_pid, trainer.text)
            await line.send(messages.encode(number, trainer))
            return None
        self._used_s = time.monotonic()
        fixed = self._configure(message.options)
        await line.send(messages.encode(number, messages.Welcome(os.getpid(), self.host, fixed)))
        return trainer

    async def _command(self, line: Line, number: int, message: messages.Message) -> None:
        """Answer a process that is no trainer."""
        if isinstance(message, messages.StatusAsked):
            status = messages.Status(json.dumps(self.status().as_json()))
            await line.send(messages.encode(number, status))
        elif isinstance(message, messages.Stop):
            await line.send(messages.encode(number, messages.Done()))
            self.ended.set()
        elif isinstance(message, messages.TakeOver):
            ranks = [trainer.rank for trainer in self._trainers]
            is_free = self._startup.over.is_set() and not self.ended.is_set()
            if await self.succession.accepts(line, number, message, ranks, is_free=is_free):
                self.ended.set()
        else:
            raise MessageError(f"its first message is a {type(message).__name__}")

    def _configure(self, text: str) -> tuple[str, ...]:
        """Apply the options that a trainer wants, and return the names of those that differ and
        that cannot be changed, or not to that value."""
        before = self.options
        try:
            options, fixed = wanted_options(text, before)
            if options == before:
                return fixed
            confine(options, before)
            if (options.local, options.local_every) != (before.local, before.local_every):
                self._set_local(options)
            if options.limits != before.limits:
                self.pool.limit(*options.limits)
        except (TypeError, ValueError, OSError, HoldfastError) as error:
            _log.warning("the options of a trainer cannot be applied: %s", error)
            return ("options",)
        self.options = options
        _log.info("this keeper has other options from now on: %s", options)
        return fixed

    def _set_local(self, options: KeeperOptions) -> None:
        """Set the local level. The previous one stays open until the end: it may be writing now."""
        local = None
        if options.local is not None:
            local = LocalLevel(options.local, options.local_every, options.run)
            self._locals.append(local)
        self._writing.local = local

    def _gone(self, trainer: Trainer) -> None:
        self._used_s = time.monotonic()
        self._generations.client_gone(trainer.number)
        self._guards.client_gone(trainer.number)
        if not trainer.left and trainer.epoch == self._generations.epoch:
            self._agreement.rank_lost(trainer.rank)

    def _back(self, trainer: Trainer) -> None:
        self._generations.drop_unfinished(trainer.number)

    def _guards_changed(self) -> None:
        self._counters.protect_failures = self._guards.failures
        self._agreement.tell_later()

    async def _answer(self, trainer: Trainer, message: messages.Message, fds: _Fds) -> _Reply:
        self._used_s = time.monotonic()
        handler = self._handlers.get(type(message))
        if handler is None:
            raise MessageError(f"rank {trainer.rank} has sent a {type(message).__name__}")
        stale = self._stale(trainer)
        if stale is not None and isinstance(message, _OF_THIS_EPOCH):
            return self._refuse(trainer, stale), []
        try:
            return await handler(trainer, message, fds)
        except (DamagedError, OSError, ValueError) as error:
            self._counters.refused += 1
            return messages.Refused("bad", str(error)), []

    async def _enter(self, trainer: Trainer, message: messages.Enter, fds: _Fds) -> _Reply:
        refusal = self._generations.enter(
            trainer.number, trainer.rank, message.epoch, message.chosen
        )
        if refusal is not None:
            return self._refuse(trainer, refusal), []
        trainer.epoch = message.epoch
        self._problem = message.problem
        self._finished.clear()
        self._all_finished = False
        self._agreement.enter(message.epoch, message.chosen, message.hosts, message.groups)
        self._writing.forget_dropped()
        self._close_unheld()
        self.run_later(self._writing.note_end(message.ended))
        return messages.Done(), []

    def _stale(self, trainer: Trainer) -> Refusal | None:
        """Return a refusal if the trainer belongs to an older epoch, and so may change nothing."""
        if trainer.epoch == self._generations.epoch:
            return None
        text = f"epoch {trainer.epoch} is over: this is epoch {self._generations.epoch}"
        return Refusal(Reason.STALE_EPOCH, text)

    def _refuse(self, trainer: Trainer, refusal: Refusal) -> messages.Refused:
        self._counters.refused += 1
        _log.info("rank %d is refused: %s", trainer.rank, refusal.text)
        return messages.Refused(refusal.reason.value, refusal.text)

    async def _fill(self, trainer: Trainer, message: messages.Fill, fds: _Fds) -> _Reply:
        if not 0 <= message.within_s < math.inf:
            raise ValueError(f"memory is wanted within {message.within_s} s")
        if self.succession.is_pending:
            text = "another keeper is about to take over"
            return self._refuse(trainer, Refusal(Reason.NO_FREE_SLOT, text)), []
        grant = self._generations.fill(
            trainer.number, trainer.rank, message.step, message.nbytes, trainer.world
        )
        self._close_unheld()
        self._agreement.look_for_missing()
        if isinstance(grant, Refusal):
            self._counters.skipped += 1
            return self._refuse(trainer, grant), []
        if grant.fresh:
            refused = await self._make(trainer, grant, message)
            if refused is not None:
                return refused, []
        slot = self.pool.slots[grant.slot]
        slot.unlabel()
        filled = messages.Filled(grant.slot, message.nbytes)
        if grant.slot in trainer.handed:
            return filled, []
        trainer.handed.add(grant.slot)
        return filled, [slot.memory.fd]

    async def _make(
        self, trainer: Trainer, grant: Grant, message: messages.Fill
    ) -> messages.Refused | None:
        taking = self.pool.take_memory(grant.slot, message.nbytes, trainer.node)
        making = asyncio.ensure_future(taking)
        self._keep(making)
        done, _ = await asyncio.wait({making}, timeout=message.within_s)
        if not done:
            # Allocation continues, for a later step. Large images take long, and training must not
            # wait.
            self._generations.dropped(grant.slot, trainer.number)
            self._agreement.look_for_missing()
            text = f"the memory for {size_text(message.nbytes)} is still being allocated"
            return self._refuse(trainer, Refusal(Reason.NO_MEMORY, text))
        problem = making.result()
        if problem:
            return self._refuse(trainer, Refusal(Reason.NO_MEMORY, problem))
        id = GenerationId(trainer.epoch, message.step)
        if self._generations.is_filling(grant.slot, trainer.number, id):
            return None
        text = f"step {message.step} was dropped while its memory was being allocated"
        return self._refuse(trainer, Refusal(Reason.STALE_EPOCH, text))

    async def _dropped(self, trainer: Trainer, message: messages.Dropped, fds: _Fds) -> _Reply:
        if not self._generations.dropped(message.slot, trainer.number):
            raise ValueError(f"slot {message.slot} is not being filled by rank {trainer.rank}")
        self._agreement.look_for_missing()
        return messages.Done(), []

    async def _captured(self, trainer: Trainer, message: messages.Captured, fds: _Fds) -> _Reply:
        slot = self.pool.slots.get(message.slot)
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
            agreement=message.agreement,
            equal=dict(message.equal),
            host=trainer.host,
            draft=read_sealed(fds[0], LABEL_NBYTES_MAX),
        )
        check_sizes(label)
        self._generations.captured(message.slot)
        sealing = asyncio.ensure_future(self._seal(trainer, message.slot, slot, label))
        self._sealing.add(sealing)
        self._keep(sealing)
        return messages.Done(), []

    async def _seal(self, trainer: Trainer, number: int, slot: PooledSlot, draft: Label) -> None:
        try:
            label = await seal(slot.memory, draft)
            label_fd = sealed_bytes(await offload(label.encode))
        except BaseException:
            self._generations.unsealed(number)
            raise
        if not self._generations.is_sealing(number, draft.generation):
            self._generations.unsealed(number)  # dropped by a resume meanwhile
            os.close(label_fd)
            return
        slot.label_fd = label_fd
        slot.label = label
        self._generations.sealed(number)
        self._counters.sealed += 1
        self.keep_over()
        sealed = messages.Sealed(number, label.generation)
        await self._trainers.tell(trainer, sealed, [slot.label_fd])
        await self._agreement.vote(label)

    async def _tell_all(self, event: messages.Event) -> None:
        self.keep_over()
        await self._trainers.tell_all(event, self._generations.epoch)

    def inventory(self) -> messages.Inventory:
        """Return the images and parity that this keeper holds."""
        return messages.Inventory(
            self._generations.epoch,
            tuple(self._generations.restorable()),
            self._guards.inventory(),
            self.reporting.hosts,
        )

    async def _look_up(self, trainer: Trainer, message: messages.LookUp, fds: _Fds) -> _Reply:
        self._generations.offer(trainer.number)
        self._guards.offer(
            trainer.number, [one.generation for one in self._generations.restorable()]
        )
        return self.inventory(), []

    async def _release(self, trainer: Trainer, message: messages.Release, fds: _Fds) -> _Reply:
        self._generations.released(trainer.number)
        self._guards.released(trainer.number)
        return messages.Done(), []

    async def _leave(self, trainer: Trainer, message: messages.Leave, fds: _Fds) -> _Reply:
        trainer.left = True
        if message.finished and trainer.epoch == self._generations.epoch:
            self._finished.add(trainer.rank)
            own_ranks = self.reporting.own_ranks(trainer.world)
            self._all_finished = self._finished.issuperset(own_ranks)
        return messages.Done(), []

    async def _open(self, trainer: Trainer, message: messages.Open, fds: _Fds) -> _Reply:
        number = self._generations.open(trainer.number, message.generation, message.rank)
        if number is None:
            text = f"no image of rank {message.rank} of step {message.generation.step} is held"
            return messages.Refused("missing", text), []
        slot = self.pool.slots[number]
        return messages.Opened(slot.memory.nbytes), [slot.memory.fd, slot.label_fd]

    async def _rebuild(self, trainer: Trainer, message: messages.Rebuild, fds: _Fds) -> _Reply:
        refused = await self.rebuilding.rebuild(message, self._trainers.in_flight(trainer))
        if refused is None and trainer in self._trainers:  # otherwise nobody would release it
            self._generations.offer(trainer.number)
        return refused or messages.Done(), []

    async def _adopt(self, trainer: Trainer, message: messages.Adopt, fds: _Fds) -> _Reply:
        slot = PooledSlot.of_descriptors([os.dup(fd) for fd in fds], self.options.run)
        label = slot.label
        assert label is not None
        of_image = label.generation, label.rank, label.world, label.nbytes
        self._writing.handed_over(label.generation)
        number = self.pool.in_use_already(
            label.nbytes, partial(self._generations.adopt, trainer.number, *of_image)
        )
        self._close_unheld()
        if isinstance(number, Refusal):
            slot.close()
            if number.reason is Reason.DUPLICATE:  # this keeper lived, only the connection was lost
                return messages.Done(), []
            return messages.Refused(number.reason.value, number.text), []
        outlived = self.pool.slots.pop(number, None)
        if outlived is not None:
            outlived.close()
        self.pool.slots[number] = slot
        self.run_later(self._agreement.vote(label, handed_over=True))
        return messages.Done(), []

    async def _flush(self, trainer: Trainer, message: messages.Flush, fds: _Fds) -> _Reply:
        self._writing.want(GenerationId(trainer.epoch, message.step), message)
        return messages.Done(), []

    def _close_unheld(self) -> None:
        for number in self.pool.close_unheld():
            for trainer in self._trainers:
                trainer.handed.discard(number)

    def status(self) -> KeeperStatus:
        """Return the current status."""
        return KeeperStatus(
            run=self.options.run,
            host=self.options.host,
            pid=os.getpid(),
            began_s=self._began_s,
            epoch=self._generations.epoch,
            budget_nbytes=self._generations.budget_nbytes,
            held_nbytes=self.pool.nbytes,
            ranks=sorted({trainer.rank for trainer in self._trainers}),
            generations=self.inventory().generations,
            flushing=self._writing.flushing,
            address=self.address,
            counters=self._counters,
            name=self.name,
            hosts=[host.name for host in self.reporting.hosts],
            protection=next((group.mode for group in self.reporting.groups), "off"),
            protected=self._agreement.protected,
            parity_nbytes=self._guards.nbytes,
            ready=self._startup.over.is_set(),
            problem=self._problem,
            is_service=self.succession.is_service,
        )

    @property
    def is_finished(self) -> bool:
        """True once all ranks of this host have finished training and have ended, and nothing in
        memory is newer than storage."""
        if not self._all_finished or self._trainers or self._tasks:
            return False
        return self._generations.newest_agreed == self._writing.durable

    @property
    def is_unused(self) -> bool:
        """True while it has neither trainers nor tasks."""
        return not (self._trainers or self._tasks)

    def note_use(self) -> None:
        """Record that this keeper is in use."""
        self._used_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since this keeper was last in use; 0 while it has trainers or tasks."""
        return time.monotonic() - self._used_s if self.is_unused else 0.0

    async def finish(self, grace_s: float) -> None:
        """Wait, for ``grace_s`` at most, until all tasks are done and all trainers are gone.
        Trainers may be stopped at the same time, and still save. With a successor, they look for
        that at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if self.succession.is_pending:
                    while self._sealing:
                        await asyncio.wait(self._sealing)
                    for trainer in self._trainers:
                        trainer.line.close()
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks, and release all memory."""
        await self._agreement.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._trainers.close()
        self.pool.close()
        for local in self._locals:
            await local.close()
