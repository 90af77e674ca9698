"""Holds a keeper's parity of the images of its group, and decides when to encode it. Rebuilds lost
images from the parity of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain

from ....errors import DamagedError, HoldfastError
from ....planner.parity import DataBlock, parity_of
from ...arenas.hosts import GuardedGroup, KeeperHost
from ...arenas.label import GenerationId, Label
from ...arenas.memory import Memory
from ...arenas.messages import ParityEntry, Rebuild
from ...runtime.engine import offload
from ..decisions.slots import ENDED
from ..reading import Peers, peers_of
from ..slot_memory import spared_memory
from .guarding import Block, Guarded, guard, rebuild

_log = logging.getLogger(__name__)


class Guards:
    """Parity that one keeper holds. ``certificate``: PEM file to verify other keepers with;
    ``changed()`` is called when an encoding has succeeded or failed."""

    def __init__(self, run: str, certificate: str, changed: Callable[[], None]) -> None:
        self._run = run
        self.certificate = certificate
        self._changed = changed
        self._held: dict[GenerationId, Guarded] = {}
        self._pinned: list[Guarded] = []
        """Parity that is being read."""
        self._offered: dict[int, set[GenerationId]] = {}
        """Generations retained for each client that is choosing one to resume from."""
        self._worlds: dict[GenerationId, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._making: GenerationId | None = None
        self.failures = 0
        self.unguarded: GenerationId | None = None
        """Newest generation that could not be encoded."""

    @property
    def guarded(self) -> GenerationId | None:
        """Newest generation with parity."""
        return max(self._held, default=None)

    @property
    def nbytes(self) -> int:
        """Size of all parity."""
        return sum(held.nbytes for held in self._held.values())

    def inventory(self) -> tuple[ParityEntry, ...]:
        """Return the held parity, newest first."""
        return tuple(
            ParityEntry(id, self._worlds[id], held.group, held.member)
            for id, held in sorted(self._held.items(), reverse=True)
        )

    def make(
        self, id: GenerationId, group: GuardedGroup, member: int, hosts: Sequence[KeeperHost]
    ) -> None:
        """Start to encode, as member ``member`` of the group. Cancels an encoding in progress."""
        if id == self._making or id in self._held:
            return
        self.stop()
        self._making = id
        if self.unguarded == id:
            self.unguarded = None
        self._task = asyncio.ensure_future(self._make(id, group, member, hosts))

    async def _make(
        self, id: GenerationId, group: GuardedGroup, member: int, hosts: Sequence[KeeperHost]
    ) -> None:
        try:
            async with peers_of(id, hosts, self.certificate) as peers:
                holders = {
                    rank: [name]
                    for name, ranks in zip(group.names, group.ranks, strict=True)
                    for rank in ranks
                }
                labels = await _labels(peers, holders, self._run)
                world = next(iter(labels.values())).world
                encoded = {rank: label.encode() for rank, label in labels.items()}
                held = await guard(group, member, id, encoded, _Pull(peers, group), spared_memory)
            self._held[id] = held
            self._worlds[id] = world
        except (HoldfastError, OSError) as error:
            self.unguarded = id
            self.failures += 1
            _log.warning("step %d could not be protected: %s", id.step, error)
        finally:
            if self._making == id:
                self._making = None
        self._changed()

    def keep(self, ids: Collection[GenerationId]) -> None:
        """Drop all parity except for the newest, for ``ids``, and for offers to clients."""
        kept = set(ids).union(*self._offered.values())
        for id in sorted(self._held)[:-1]:
            if id not in kept:
                self._let_go(id)

    def holds(self, id: GenerationId) -> bool:
        """Return whether there is parity of the generation."""
        return id in self._held

    def offer(self, client: int, ids: Collection[GenerationId]) -> None:
        """Retain parity for ``client``, which is choosing a generation to resume from: everything
        held now, and ``ids`` even if they are encoded later. Ends with :meth:`released`, or when a
        resume drops the parity. If the client ends before, the offer stays until the next epoch."""
        self._offered.setdefault(client, set()).update(self._held, ids)

    def released(self, client: int) -> None:
        """Forget the offer to a client that has entered the next epoch."""
        self._offered.pop(client, None)

    def client_gone(self, client: int) -> None:
        """Retain the offer to a client that has ended: the job may have chosen one of its steps."""
        self._offered.setdefault(ENDED, set()).update(self._offered.pop(client, ()))

    def drop_later(self, chosen: int | None) -> None:
        """Drop the parity of all steps after ``chosen``, which a new epoch resumes from."""
        self.released(ENDED)
        for id in [id for id in self._held if chosen is None or id.step > chosen]:
            self._let_go(id)

    def _let_go(self, id: GenerationId) -> None:
        del self._worlds[id]
        held = self._held.pop(id)
        if held not in self._pinned:
            held.close()

    @contextmanager
    def opened(self, id: GenerationId) -> Iterator[Guarded | None]:
        """Pin the parity of a generation for the body. Yields None without parity."""
        held = self._held.get(id)
        if held is None:
            yield None
            return
        self._pinned.append(held)
        try:
            yield held
        finally:
            self._pinned.remove(held)
            if held not in self._held.values() and held not in self._pinned:
                held.close()

    def stop(self) -> None:
        """Cancel the encoding in progress."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._making = None

    async def close(self) -> None:
        """Cancel the encoding in progress, and release all memory."""
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.wait([task])
        for id in list(self._held):
            self._let_go(id)


async def unseen() -> None:
    """Ignore progress."""


class _Pull:
    """Reads blocks from the keepers of a group. Calls ``moved()`` after each."""

    def __init__(
        self, peers: Peers, group: GuardedGroup, moved: Callable[[], Awaitable[None]] = unseen
    ) -> None:
        self._peers = peers
        self._group = group
        self._moved = moved

    async def __call__(
        self, member: int, lane: int, block: Block, start: int, into: memoryview
    ) -> None:
        driver = self._peers.driver(self._group.names[member])
        if isinstance(block, DataBlock):
            rank = self._group.ranks[member][lane]
            await driver.read(f"{rank}.safetensors", block.start + start, into)
        else:
            await driver.read(f"{lane}.{block.row}.parity", start, into)
        await self._moved()


async def rebuilt(
    request: Rebuild,
    run: str,
    certificate: str,
    moved: Callable[[], Awaitable[None]] = unseen,
) -> tuple[Label, Memory]:
    """Rebuild a lost image, and verify it. Calls ``moved()`` on progress. A member whose blocks are
    damaged or cannot be read is left out, if parity allows. Raises DamagedError, StorageError,
    OSError if memory is short."""
    group, id = request.group, request.generation
    lost = {group.names[member] for member in request.lost}
    # A label has its own checksum, so it may be intact on a member whose image is damaged.
    names = sorted(group.names, key=lambda name: name in lost)
    async with peers_of(id, request.hosts, certificate) as peers:
        labels = await _labels(peers, dict.fromkeys(chain(*group.ranks), names), run)
        memory = await offload(spared_memory, labels[request.rank].nbytes)
        try:
            encoded = {rank: label.encode() for rank, label in labels.items()}
            pull = _Pull(peers, group, moved)
            make = partial(rebuild, group, request.rank, labels=encoded, pull=pull, memory=memory)
            label = await _made_without(request, make)
        except BaseException:
            memory.close()
            raise
    return label, memory


async def _made_without(
    request: Rebuild, make: Callable[[Collection[int]], Awaitable[Label]]
) -> Label:
    """Rebuild an image without the lost members. If that fails, leave out each other member in
    turn: blocks have no checksums of their own, so only the result shows which one is damaged."""
    group, lost = request.group, set(request.lost)
    lost.add(group.member_of(request.rank))
    try:
        return await make(lost)
    except HoldfastError as error:
        problem = error
    if len(lost) < parity_of(group.mode):
        for member, name in enumerate(group.names):
            if member in lost:
                continue
            with suppress(HoldfastError):  # the first problem is reported
                label = await make({*lost, member})
                _log.warning(
                    "the image of rank %d of step %d was rebuilt without the keeper %s: %s",
                    *(request.rank, request.generation.step, name, problem),
                )
                return label
    raise problem


async def _labels(peers: Peers, holders: Mapping[int, Sequence[str]], run: str) -> dict[int, Label]:
    """Return the label of each rank, from the first of its ``holders`` that has it."""
    asked = (_label_of_any(peers, names, rank, run) for rank, names in holders.items())
    return dict(zip(holders, await asyncio.gather(*asked), strict=True))


async def _label_of_any(peers: Peers, names: Sequence[str], rank: int, run: str) -> Label:
    problem: HoldfastError | None = None
    for name in names:
        try:
            return await peers.label(name, rank, run)
        except HoldfastError as error:
            problem = error
    raise DamagedError(
        f"no keeper has the label of rank {rank} of step {peers.generation.step}: {problem}",
        rank=rank,
    ) from problem
