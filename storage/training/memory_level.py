"""The memory of keepers as a level of a run: which steps are kept there, and what of it there is to
go on from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import DamagedError, SaveError
from ..arenas.arena import Arena
from ..arenas.folder import KeeperFolder
from ..arenas.label import GenerationId
from ..arenas.messages import VERSION, HeldGeneration, Hello
from ..keeper.tiers import HeldImage, TiersDriver, manifest_of
from ..operations.keeping import ByKeeper, Storage
from ..operations.options import LoadOptions
from ..operations.start_load import load_state
from ..ranks.process_group import current_rank, current_world
from ..runtime.engine import offload, run
from .epochs import Epochs
from .keeper_option import Keeper, KeeperOption, checked_keeper, start_keeper
from .naming import checkpoint_name

__all__ = ["InMemory", "MemoryLevel", "kept_everywhere", "memory_level_of", "next_epoch"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InMemory:
    """What the keeper of a rank's host holds. ``epoch``: -1 where there is no keeper, or none
    answers."""

    epoch: int = -1
    generations: tuple[HeldGeneration, ...] = ()


def next_epoch(statements: Sequence[InMemory], epochs: Epochs) -> int:
    """The epoch that begins, after all that are recorded, or that any keeper knows of."""
    return max(epochs.newest, *(statement.epoch for statement in statements)) + 1


def kept_everywhere(
    statements: Sequence[InMemory], newer_than: int, epochs: Epochs
) -> list[HeldGeneration]:
    """The generations to go on from, the best first: those that are agreed on, newer than that
    step, not left by a later epoch, and of which every rank's keeper holds all images."""
    found: dict[GenerationId, HeldGeneration] = {}
    for held in (held for statement in statements for held in statement.generations):
        is_left = epochs.has_left(held.generation)
        if held.agreed and held.generation.step > newer_than and not is_left:
            found[held.generation] = held
    whole = [
        held
        for held in found.values()
        if all(_holds_all(statement, held) for statement in statements)
    ]
    return sorted(whole, key=lambda held: (held.generation.step, held.generation.epoch))[::-1]


def _holds_all(statement: InMemory, held: HeldGeneration) -> bool:
    return any(
        other.generation == held.generation and len(other.ranks) == held.world
        for other in statement.generations
    )


def memory_level_of(option: KeeperOption, printed: str) -> MemoryLevel | None:
    """The memory level that a user has asked for; see :class:`MemoryLevel`. Raises UsageError."""
    keeper = checked_keeper(option)
    if keeper is None:
        return None
    return MemoryLevel(keeper, printed)


class MemoryLevel:
    """The memory of the keeper of this host, as one rank of a run uses it."""

    def __init__(self, option: Keeper, printed: str) -> None:
        """``printed``: the URI of the run's folder as drivers print it, with a slash at the
        end."""
        self._option = option
        self._printed = printed
        self._arena: Arena | None = None
        self._last: int | None = None

    @property
    def joined(self) -> bool:
        """Whether this rank has looked for its keeper."""
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        """For a rank that has joined."""
        assert self._arena is not None
        return self._arena

    def join(self, run_id: str) -> InMemory:
        """Find the keeper of the run, or start one; what it holds."""
        return run(self._join(run_id))

    async def _join(self, run_id: str) -> InMemory:
        if self._arena is not None:
            await self._arena.close()
        folder = KeeperFolder.of(run_id)
        option = self._option
        hello = Hello(VERSION, run_id, current_rank(), current_world(), option.host)

        async def start() -> None:
            await start_keeper(option, folder, run_id)

        arena = Arena(folder, hello, option.deadline_s, start if option.starts else None)
        self._arena = arena
        if not await arena.open():
            _log.warning("rank %d has no keeper: %s", hello.rank, arena.problem)
            return InMemory()
        inventory = await arena.look_up()
        if inventory is None:
            return InMemory()
        return InMemory(inventory.epoch, inventory.generations)

    def begin_epoch(self, epoch: int, step: int | None) -> None:
        """Training goes on from ``step``, None for its beginning: what is later is no more."""
        self._last = step
        run(self._begin_epoch(epoch, step))

    async def _begin_epoch(self, epoch: int, step: int | None) -> None:
        await self.arena.enter(epoch, step)
        await self.arena.release()  # not before: a trainer of the last epoch might write over it

    def load(
        self,
        generation: GenerationId,
        world: int,
        state: object,
        options: LoadOptions,
        touched: set[str],
    ) -> int:
        """Load a generation into ``state``; return how many bytes its images have. Every rank calls
        this. Raises DamagedError where memory does not hold what it should; what a load raises."""
        images = run(self._images(generation, world))
        manifest = run(_manifest(images))
        name = f"{self._printed}{checkpoint_name(generation.step)}"
        driver = TiersDriver(name, manifest, images)
        # Each rank reads what it needs: the memory of its host is as near as its own.
        options = replace(options, exchange=False)
        load_state(name, state, options, touched, driver)
        return sum(image.memory.nbytes for image in images)

    async def _images(self, generation: GenerationId, world: int) -> list[HeldImage]:
        return [HeldImage(*await self.arena.image(generation, rank)) for rank in range(world)]

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be kept. Asked once per step, in the order of steps."""
        last = self._last
        self._last = step
        every = self._option.every
        if last is None:
            return step % every == 0
        return step // every > last // every

    def by(self, storage: Storage | None = None) -> ByKeeper:
        """That a save goes by way of the keeper; and to storage from there, if that is given."""
        return ByKeeper(self.arena, storage)

    def close(self) -> None:
        """Let go of the keeper, which goes on."""
        if self._arena is not None:
            run(self._arena.close())
            self._arena = None


async def _manifest(images: Sequence[HeldImage]) -> bytes:
    try:
        return await offload(manifest_of, [image.label for image in images])
    except SaveError as error:
        raise DamagedError(f"labels in memory make no checkpoint: {error}") from error
