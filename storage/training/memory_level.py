"""The keeper memory of a run, seen from one rank: which steps to keep there, and loading them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ...core.units import parse_duration
from ...errors import DamagedError, HoldfastError, SaveError, StorageError
from ...planner.periods import Steps
from ..arenas.arena import Arena
from ..arenas.folder import KeeperFolder
from ..arenas.hosts import KeeperHost
from ..arenas.messages import VERSION, Enter, Hello, Rebuild
from ..arenas.numa import own_node
from ..keeper.decisions.choice import Choice, DamagedImage
from ..keeper.reading import Peers
from ..keeper.tiers import LocalImage, PeerImage, TiersDriver, manifest_of
from ..operations.loading.start_load import load_state
from ..operations.options import LoadOptions
from ..operations.saving.keeper_request import ByKeeper, Storage
from ..ranks.process_group import current_rank, current_world
from ..runtime.engine import offload, run
from ..state.capture.switch_interval import short_switch_interval
from ..state.pinned import pin
from .keeper_inventory import GuardOption, InMemory, Meeting
from .keeper_option import Keeper, start_keeper
from .run_lineage import checkpoint_name

MEET_PAUSE_MAX = 64
DOUBTS_AFTER = 8
_PAUSE_S = 1.0
"""Pause before keepers are asked again."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """Bytes loaded from the own host's memory and from others, and the images rebuilt."""

    own: int = 0
    peer: int = 0
    parity: int = 0


class MemoryLevel:
    """One rank's view of the memory of its host's keeper."""

    def __init__(self, option: Keeper, printed: str) -> None:
        """Create a level, not joined yet, for the run at the URI ``printed``, which ends in "/"."""
        self._option = option
        self._printed = printed
        self._arena: Arena | None = None
        self._run = ""
        self._steps = Steps(option.every)
        self._damaged: list[DamagedImage] = []
        self._rebuilt_nbytes = 0
        self.loaded = LoadedBytes()
        self._meet_pause = 1
        """Steps in memory between attempts to agree on a plan for a new layout."""
        self._flushes = True
        """True if this rank tells its keeper what to flush to storage."""
        self._protects = False
        """True if hosts protect each other's images."""
        self.rank_lost: Callable[[int], None] = lambda rank: None
        """Called, on the engine's loop, once another rank has died."""
        self.problem = ""
        """The reason why no step is kept in memory; empty if steps are kept."""
        self.may_join_later = False
        """True if the problem is that keepers have not answered, but may do so later."""
        self.since: int | None = None
        """The step that the epoch began at."""

    @property
    def joined(self) -> bool:
        """Return whether this rank has looked for its keeper."""
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        """The connection to the keeper. Only valid after joining."""
        assert self._arena is not None
        return self._arena

    @property
    def guards(self) -> GuardOption:
        """The user's choice of protection between hosts."""
        return GuardOption(self._option.protect, self._option.group, self._option.certificate)

    @property
    def gives_up_after_s(self) -> float:
        """Longest time that a resume waits for keepers that may hold a newer step."""
        return parse_duration(self._option.gives_up_after)

    @property
    def goes_back_after(self) -> int | None:
        """Resumes without a newer step, after which one goes further back."""
        return self._option.goes_back_after

    async def join(self, run_id: str, moved: Callable[[], None]) -> InMemory:
        """Find or start the keeper of the run; return its inventory. Calls ``moved()``."""
        self._run = run_id
        if self._arena is not None:
            await self._arena.close()
        folder = KeeperFolder.of(self._run)
        option = self._option
        wanted = json.dumps(asdict(option.of_process(run_id))) if option.starts else ""
        of_rank = current_rank(), current_world(), option.host
        hello = Hello(VERSION, run_id, *of_rank, wanted, own_node())

        async def start(takes_over: bool) -> None:
            await start_keeper(option, folder, run_id, takes_over=takes_over)

        starts = start if option.starts else None
        arena = Arena(folder, hello, option.deadline_s, starts, pin, self._rank_lost)
        self._arena = arena
        if not await _reporting(arena.open(moved), moved):
            _log.warning("rank %d has no keeper: %s", hello.rank, arena.problem)
        if arena.fixed:
            _log.warning(
                "the running keeper does not apply other values of %s: stop it with `holdfast "
                "keeper stop`, so that a new one is started",
                ", ".join(arena.fixed),
            )
        return await self._look()

    def look(self) -> InMemory:
        """Return the keeper's current inventory, with the images found damaged so far."""
        return run(self._look())

    async def look_later(self, moved: Callable[[], None]) -> InMemory:
        """Return the keeper's inventory after a pause; look for the keeper if it has not answered.
        Calls ``moved()``."""
        await asyncio.sleep(_PAUSE_S)
        if self.arena.is_open:
            return await self._look()
        return await self.join(self._run, moved)

    async def _look(self) -> InMemory:
        arena = self.arena
        inventory = await arena.look_up() if arena.is_open else None
        if inventory is None or arena.host is None:
            silent = ""
            if arena.is_silent:
                name, _ = KeeperFolder.of(self._run).read_identity()
                silent = name or f"the keeper of rank {current_rank()}"
            return InMemory(damaged=tuple(self._damaged), silent=silent)
        return InMemory(inventory, arena.host, tuple(self._damaged))

    def begin_at(self, step: int | None) -> None:
        """Set the step that training continues from; None: the start of training."""
        self._steps.begin_at(step)

    def begin_epoch(self, epoch: int, step: int | None, meeting: Meeting) -> None:
        """Begin an epoch at ``step`` (None: the start of training), and discard later steps. If
        this rank has no keeper, look for one in the background."""
        self.since = step
        self._damaged = []
        self._rebuilt_nbytes = 0
        self.problem = meeting.problem
        self.may_join_later = meeting.temporary
        self._protects = bool(meeting.groups)
        if meeting.problem and current_rank() == 0:
            _log.warning("steps are not kept in memory: %s", meeting.problem)
        own = [host for host in meeting.hosts if current_rank() in host.ranks]
        self._flushes = not own or current_rank() == own[0].ranks[0]
        enters = Enter(epoch, step, meeting.hosts, meeting.groups, meeting.problem)
        run(self._begin_epoch(enters))

    async def _begin_epoch(self, enters: Enter) -> None:
        await self.arena.enter(enters)
        await self.arena.release()  # not earlier: a trainer of the last epoch might overwrite it
        self.arena.look_on()

    def release(self) -> None:
        """Let the keeper overwrite the images that it has offered by its inventory."""
        run(self.arena.release())

    async def rebuild(
        self, choice: Choice, hosts: Sequence[KeeperHost], moved: Callable[[], None]
    ) -> None:
        """Have this rank's keeper rebuild the lost images assigned to it. Calls ``moved()`` on
        progress. Runs on the engine's loop. Raises DamagedError if an image cannot be rebuilt."""
        own = self.arena.host
        if own is None or not any(
            host.name == own.name and host.ranks[:1] == (current_rank(),) for host in hosts
        ):
            return
        for lost in choice.rebuilt:
            if lost.at != own.name:
                continue
            asks = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, tuple(hosts))
            if not await self.arena.rebuild(asks, moved):
                raise DamagedError(f"step {choice.generation.step} in memory: {self.arena.problem}")
            label, memory = await self.arena.image(choice.generation, lost.rank)
            memory.close()
            self._rebuilt_nbytes += label.nbytes

    def load(
        self,
        choice: Choice,
        hosts: Sequence[KeeperHost],
        state: object,
        options: LoadOptions,
        touched: set[str],
    ) -> None:
        """Load a generation into ``state`` and set :attr:`loaded`. Every rank calls this.
        ``hosts``: the hosts to read remote images from. Raises DamagedError if the images in memory
        are damaged or unreachable, and all errors of a load."""
        name = f"{self._printed}{checkpoint_name(choice.generation.step)}"
        peers = Peers(choice.generation, hosts, self._option.certificate)
        images: list[LocalImage | PeerImage] = []
        try:
            images = run(self._images(choice, peers))
            driver = TiersDriver(name, run(_manifest(images)), images)
            # Each rank reads for itself: memory is equally close to all of them.
            options = replace(options, exchange=False)
            try:
                # This only waits for threads that copy, and that hold the GIL while they hash.
                with short_switch_interval():
                    load_state(name, state, options, touched, driver)
            except HoldfastError as error:
                self._strike(choice, images, error)
                raise
            self.loaded = LoadedBytes(driver.own_nbytes, driver.peer_nbytes, self._rebuilt_nbytes)
        except StorageError as error:
            # A lost host counts as damaged memory: another copy may exist.
            step = choice.generation.step
            raise DamagedError(f"step {step} in memory cannot be read: {error}") from error
        finally:
            run(peers.close())
            images.clear()  # not later: the keeper reuses no memory that a trainer has mapped

    def _strike(
        self, choice: Choice, images: Sequence[LocalImage | PeerImage], error: HoldfastError
    ) -> None:
        """Record the damaged image, so that the next attempt uses another copy or parity."""
        for image, names in zip(images, choice.holders, strict=True):
            if error.key == image.label.key:
                rank = image.label.rank
                self._damaged.append(DamagedImage(choice.generation, rank, self._source(names)))

    def _source(self, names: Sequence[str]) -> str:
        """Return the keeper to read an image from, given its holders; prefer this host's own."""
        own = self.arena.host
        return own.name if own is not None and own.name in names else names[0]

    async def _images(self, choice: Choice, peers: Peers) -> list[LocalImage | PeerImage]:
        """Open all ranks' images, in order; strike all bad ones before the first is raised."""
        sources = [self._source(names) for names in choice.holders]
        opened = (self._image(choice, rank, name, peers) for rank, name in enumerate(sources))
        images: list[LocalImage | PeerImage] = []
        problems: list[HoldfastError] = []
        for rank, one in enumerate(await asyncio.gather(*opened)):
            if isinstance(one, HoldfastError):
                self._damaged.append(DamagedImage(choice.generation, rank, sources[rank]))
                problems.append(one)
            else:
                images.append(one)
        if problems:
            raise problems[0]
        return images

    async def _image(
        self, choice: Choice, rank: int, name: str, peers: Peers
    ) -> LocalImage | PeerImage | DamagedError | StorageError:
        """Open a rank's image on the keeper ``name``; return the error instead of raising it."""
        own = self.arena.host
        try:
            if own is not None and own.name == name:
                return LocalImage(*await self.arena.image(choice.generation, rank))
            return PeerImage(await peers.label(name, rank, self._run), peers.driver(name), name)
        except (DamagedError, StorageError) as error:
            return error

    def due(self, step: int) -> bool:
        """Return whether ``step`` is due in memory. Call once per step, in ascending order."""
        return self._steps.due(step)

    def meets(self, step: int, not_kept: int) -> Literal["never", "new", "always"]:
        """Return when to meet the other ranks at ``step``: if its layout is new here, or, after
        :data:`DOUBTS_AFTER` steps in a row were ``not_kept``, always, since it may be new on
        others. Pauses double, and end at steps that all ranks have in common, however often each of
        them has tried."""
        if step // self._option.every % self._meet_pause:
            return "never"
        return "new" if not_kept < DOUBTS_AFTER else "always"

    def note_layout(self, step: int, *, is_new: bool) -> None:
        """Record whether ``step`` had a new layout, and so was an attempt to meet the others."""
        if not is_new:
            self._meet_pause = 1
        elif self.meets(step, 0) != "never":
            self._meet_pause = min(2 * self._meet_pause, MEET_PAUSE_MAX)

    def by(self, storage: Storage | None = None) -> ByKeeper | None:
        """Return a save's route through the keeper, to ``storage`` if given; None without one."""
        if self.problem:
            return None
        local = self._option.local is not None
        return ByKeeper(self.arena, storage, self._flushes, self._protects, local)

    def _rank_lost(self, rank: int) -> None:
        _log.info("rank %d has died", rank)
        self.rank_lost(rank)

    def leave(self, *, finished: bool) -> None:
        """Announce that this rank ends on purpose. ``finished``: nobody will resume from memory, so
        the keeper may end."""
        if self._arena is not None:
            run(self._arena.leave(finished=finished))

    def close(self) -> None:
        """Disconnect from the keeper, which keeps running."""
        if self._arena is not None:
            run(self._arena.close())
            self._arena = None


async def _reporting(work: Awaitable[bool], moved: Callable[[], None]) -> bool:
    """Wait for ``work``, which has a deadline; call ``moved()`` regularly, so that other ranks
    wait, too."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_PAUSE_S)
            moved()
    finally:
        task.cancel()
    return task.result()


async def _manifest(images: Sequence[LocalImage | PeerImage]) -> bytes:
    try:
        return await offload(manifest_of, [image.label for image in images])
    except SaveError as error:
        raise DamagedError(f"the labels in memory do not form a checkpoint: {error}") from error
