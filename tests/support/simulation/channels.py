"""Trainers that publish weights, and engines that follow them, as simulated jobs.

The publisher, the subscriber and their blocking calls are real. At every moment, the weights of an
engine must be exactly one published version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from holdfast.core.lru import LruCache
from holdfast.drivers import contract, registry, watching
from holdfast.drivers.contract import Buffer, Driver
from holdfast.drivers.layers.layer import Layer
from holdfast.drivers.uri import Uri, parse
from holdfast.errors import (
    CoordinationError,
    DamagedError,
    DeadlineError,
    ExistsError,
    HoldfastError,
    MismatchError,
    StateError,
    StorageError,
    SupersededError,
    UsageError,
)
from holdfast.storage.operations.saving import start_save
from holdfast.storage.operations.saving.save_job import PLANS_KEPT
from holdfast.storage.ranks import process_group
from holdfast.storage.ranks.calls import Call
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime import engine as runtime
from holdfast.storage.weights import channel, leases, publisher
from holdfast.storage.weights.api import publish, subscribe

from . import blocking, engine
from .channel_schedule import ChannelActor, ChannelSchedule
from .channel_truth import ROOT, PublishedVersion, Push, Truth, Values, difference
from .channel_weights import Module, first_values, model, trained
from .checker import Violation
from .engine import CHUNK_NBYTES
from .loop import PROCESS, Crashed, Process
from .states import SILENCE_S, Store
from .world import World

URI = f"memory://{ROOT}"
TRIES = 4
AGAIN_S = 5.0
_SILENT = {"die", "power", "pause", "cut", "hang", "store", "outage"}
"""Faults that may leave a rank without an answer until its deadline."""
PUSH_MOST_S = 40.0
"""Longest push of a trainer that no fault has hit."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Run the engine, and weight channels, within a ``with`` block only in simulations."""
    patches = list(_patches())
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with engine.installed():
        try:
            for owner, name, value in patches:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            logging.disable(disabled)


def _patches() -> Iterator[tuple[ModuleType | type, str, Any]]:
    yield runtime.EngineFuture, "_wait", blocking.wait
    replaced: dict[str, tuple[object, Any]] = {
        "run": (runtime.run, blocking.run),
        "start": (runtime.start, blocking.start),
        "offload": (runtime.offload, engine._offload),
        "check_may_wait": (runtime.check_may_wait, lambda: None),
        "finish_before_exit": (runtime.finish_before_exit, lambda: None),
        "open_driver": (registry.open_driver, _open_driver),
        "current_team": (process_group.current_team, _team),
        "current_rank": (process_group.current_rank, lambda: _here().rank),
        "current_world": (process_group.current_world, lambda: _here().world_size),
    }
    for module in [m for name, m in sys.modules.items() if name.startswith("holdfast.storage.")]:
        if module not in (runtime, process_group):
            for name, (real, value) in replaced.items():
                if module.__dict__.get(name) is real:
                    yield module, name, value
    yield start_save, "_in_flight", blocking.OfProcess(dict)
    yield start_save, "_plans", blocking.OfProcess(lambda: LruCache(PLANS_KEPT))
    names = SimpleNamespace(token_hex=lambda n: f"{_here().world.token():0{2 * n}x}")
    for module in (publisher, leases):
        yield module, "secrets", names
    yield channel, "time", SimpleNamespace(monotonic=lambda: _here().world.loop.now_s)
    yield contract, "poll", partial(watching.poll, chance=_chance)
    yield leases.Lease, "take", _noting(leases.Lease.take)
    yield leases.Lease, "release", _releasing(leases.Lease.release)


def _here() -> Rank:
    process = PROCESS.get()
    assert isinstance(process, Rank)
    return process


def _chance() -> float:
    return _here().world.chance()


def _open_driver(uri: str | Uri, *_: object, **__: object) -> Driver:
    parsed = uri if isinstance(uri, Uri) else parse(uri)
    rank = _here()
    driver = rank.world.driver(parsed.location.strip("/"))
    return driver if rank.engine is None else _Flipping(driver, rank.world)


class _Flipping(Layer):
    """Flips the bits of images and patches that the schedule names, on their way to engines."""

    def __init__(self, inner: Driver, world: ChannelWorld) -> None:
        super().__init__(inner)
        self._world = world

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await self.inner.read(key, start, into)
        if len(into) and self._world.flips():
            into[self._world.below(len(into))] ^= 1 << self._world.below(8)


def _team(call: Call, deadline_s: float, *, saving: bool) -> Team:
    rank = _here()
    if rank.member is None:
        return Team()
    return StoreTeam(
        *(rank.store, rank.rank, rank.world_size, "", deadline_s, call, rank.member),
    )


def _noting(real: Any) -> Any:
    @wraps(real)
    async def take(self: Any, sequence: int) -> Any:
        sequence = await real(self, sequence)
        _here().truth.lease(self._key, sequence)
        return sequence

    return take


def _releasing(real: Any) -> Any:
    @wraps(real)
    async def release(self: Any) -> Any:
        _here().truth.release(self._key)
        await real(self)

    return release


class Rank(Process):
    """A process of a simulated job. ``engine``: the weights of an engine; ``pushing``: a trainer's
    push in flight."""

    def __init__(self, name: str, host: str) -> None:
        super().__init__(name, host)
        self.world: ChannelWorld
        self.truth: Truth
        self.store: Store
        self.member: Member | None = None
        self.rank = 0
        self.world_size = 1
        self.engine: Engine | None = None
        self.pushing: Push | None = None


class ChannelWorld(World):
    """A world that checks the weights of an engine at each of its operations."""

    def __init__(self, schedule: ChannelSchedule, log: Any = None, *, chance: int = 1) -> None:
        super().__init__(schedule, log, chance=chance)  # type: ignore[arg-type]
        self._slipping = True  # ranks make one call after another, and look for each other there
        self.befallen: set[str] = set()
        """Hosts that a fault has hit."""
        self.is_settled = False
        self.images_read = 0
        """Number of reads of images and patches by engines."""

    def _next_fault(self, name: str, key: str) -> Any:
        process = PROCESS.get()
        if isinstance(process, Rank) and process.engine is not None:
            process.engine.check()
        fault = super()._next_fault(name, key)
        if fault is not None and process is not None:
            self.befallen.add(process.host)
        return fault

    def flips(self) -> bool:
        """Count a read; return whether a bit of it flips."""
        self.images_read += 1
        schedule: Any = self.schedule
        is_due = self.images_read in schedule.flips and not self.is_settled
        if is_due:
            self.struck["flip"] += 1
        return is_due

    def settle(self) -> None:
        """See :meth:`World.settle`."""
        super().settle()
        self.is_settled = True


@dataclass(eq=False)
class Engine:
    """The weights that a rank of an engine computes with, and the expected ones."""

    rank: Rank
    kind: str
    live: dict[str, Any] = field(default_factory=dict)
    expected: Values = field(default_factory=dict)
    used: int = 0
    subscriber: Any = None

    def weights(self) -> Values:
        """Return the weights that the engine computes with, if it fills any."""
        return {name: self._tensor(name) for name in self.live}

    def _tensor(self, name: str) -> torch.Tensor:
        found = self.live[name]
        return found.weight.data if isinstance(found, torch.nn.Module) else found

    def into(self) -> Any:
        """Return the state for the subscriber to fill."""
        return None if self.kind == "nothing" else {"model": self.live}

    def check(self) -> None:
        """Raise Violation unless the weights are exactly the version in use."""
        if self.kind == "nothing":
            return  # its weights are read on demand
        if different := difference(self.weights(), self.expected):
            raise Violation(f"{self.rank} has other weights than version {self.used}: {different}")

    def change(self, rng: np.random.Generator) -> None:
        """Change weights locally, as an experiment of the engine."""
        if not self.used or self.kind == "nothing":
            return
        for name in self.live:
            tensor = self._tensor(name)
            tensor.view(-1)[int(rng.integers(tensor.numel()))] += 1
        self.expected = {name: tensor.clone() for name, tensor in self.weights().items()}


class Job:
    """A trainer or an engine: processes that a launcher starts, and starts again."""

    def __init__(self, crew: ChannelCrew, plan: ChannelActor) -> None:
        self.crew = crew
        self.world, self.truth, self.plan = crew.world, crew.truth, plan
        self.outcomes: Counter[str] = Counter()
        self.tried = 0
        self.is_over = False
        self.failed = False
        """True once a call of a rank has failed since the last start."""
        self.rng = np.random.default_rng([self.world.schedule.seed, len(crew.jobs)])
        self.store = Store(self.world.loop)
        self.ranks: list[Rank] = []
        self._met: dict[int, int] = {}
        """Number of ranks that have reached each step."""
        self._values: Values = first_values(self.world.schedule.chunks)
        self._kept = [self._values]
        self._pushes: dict[tuple[int, int], Push] = {}
        self._version = 0

    async def life(self) -> None:
        """Run until the job has ended, or has used up its starts."""
        await asyncio.sleep(self.plan.begin_s)
        for tried in range(TRIES if self.plan.again else 1):
            self.tried = tried
            self.world.calm_s = max(self.world.calm_s, self.world.loop.now_s)
            if await self._try():
                break
            await asyncio.sleep(AGAIN_S)
        self.is_over = True

    async def _try(self) -> bool:
        """Run all ranks; return whether none has died."""
        for former in self.ranks:
            if former.alive:
                self.world.kill(former)
        self.ranks = []
        self._met = {}
        self.failed = False
        call = self._publish if self.plan.kind == "publish" else self._follow
        tasks = []
        for number in range(self.plan.world):
            name = f"{self.plan.name}.{self.tried}/{number}"
            rank = self.crew.process(name, f"{self.plan.name}-{number}")
            rank.store, rank.rank, rank.world_size = self.store, number, self.plan.world
            self.ranks.append(rank)
            tasks.append(self.world.loop.spawn(rank, self._rank(rank, partial(call, rank))))
        running = dict(zip(self.ranks, tasks, strict=True))
        while running:
            await asyncio.wait(running.values(), timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
            for rank, task in list(running.items()):
                if not rank.alive:
                    del running[rank]
                elif task.done():
                    task.result()
                    del running[rank]
        return all(rank.alive for rank in self.ranks)

    async def _rank(self, rank: Rank, call: Callable[[], None]) -> None:
        if self.plan.world > 1:
            rank.member = Member(Keys(self.store, "job"), rank.rank, rank.world_size)
        await blocking.blocking(call)

    def note(self, rank: Rank, what: str, error: BaseException | None = None) -> None:
        """Count an outcome. Raises Violation for an error without a reason."""
        ended = "done" if error is None else type(error).__name__
        self.outcomes[f"{what}: {ended}"] += 1
        if self.world.log is not None:
            self.world.log(f"{self.world.loop.now_s:12.4f} {rank}: {what}: {error or ended!r:.300}")
        if error is None:
            return
        before, self.failed = self.failed, True
        slept = self.world.struck.keys() & _SILENT
        is_lost = bool(slept) and "lost with their whole file" in str(error)  # no lease any more
        # A flipped bit is read again, unless another fault ends the update first.
        flips = self.world.struck["flip"]
        is_flipped = 0 < flips < sum(self.world.struck.values())
        if isinstance(error, DamagedError | MismatchError) and not (is_lost or is_flipped):
            raise Violation(f"{rank}: {error!r}") from error
        if isinstance(error, DeadlineError):
            is_excused = bool(slept)
        elif isinstance(error, CoordinationError):
            is_excused = self.plan.world > 1
        elif isinstance(error, StateError):
            is_excused = True
        elif isinstance(error, UsageError):
            is_excused = "is not newer than" in error.message and self.plan.kind == "publish"
            # Ranks may have different knowledge.
            is_excused |= bool(slept) and "different calls" in error.message
        elif isinstance(error, ExistsError):
            is_excused = False  # with another publisher, the error must be SupersededError
        else:
            is_excused = is_lost or is_flipped or isinstance(error, StorageError | SupersededError)
        others = sum(job.plan.kind == "publish" for job in self.crew.jobs) > 1
        calm = not self.world.struck and self.plan.failing < 0 and not self.tried
        if not is_excused or (calm and not before and not others):
            raise Violation(f"{rank} failed for no reason in {what}: {error!r}") from error

    def _meet(self, number: int) -> None:
        """Wait for all ranks, as training and inference do in each step. Raises Crashed if one has
        died: the launcher ends the others."""
        self._met[number] = self._met.get(number, 0) + 1
        while self._met[number] < len(self.ranks):
            if not all(rank.alive for rank in self.ranks):
                self.world.kill(_here())
                raise Crashed
            blocking.sleep(1.0)

    # Trainers.

    @property
    def publisher(self) -> str:
        """Return the name of the trainer since its last start."""
        return f"{self.plan.name}.{self.tried}"

    def _publish(self, rank: Rank) -> None:
        schedule: Any = self.world.schedule
        number = 0
        try:
            trainer = publish(
                URI, keep=schedule.keep, anchor=schedule.anchor, lazy=False, deadline_s=SILENCE_S
            )
        except HoldfastError as error:
            self.note(rank, "publish", error)
            self.world.kill(rank)
            raise Crashed from error
        with trainer:
            while number < self.plan.steps:
                self._meet(number)
                push = self._next(number, trainer.newest)
                try:
                    self._push(rank, trainer, push, number)
                except SupersededError as error:
                    self._superseded(rank, error)
                except HoldfastError as error:
                    self.note(rank, "push", error)
                number += 1
                blocking.sleep(self.plan.gap_s)

    def _next(self, number: int, newest: int | None) -> Push:
        """Return the push of this number, which is the same on all ranks."""
        key = self.tried, number
        if key not in self._pushes:
            if number == 0 and self.tried:
                self._values = self._kept[int(self.rng.integers(len(self._kept)))]
                stale = self.rng.random() < 0.3
                self._version = self._version // 2 if stale else max(self._version, newest or 0)
            else:
                self._version = max(self._version, -1 if newest is None else newest)
            self._version += int(self.rng.integers(1, 4))
            self._values = trained(self._values, self.plan.share, self.rng)
            self._kept.append(self._values)
            self._pushes[key] = Push(self.publisher, self._version, self._values)
        return self._pushes[key]

    def _push(self, rank: Rank, trainer: Any, push: Push, number: int) -> None:
        live = {name: tensor.clone() for name, tensor in push.values.items()}
        fails = number == self.plan.failing and rank.rank == self.plan.world - 1
        state = {"model": live, "what": object()} if fails else {"model": live}
        began_s = self.world.loop.now_s
        trainer._settle()
        rank.pushing = push
        self.crew.publishers.add(self.publisher)
        handle = trainer.push(push.version, state)
        for tensor in live.values():
            tensor.zero_()  # training continues
        if self.plan.waits or number % 3 == 0:
            handle.wait()
            self.truth.told(push)
            self._check_time(rank, self.world.loop.now_s - began_s)
            self.note(rank, "push")

    def _check_time(self, rank: Rank, lasted_s: float) -> None:
        """Raise Violation if a push takes too long without a fault: readers must not delay it."""
        is_slow = any(one.host in self.world.befallen for one in self.ranks)
        if lasted_s > PUSH_MOST_S and not is_slow and not self.failed:
            raise Violation(f"{rank} took {lasted_s:g} s for a push")

    def _superseded(self, rank: Rank, error: HoldfastError) -> None:
        self.note(rank, "push", error)
        if self.crew.publishers <= {self.publisher}:
            raise Violation(f"{rank} is told of another publisher: there is none")

    # Engines.

    def _follow(self, rank: Rank) -> None:
        values = first_values(self.world.schedule.chunks)
        mine = Engine(rank, self.plan.into)
        if self.plan.into != "nothing":
            for name, tensor in values.items():
                zero = torch.zeros_like(tensor)
                as_module = self.plan.into == "module" and tensor.is_floating_point()
                mine.live[name] = Module(zero) if as_module else zero
            mine.expected = {name: tensor.clone() for name, tensor in mine.weights().items()}
        rank.engine = mine
        # A module's parameter has the tensor's own name, so both targets fill alike.
        into = mine.into()
        if self.plan.into == "module":
            into = {"model": model(mine.live)}
        with subscribe(
            URI, into, in_place=self.plan.in_place, deadline_s=SILENCE_S
        ) as mine.subscriber:
            for number in range(self.plan.steps):
                self._meet(number)
                self._update(rank, mine, self.plan.timeout_s)
                mine.check()
                if self.rng.random() < 0.3:
                    mine.change(self.rng)
                blocking.sleep(self.plan.gap_s)
            self._finally(rank, mine)

    def _update(self, rank: Rank, mine: Engine, timeout_s: float) -> None:
        there = self.truth.newest
        try:
            prepared = mine.subscriber.prepare(timeout_s)
        except HoldfastError as error:
            self.note(rank, "update", error)
            return
        if prepared is None:
            self.note(rank, "no update")
            if mine.used < there:
                raise Violation(f"{rank} uses version {mine.used}, and is told of none after it")
            return
        if self.plan.waits:
            blocking.sleep(self.plan.gap_s)
        self._check_group(rank, _attempt_of(prepared))
        update = prepared.commit()
        version = self.truth.published.get(update.sequence)
        if version is None or version.attempt != _attempt_of(prepared):
            raise Violation(f"{rank} uses version {update.sequence}, which was not published")
        if update.version != version.push.version:
            raise Violation(f"{rank} is told of version {update.version}")
        if update.sequence < max(mine.used, there):
            raise Violation(f"{rank} updates to version {update.sequence} of {there}")
        mine.used = update.sequence
        mine.expected = version.push.values
        mine.check()
        if mine.kind == "nothing":
            self._check_read(rank, mine)
        self.note(rank, "update")

    def _check_read(self, rank: Rank, mine: Engine) -> None:
        """Check the weights that are read from memory after an update."""
        found = {name: tensor.clone() for name, tensor in mine.subscriber.weights()}
        if different := difference(found, mine.expected):
            raise Violation(f"{rank} reads other weights than version {mine.used}: {different}")

    def _check_group(self, rank: Rank, attempt: str) -> None:
        """Check that all ranks can use a version when the first rank begins to use it."""
        version = next(one for one in self.truth.published.values() if one.attempt == attempt)
        for other in self.ranks:
            theirs = other.engine
            if other is rank or not other.alive or other.host in self.world.befallen:
                continue
            if theirs is None or not _has(theirs, version):
                raise Violation(f"{rank} uses version {version.sequence}; {other} cannot do so")

    def _finally(self, rank: Rank, mine: Engine) -> None:
        """End at the newest version, in quiet conditions."""
        while not self.crew.quiet:
            blocking.sleep(1.0)
        for number in range(4):
            self._meet(self.plan.steps + number)
            self._update(rank, mine, 0.0)
        if mine.used != self.truth.newest:
            raise Violation(f"{rank} ends at {mine.used}, not at {self.truth.newest}")


def _attempt_of(prepared: Any) -> str:
    return str(prepared._version.manifest.attempt)


def _has(theirs: Engine, version: PublishedVersion) -> bool:
    """Return whether a rank uses a version, or has it ready."""
    if theirs.used >= version.sequence:
        return True
    if theirs.kind == "nothing":
        held = theirs.subscriber._mirror._held.values()
        there = sum(chunk.attempt == version.attempt for chunk in held)
        chunks = -(-version.manifest.images.hashed_nbytes // CHUNK_NBYTES)
        return there == int(chunks.sum())
    staged = theirs.subscriber._staging
    pairs = zip(staged._names, staged._pairs, strict=True)
    found = {name.rpartition(".")[2]: pair.staged for name, pair in pairs}
    wanted = version.push.values
    return set(found) == set(wanted) and not difference(found, wanted)


class ChannelCrew:
    """All jobs of a run."""

    def __init__(self, world: ChannelWorld, truth: Truth) -> None:
        self.world, self.truth = world, truth
        self.quiet = False
        self.publishers: set[str] = set()
        """Names of trainers that have begun to push."""
        self.problem: BaseException | None = None
        self.jobs: list[Job] = []
        schedule: Any = world.schedule
        for plan in schedule.actors:
            job = Job(self, plan)
            self.jobs.append(job)
            life = world.loop.create_task(job.life())
            life.add_done_callback(self._over)

    def process(self, name: str, host: str) -> Rank:
        """Return a new process."""
        return new_rank(self.world, self.truth, name, host)

    @property
    def running(self) -> int:
        """Return the number of jobs that have not ended."""
        return sum(not job.is_over for job in self.jobs)

    @property
    def publishing(self) -> int:
        """Return the number of trainers that have not ended."""
        return sum(not job.is_over for job in self.jobs if job.plan.kind == "publish")

    def _over(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and life.exception() is not None:
            self.problem = self.problem or life.exception()


def new_rank(world: World, truth: Truth, name: str, host: str) -> Rank:
    """Return a new process of ``world``."""
    rank = Rank(name, "host" if world.is_posix else host)
    rank.skew_s = world.below(3) * 20.0 if not world.is_posix else 0.0
    rank.world, rank.truth = world, truth  # type: ignore[assignment]
    world.processes.append(rank)
    return rank
