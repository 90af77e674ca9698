"""A job whose steps are kept in memory, on one host or on several. Each host has a keeper; the
keepers vote, guard each other and flush together. :mod:`.keeper_host` simulates one host,
:mod:`.keeper_peers` everything between hosts.

Trainers and seals are generators; the seed decides when each advances. Keepers run on a simulated
event loop; the seed decides when a message or a piece of memory that they wait for arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from random import Random

from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Rebuild
from holdfast.storage.keeper.decisions.choice import Choice, DamagedImage, Stock
from holdfast.storage.keeper.reading import Unheard
from holdfast.storage.training import keeper_inventory as memory_survey
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import GuardOption, InMemory

from .keeper_host import STATE_NBYTES, Host, HostKeeper, Job, Task, Trainer, step_of
from .keeper_peers import PIECES, KeeperProcess, State, installed
from .keeper_promises import Promise, Promises, Violation, flip, flip_all, flip_protected
from .loop import PROCESS, Deadlock, SimLoop

TURNS = 2500
CALM_TURNS = 20000
RESTS_AFTER = 200
"""Turns without storage before all trainers idle: at least this many, at most twice as many."""
NEVER = GenerationId(-1, -1)
LOOKED_AFTER = 10
"""Turns between two checks of :meth:`Hosts.is_well`."""
HOSTS_MAX = 5
RANKS_MAX = 3
"""Most ranks of a job on a single host."""
FAULTS = ["one", "all", "keeper", "lead", "host", "cut", "heal", "pause", "wake", "sleep"]
FAULTS += ["flip", "full"]
FAULTS_ALONE = ["one", "all", "all", "keeper", "pause", "pause", "wake", "flip"]


class Loads:
    """Results of the loads of one restart.

    ``found``: step and job of the load that succeeded
    ``failed``: steps of the loads that did not
    ``filled``: pieces of each rank's image that the state on each host holds
    ``behind``: images that hosts have yet to fill in the current load
    ``impeded``: whether an image could not be rebuilt now, but could have been at another time
    ``tried``: results of the loads from memory
    """

    def __init__(self, job: Job) -> None:
        self.found: tuple[int, int] | None = None
        self.failed: list[int] = []
        self.failed_choices: set[Choice] = set()
        self.damaged: set[DamagedImage] = set()
        self.tried = memory_survey.Tried(self.damaged, self.failed_choices)
        self.filled: dict[str, dict[int, list[State | None]]] = {h.name: {} for h in job.hosts}
        self.behind: list[tuple[str, int, list[State | None]]] = []
        self.impeded = False

    def follow(self, count: int) -> None:
        """Fill the first ``count`` of the images that hosts are behind with."""
        for name, rank, pieces in self.behind[:count]:
            self.filled[name][rank] = pieces[:]

    def keep(self, world: int) -> None:
        """Forget images of ranks beyond a complete load: its values have replaced theirs."""
        self.filled = {
            name: {rank: images[rank] for rank in range(world)}
            for name, images in self.filled.items()
        }

    def by_rank(self, job: Job) -> list[list[State | None]]:
        """List the pieces that the state of each rank holds."""
        on = [self.filled[job.host_of(rank).name].values() for rank in range(job.world)]
        return [list(itertools.chain(*images)) for images in on]


class Hosts(Promises):
    """The hosts, the consecutive jobs of a run, and storage."""

    def __init__(
        self, seed: int, log: Callable[[str], None] | None = None, *, alone: bool = False
    ) -> None:
        super().__init__(seed, log)
        draw = self.random
        self.alone = alone
        """True if there is only one host."""
        self.clients = itertools.count(1)
        self.jobs = itertools.count(1)
        self.numbers = itertools.count(1)
        self.loop = SimLoop()
        self.waiting: list[tuple[KeeperProcess, asyncio.Future[None]]] = []
        self.processes: list[KeeperProcess] = []
        self.failure: BaseException | None = None
        size = self.size = draw.randint(2, HOSTS_MAX)
        self.per_host = draw.randint(1, 2)
        self.mode = draw.choice(["auto", "auto", "auto", "pq" if size > 2 else "copy"])
        self.group = draw.choice([3, 4] if self.mode == "pq" else [2, 3, 4])
        self.budget_nbytes = draw.choice([3, 4, 6, 9]) * STATE_NBYTES // size
        self.flush_fails = draw.choice([0.0, 0.2])
        self.drops = draw.choice([0.0, 0.05])
        self.resizes = draw.choice([0.0, 0.0, 0.3])
        self.loses = draw.choice([0.0, 0.1])
        self.doubles = draw.choice([0.0, 0.1])
        self.slow_memory = 0.3 * (seed % 2 == 0)
        self.history = seed // 4 % 3 if seed % 4 == 3 else 0
        self.rests_at_end = seed % 3 == 0
        self.is_struck = seed % 4 == 1
        """True if bits of the protected step flip again and again."""
        self.lags = Random(str(seed))
        """Decides how far hosts have come when a load fails: a separate generator, so that it
        changes no other draw."""
        self.is_ruined = seed % 8 == 1
        """True if bits of all steps flip while no step reaches storage, until all is calm."""
        if self.is_ruined:
            self.flush_fails = 1.0
        self.fault_rate = draw.choice([0.002, 0.005, 0.01])
        self.seal_weight = draw.choice([1.0, 3.0])
        self.work_weight = draw.choice([1.0, 3.0])
        self.trainer_weight = 2.0
        if alone:
            self.draw_alone()
        self.full = False
        self.cuts: set[frozenset[str]] = set()
        self.impeded = False
        """True if memory was full, or hosts were cut off, at any time since a rebuild began."""
        self.deaths: list[Trainer] = []
        self.epochs = Epochs()
        self.job: Job | None = None
        self.restart: Task | None = None
        self.hosts: dict[str, Host] = {}
        self.placed: list[Host] = []
        """Hosts of the current or next job."""

    def draw_alone(self) -> None:
        """Draw the parameters of a single host: more faults in fewer turns, in less memory."""
        draw = self.random
        self.size = 1
        self.per_host = draw.randint(1, RANKS_MAX)
        self.budget_nbytes = draw.choice([2, 3, 3, 4]) * STATE_NBYTES
        self.flush_fails = draw.choice([0.0, 0.5])
        self.drops = draw.choice([0.0, 0.1])
        self.fault_rate = draw.choice([0.01, 0.03, 0.06])
        self.seal_weight = draw.choice([0.3, 1.0, 3.0])
        self.slow_memory = 0.0
        self.is_struck = self.is_ruined = False

    # Hosts.

    def add_host(self) -> Host:
        """Add an empty host with a name that was never used before."""
        host = Host(f"h{next(self.numbers)}")
        host.keeper = HostKeeper(self, host)
        self.hosts[host.name] = host
        return host

    def keeper_of(self, name: str) -> HostKeeper | None:
        """Return the keeper that is now reachable under that name."""
        host = self.hosts.get(name)
        return None if host is None else host.keeper

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether these hosts cannot reach each other."""
        return frozenset((one, other)) in self.cuts

    async def piece(self) -> None:
        """Suspend the current keeper until the seed lets it continue."""
        process = PROCESS.get()
        assert isinstance(process, KeeperProcess)
        future: asyncio.Future[None] = self.loop.create_future()
        self.waiting.append((process, future))
        await future

    # Jobs.

    def begin_job(self) -> None:
        """Begin a job, perhaps on other hosts; the previous one is over."""
        draw = self.random
        if self.job is not None and draw.random() < self.resizes:
            names = sorted(self.hosts)
            size = draw.randint(1, min(HOSTS_MAX, len(names)))
            self.placed = [self.hosts[name] for name in draw.sample(names, size)]
            if self.alone:
                self.per_host = draw.randint(1, RANKS_MAX)
        hosts = tuple(self.placed)
        self.job = Job(next(self.jobs), len(hosts) * self.per_host, hosts)
        self.restart = self.resume(self.job)

    def survey(
        self, job: Job
    ) -> Generator[None, None, tuple[list[Stock], list[Stock], list[Unheard], list[Promise]]]:
        """Ask all keepers; ask those of the job twice.

        Return the answers of both, the keepers that have not answered, and the promises after the
        first round. Until then, a keeper may drop a promised step because all have learned that a
        later one is protected.
        """
        statements = yield from self.look(job)
        for host in self.hosts.values():
            self.note_protected(host.keeper)
        promised = [one for one in (self.agreed, self.guarded) if one is not None]
        others, unheard = yield from self.asked(statements)
        statements = yield from self.look(job)
        unheard += memory_survey.silent_among(statements)
        return memory_survey.stocks_of(statements), others, unheard, promised

    def answers(
        self, job: Job
    ) -> Generator[None, None, tuple[list[Stock], list[Stock], list[Unheard]]]:
        """Ask all keepers once, those of the job first."""
        statements = yield from self.look(job)
        others, unheard = yield from self.asked(statements)
        unheard += memory_survey.silent_among(statements)
        return memory_survey.stocks_of(statements), others, unheard

    def look(self, job: Job) -> Generator[None, None, list[InMemory]]:
        """Ask the keepers of the job, which offer their images from now on. A paused keeper does
        not answer."""
        statements = {}
        for host in job.hosts:
            yield
            keeper = host.keeper
            if keeper.is_paused:
                self.count("does not answer")
                statements[host.name] = InMemory(silent=host.name)
            else:
                keeper.offer(job.readers[host.name])
                statements[host.name] = InMemory(keeper.inventory(), keeper.named)
        return [statements[job.host_of(rank).name] for rank in range(job.world)]

    def asked(
        self, statements: Sequence[InMemory]
    ) -> Generator[None, None, tuple[list[Stock], list[Unheard]]]:
        """Ask keepers of earlier jobs; return the answers, and the keepers that do not answer."""
        stocks = memory_survey.stocks_of(statements)
        named = memory_survey._named(stocks)
        others, unheard = list[Stock](), list[Unheard]()
        known = {stock.host.name for stock in stocks} | {one.silent for one in statements}
        for name in sorted(named.keys() - known):
            yield
            keeper = self.keeper_of(name)
            if keeper is not None and keeper.is_paused:
                unheard.append(Unheard(named[name], True))
            elif keeper is not None:
                others.append(Stock(keeper.named, keeper.inventory()))
        return others, unheard

    def choices(
        self,
        job: Job,
        loads: Loads,
        stocks: Sequence[Stock],
        others: Sequence[Stock],
        unheard: Sequence[Unheard],
        newest: int,
    ) -> list[Choice] | None:
        """Return the generations to load from memory, or None to wait for keepers."""
        kept, _ = memory_survey.kept_in_memory(
            stocks, others, job.world, newest, self.epochs, loads.tried
        )
        if kept:
            newest = kept[0].generation.step
        found = [*stocks, *others]
        in_memory = bool(kept)
        waits = memory_survey.awaited(
            *(found, unheard, newest, self.epochs),
            in_memory=in_memory,
            tried=loads.tried,
        )
        return None if waits else kept

    def resume(self, job: Job) -> Task:
        """Choose the step to resume from, load it, and begin the next epoch."""
        yield
        job.readers = {host.name: next(self.clients) for host in job.hosts}
        loads = Loads(job)
        while True:
            newest = self.newest_stored()
            stocks, others, unheard, promised = yield from self.survey(job)
            kept = self.choices(job, loads, stocks, others, unheard, newest)
            if kept is not None:
                break
            yield
        reached = {stock.host.name for stock in (*stocks, *others)}
        reached |= {one.host.name for one in unheard}
        promised = [one for one in promised if self.holds(one, reached)]
        job.epoch = memory_survey.next_epoch([*stocks, *others], self.epochs)
        option = GuardOption(self.mode, self.group)
        if len(job.hosts) < (3 if self.mode == "pq" else 2):
            option = GuardOption("auto", self.group)
        # In a real job, a keeper that does not answer joins later.
        ranks = [KeeperHost(*[job.host_of(rank).name] * 3) for rank in range(job.world)]
        met = memory_survey.stocks_of([InMemory(host=host) for host in ranks])
        job.meeting = memory_survey.meeting(met, job.world, option)
        taken = yield from self.load_kept(job, loads, kept, stocks, others, newest)
        if job.has_failed:
            self.restart = None
            return
        if loads.impeded:
            promised = []
        if loads.found is None and newest:
            loads.found, loads.filled = (newest, self.storage[newest]), Loads(job).filled
        promised = [one for one in promised if self.holds(one, reached) and self.is_bound(one, job)]
        if self.all_raise(loads.found, loads.failed, loads.by_rank(job)):
            self.start_anew(promised)
            return
        for images in loads.filled.values():
            self.check_filled(loads.found, images)
        self.take_up(job, taken, loads.found, promised)
        job.trainers = [Trainer(self, job, rank) for rank in range(job.world)]
        self.trainers += job.trainers
        self.restart = None

    def is_bound(self, promise: Promise, job: Job) -> bool:
        """Return whether a promise made before a restart has to hold after it. A keeper outside
        the job offers nothing, so it may drop a protected step for a later one."""
        if promise in (self.agreed, self.guarded):
            return True
        members = [keeper for _, each in promise.groups for keeper in each if keeper is not None]
        return all(keeper.host in job.hosts for keeper in members)

    def load_kept(
        self,
        job: Job,
        loads: Loads,
        kept: list[Choice],
        stocks: Sequence[Stock],
        others: Sequence[Stock],
        newest: int,
    ) -> Generator[None, None, Choice | None]:
        """Load the best intact generation from memory. Return it, or None if there is none."""
        while True:
            for one in kept:
                self.check_choice(one.generation)
            if not kept:
                return None
            choice = kept[0]
            loads.failed_choices.add(choice)
            hosts = [stock.host for stock in (*stocks, *others)]
            self.impeded = bool(self.full or self.cuts)
            problem = yield from self.rebuild(job, choice, hosts)
            if not problem:
                states = yield from self.read(job, choice, loads)
                if states is not None:
                    loads.found = self.whole(choice, states)
                    return choice
                loads.failed.append(choice.generation.step)
            elif self.impeded or problem == "no-memory":
                self.count("what can be made again cannot be now")
                loads.impeded = True
            while True:
                stocks, others, unheard = yield from self.answers(job)
                found = self.choices(job, loads, stocks, others, unheard, newest)
                if found is not None:
                    kept = found
                    break
                yield

    def rebuild(
        self, job: Job, choice: Choice, hosts: Sequence[KeeperHost]
    ) -> Generator[None, None, str]:
        """Rebuild the lost images of a choice. Return the reason if one cannot be rebuilt."""
        for lost in choice.rebuilt:
            keeper = self.hosts[lost.at].keeper
            asks = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, tuple(hosts))
            work = keeper.rebuild(job.readers[lost.at], asks)
            task = self.loop.spawn(keeper.process, work)
            while not task.done():
                yield
            if task.result():
                self.count("not rebuilt", task.result())
                return task.result()
        return ""

    def start_anew(self, promised: Sequence[Promise]) -> None:
        """End the keepers, as an operator does once all ranks have refused to resume. Raises
        Violation if a promised step is lost by that."""
        for one in promised:
            raise Violation(f"{one.id} was promised, and a restart refuses to go on")
        self.count("refused to go on")
        self.agreed = self.guarded = None
        for host in self.hosts.values():
            host.keeper.die()
            host.keeper = HostKeeper(self, host)
        self.begin_job()

    def read(
        self, job: Job, choice: Choice, loads: Loads
    ) -> Generator[None, None, list[list[State | None]] | None]:
        """Read all images into the state of each host. Return their pieces, or None if an image is
        damaged. If several hosts read an image from the same keeper, one reads it and the others
        follow: the seed decides how far they have come when a load fails."""
        loads.behind.clear()
        states = yield from self.read_ahead(job, choice, loads)
        if states is None:
            loads.follow(self.lags.randint(0, len(loads.behind)))
        else:
            loads.follow(len(loads.behind))
            loads.keep(choice.world)
        return states

    def read_ahead(
        self, job: Job, choice: Choice, loads: Loads
    ) -> Generator[None, None, list[list[State | None]] | None]:
        """Read each image once from each of its sources; note the hosts that follow."""
        id = choice.generation
        states: list[list[State | None]] = []
        for rank, names in enumerate(choice.holders):
            readers: dict[str, list[str]] = {}
            for host in job.hosts:
                source = host.name if host.name in names else names[0]
                readers.setdefault(source, []).append(host.name)
            for name, (reader, *others) in readers.items():
                yield
                keeper = self.keeper_of(name)
                if self.is_cut(name, reader) or keeper is None:
                    job.has_failed = True
                    return None
                own, pieces = name == reader, loads.filled[reader].setdefault(rank, [])
                if not (yield from self.read_image(job, keeper, id, rank, own, pieces)):
                    if not self.has_flipped(id) and self.was_pinned(keeper, id, job):
                        raise Violation(f"{id} was offered, and {keeper} has no rank {rank}")
                    loads.damaged.add(DamagedImage(id, rank, name))
                    return None
                loads.behind += [(other, rank, pieces) for other in others]
            states.append(pieces)
        return states

    def was_pinned(self, keeper: HostKeeper, id: GenerationId, job: Job) -> bool:
        """Return whether a keeper of the job knew, when asked, that the generation is agreed."""
        return keeper.host in job.hosts and keeper.generations.is_agreed(id)

    def read_image(
        self,
        job: Job,
        keeper: HostKeeper,
        id: GenerationId,
        rank: int,
        own: bool,
        pieces: list[State | None],
    ) -> Generator[None, None, bool]:
        """Read an image over ``pieces`` of a state; return whether it is intact."""
        if own:
            slot = keeper.open(job.readers[keeper.host.name], id, rank)
        else:
            slot = next((one for one in keeper.images(id) if one.label.rank == rank), None)
        if slot is None:
            return False
        pinned = own or self.was_pinned(keeper, id, job)
        slot.memory.users["restart"] += pinned
        try:
            for piece in range(PIECES):
                yield
                pieces[piece : piece + 1] = [slot.memory.pieces[piece]]
            return self.intact(slot, pieces)
        finally:
            slot.memory.users["restart"] -= pinned

    def take_up(
        self,
        job: Job,
        choice: Choice | None,
        found: tuple[int, int] | None,
        promised: Sequence[Promise],
    ) -> None:
        """Resume training from ``found``. Raises Violation if a promised step is lost."""
        step, number = found or (0, 0)
        if step and self.lineage.get(step) != number:
            raise Violation(f"step {step} of job {number} was dropped, and is gone on from")
        if choice is not None and (number, step) in self.diverged:
            raise Violation(f"{choice.generation} is gone on from, and replicas have diverged")
        for one in promised:
            if step < one.step:
                raise Violation(f"{one.id} was promised, and step {step} is gone on from")
        self.running = job
        job.chosen = step or None
        self.epochs = self.epochs.with_next(job.epoch, job.chosen)
        self.epoch_jobs[job.epoch] = job
        self.lineage = {s: j for s, j in self.lineage.items() if s <= step}
        self.agreed = None
        if choice is not None:
            holders = {
                rank: [keeper for name in names if (keeper := self.keeper_of(name)) is not None]
                for rank, names in enumerate(choice.holders)
            }
            self.agreed = Promise(choice.generation, step, holders)
        if self.guarded is not None and (self.guarded.step > step or not job.meeting.groups):
            self.guarded = None
        where = "storage" if choice is None else "memory"
        names = " ".join(host.name for host in job.hosts)
        self.count(
            "resumed", f"job {job.number} on {names} in epoch {job.epoch} from {step} in {where}"
        )

    # Faults.

    def kill(self, trainer: Trainer) -> None:
        """Kill a trainer. Its keeper notices later."""
        self.count("killed", str(trainer))
        trainer.alive = False
        self.deaths.append(trainer)

    def kill_all(self) -> None:
        """Kill all processes of the running job, but no keeper; begin the next job."""
        for trainer in self.trainers:
            if trainer.alive and not trainer.paused:
                self.kill(trainer)
        if self.restart is not None:
            self.restart.close()  # type: ignore[attr-defined]
        for name, reader in self.job.readers.items() if self.job is not None else ():
            keeper = self.keeper_of(name)
            if keeper is not None:
                keeper.reader_gone(reader)
        old = self.running.trainers if self.running is not None else []
        if old and all(trainer.alive for trainer in old):
            self.kill(self.random.choice(old))  # no complete job runs while the next one does
        self.begin_job()

    def kill_keeper(self, host: Host) -> None:
        """Replace a host's keeper. The new one starts empty, or with the memory that a service
        keeps."""
        self.count("keeper killed", str(host.keeper))
        before = host.keeper
        self.lost(before)
        before.die()
        host.keeper = HostKeeper(self, host)
        if self.is_service:
            host.keeper.recall_kept(before)
        if self.is_service and self.alone and self.agreed is not None:
            self.agreed.holders = {rank: [host.keeper] for rank in self.agreed.holders}
        if self.restart is not None:
            self.kill_all()

    def lose(self, host: Host) -> None:
        """Lose a host with everything on it. A new host may take its place."""
        self.count("host lost", host.name)
        self.lost(host.keeper)
        host.keeper.die()
        for trainer in [one for one in self.trainers if one.host is host]:
            trainer.alive = False
            self.trainers.remove(trainer)
        self.deaths = [one for one in self.deaths if one.host is not host]
        del self.hosts[host.name]
        place = self.placed.index(host)
        self.placed.remove(host)
        if not self.placed or self.random.random() < 0.7:
            self.placed.insert(place, self.add_host())
        self.kill_all()

    def fault(self) -> None:
        """Cause one random fault."""
        draw = self.random
        kinds = FAULTS_ALONE if self.alone else FAULTS
        kind = draw.choice(
            kinds + ["strike", "strike"] * self.is_struck + ["ruin"] * 4 * self.is_ruined
        )
        self.count(f"fault: {kind}")
        living = [trainer for trainer in self.trainers if trainer.alive and not trainer.paused]
        host = draw.choice(self.placed)
        if kind == "one" and living:
            self.kill(draw.choice(living))
        elif kind == "all":
            self.kill_all()
        elif kind in ("keeper", "lead"):
            self.kill_keeper(host if kind == "keeper" else self.placed[0])
        elif kind == "host":
            self.lose(host)
        elif kind == "cut":
            self.cuts.add(frozenset((host.name, draw.choice(self.placed).name)))
            self.impeded = True
        elif kind == "heal":
            self.cuts.clear()
            self.full = False
        elif kind == "pause" and living:
            draw.choice(living).paused = True
        elif kind == "wake":
            self.wake()
        elif kind == "sleep":
            host.keeper.process.paused_until_s = self.loop.now_s + draw.choice([1.0, 10.0, 90.0])
        elif kind == "flip":
            flip(self, draw.choice(self.placed).keeper)
        elif (kind == "strike" and flip_protected(self)) or (kind == "ruin" and flip_all(self)):
            self.kill_all()
        elif kind == "full":
            self.full = self.impeded = True

    def wake(self) -> None:
        """Wake all paused trainers."""
        for trainer in self.trainers:
            trainer.paused = False

    # Time.

    def run(self) -> None:
        """Run everything: faults, calm, and rest."""
        with installed(), self.loop.entered():
            try:
                self.placed = [self.add_host() for _ in range(self.size)]
                self.begin_job()
                for _ in range(TURNS // 3 if self.alone else TURNS):
                    if self.random.random() < self.fault_rate:
                        self.fault()
                    else:
                        self.turn()
                self.calm()
                if self.rests_at_end:
                    self.rest()
            finally:
                self.end()

    def turn(self) -> None:
        """Run one piece of somebody's work."""
        trainers = [
            one
            for one in self.trainers
            if one.alive and not one.paused and not one.host.keeper.is_paused
        ]
        sealing = [host.keeper for host in self.hosts.values() if host.keeper.tasks]
        draw = self.random
        choices = [(self.trainer_weight, "trainer")] * bool(trainers) + [
            (self.seal_weight, "seal")
        ] * bool(sealing)
        choices += [(self.work_weight, "work")] * bool(self.waiting)
        choices += [(1.0, "restart")] * (self.restart is not None)
        choices += [(0.3, "death")] * bool(self.deaths) + [(0.01, "launcher"), (0.05, "time")]
        kind = draw.choices([name for _, name in choices], [weight for weight, _ in choices])[0]
        if kind == "trainer":
            next(draw.choice(trainers).task)
        elif kind == "seal":
            keeper = draw.choice(sealing)
            task = draw.choice(keeper.tasks)
            if next(task, keeper) is keeper:
                keeper.tasks.remove(task)
        elif kind == "work":
            process, future = self.waiting.pop(draw.randrange(len(self.waiting)))
            if process.alive and not future.done():
                future.set_result(None)
        elif kind == "restart" and self.restart is not None:
            next(self.restart, None)
        elif kind == "death":
            self.notice(self.deaths.pop(draw.randrange(len(self.deaths))))
        elif kind == "time":
            with contextlib.suppress(Deadlock):  # no timer is set
                self.loop.pass_time()
        elif kind == "launcher":
            self.launch()
        self.loop.settle()
        if self.failure is not None:
            raise self.failure

    def launch(self) -> None:
        """Restart the job if it has failed or a trainer has died."""
        job = self.job
        if job is not None and (job.has_failed or not all(t.alive for t in job.trainers)):
            self.kill_all()

    def notice(self, trainer: Trainer) -> None:
        """Tell the keeper that a trainer process has ended."""
        keeper = trainer.host.keeper
        keeper.generations.client_gone(trainer.client)
        if trainer.job.epoch == keeper.generations.epoch:
            keeper.do(keeper.agreement.rank_lost, trainer.rank)
        trainer.mapped.clear()
        if trainer in self.trainers:
            self.trainers.remove(trainer)

    def calm(self) -> None:
        """End all faults. Raises Violation unless all hosts soon learn of agreed, guarded and
        durable steps, if memory suffices."""
        self.flush_fails = self.drops = self.loses = self.doubles = self.resizes = 0.0
        self.seal_weight, self.work_weight = 3.0, 4.0
        self.trainer_weight = 0.5  # a step takes longer than what keepers say about it
        self.full = False
        self.cuts.clear()
        self.wake()
        self.count("calm")
        for host in self.hosts.values():
            host.keeper.process.paused_until_s = 0.0
        for trainer in self.trainers:
            if trainer.alive and trainer.job is not self.job:
                self.kill(trainer)
        if self.random.random() < 0.5:
            self.kill_all()
        self.told.clear()
        for turn in range(CALM_TURNS):
            self.turn()
            if turn % LOOKED_AFTER == 0 and self.is_well():
                return
        raise Violation(f"nothing comes of it in {CALM_TURNS} turns: {self.told}")

    def rest(self) -> None:
        """Check that a step reaches storage although training has stopped.

        Storage is away until an agreed step waits for it. Then storage returns, all trainers idle,
        and a keeper dies, before or after the step is stored. The step must become durable anyway,
        and no trainer may wait for a step that does not.
        """
        self.flush_fails = 1.0
        for _ in range(self.random.randint(RESTS_AFTER, 2 * RESTS_AFTER)):
            self.turn()
        for turn in range(TURNS):
            id = self.on_its_way() if turn % LOOKED_AFTER == 0 else None
            if id is not None:
                break
            self.turn()
        else:
            return  # memory does not suffice for so many steps
        self.flush_fails = 0.0
        self.rests = True
        self.count("rests", str(id))
        job = self.running
        assert job is not None
        for _ in range(self.random.choice([0, self.random.randint(1, RESTS_AFTER)])):
            self.turn()
        self.kill_keeper(self.random.choice(job.hosts[:1] + job.hosts))
        for turn in range(CALM_TURNS):
            self.turn()
            durable = self.told.get("durable", {})
            is_there = all(durable.get(host.name, NEVER) >= id for host in job.hosts)
            if turn % LOOKED_AFTER == 0 and is_there and not self.waits_for_storage():
                return
        waiting = {str(trainer): trainer.wanted for trainer in self.trainers}
        raise Violation(f"{id} does not come to storage, or is waited for: {durable}, {waiting}")

    def on_its_way(self) -> GenerationId | None:
        """Return the newest agreed step that trainers wait for to become durable."""
        job = self.running
        trainers = [trainer for trainer in self.trainers if trainer.job is job and trainer.alive]
        if job is None or job is not self.job or len(trainers) < job.world:
            return None
        id = max(trainers[0].wanted, default=None)
        if id is None:
            return None
        for trainer in trainers:
            is_here = id in map(step_of, trainer.sealed.items())
            if not is_here or not trainer.host.keeper.generations.is_agreed(id):
                return None
            if trainer.wishes and id not in trainer.wanted:
                return None
        return id

    def waits_for_storage(self) -> bool:
        """Return whether any trainer waits for an agreed step."""
        job = self.running
        assert job is not None
        return any(
            host.keeper.generations.is_agreed(id)
            for trainer in self.trainers
            for id in trainer.wanted
            for host in job.hosts
        )

    def has_room(self, host: Host) -> bool:
        """Return whether a host has memory for three steps of the running job. Images of the
        previous job with other ranks or sizes still take space: this job may have resumed from
        them."""
        job = self.running
        assert job is not None
        ranks = {rank for rank in range(job.world) if job.host_of(rank) is host}
        image_nbytes = STATE_NBYTES // job.world
        others_nbytes = sum(
            slot.nbytes
            for slot in host.keeper.generations._slots.values()
            if slot.generation is not None
            and (slot.rank not in ranks or slot.nbytes != image_nbytes)
        )
        return self.budget_nbytes >= 3 * len(ranks) * image_nbytes + others_nbytes

    def is_well(self) -> bool:
        """Return whether all hosts have learned of all that they must."""
        job = self.running
        if job is None or job is not self.job or not job.trainers:
            return False
        if not all(self.has_room(host) for host in job.hosts):
            return True
        for keeper, id in self.awaited:
            newest = self.told.get("agreed", {}).get(keeper.host.name)
            is_of_job = keeper.alive and keeper.host in job.hosts and id.epoch == job.epoch
            if is_of_job and newest is not None and id < newest:
                return False  # its trainer would wait forever
        for trainer in self.trainers:
            durable = self.told.get("durable", {}).get(trainer.host.name)
            if trainer.alive and durable is not None and any(id < durable for id in trainer.wanted):
                return False  # so would it
        kinds = ["agreed", "durable"] + ["guarded"] * bool(job.meeting.groups)
        names = {host.name for host in job.hosts}
        return all(
            {name for name, id in self.told.get(kind, {}).items() if id.epoch == job.epoch} >= names
            for kind in kinds
        )

    def end(self) -> None:
        """Cancel all pending tasks, so that asyncio does not report them as never finished."""
        for process in self.processes:
            process.alive = True
            process.paused_until_s = 0.0
        self.loop.raise_the_dead()
        while pending := self.loop.pending:
            for task in pending:
                task.cancel()
            self.loop.settle()
            with contextlib.suppress(Deadlock):  # let timers of paused processes run
                self.loop.pass_time()


def run_seed(
    seed: int, log: Callable[[str], None] | None = None, *, alone: bool = False
) -> Counter[str]:
    """Run the schedule of a seed, on several hosts or a single one, and count its events. Raises
    Violation."""
    world = Hosts(seed, log, alone=alone)
    world.run()
    return world.counts


run_alone = partial(run_seed, alone=True)
