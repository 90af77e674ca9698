"""The simulated surroundings of keepers: memory; reports and standings that are lost, late, sent
twice or overtaken; reads of peers' memory; parity; and storage.

The real code of a keeper runs above this, on a simulated event loop. :func:`installed` puts these
functions in place of the real ones. Each acts for the keeper whose process is running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from holdfast.errors import CoordinationError, DamagedError, NotFoundError, StorageError
from holdfast.planner.parity import parity_of
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.keeper import agreement
from holdfast.storage.keeper.decisions.standing import Report, Standing
from holdfast.storage.keeper.flushing import flush
from holdfast.storage.keeper.parity import guards
from holdfast.storage.keeper.reporting import ANSWER_S, Reporting, StaleReportError
from holdfast.storage.ranks.messages import codec

from .loop import PROCESS, Process

if TYPE_CHECKING:
    from .keeper_host import HostKeeper


PIECES = 3

State = tuple[int, int, int]
"""Job, step and rank of an image."""


@dataclass(eq=False)
class Memory:
    """The memory of a slot. ``users``: tasks that read or hash it now."""

    nbytes: int
    pieces: list[State | None] = field(default_factory=lambda: [None] * PIECES)
    pages: tuple[State | None, ...] = ()
    users: Counter[str] = field(default_factory=Counter)
    generation: GenerationId | None = None

    def close(self) -> None:
        """Do nothing: this memory needs no release."""


@dataclass(eq=False)
class Slot:
    """A slot of a keeper, and the bytes of its label."""

    memory: Memory
    label: Label | None = None
    encoded: bytes = b""


class KeeperProcess(Process):
    """The process of a keeper. ``answers``: answers that peers wait for."""

    def __init__(self, keeper: HostKeeper, name: str) -> None:
        super().__init__(name, name)
        self.keeper = keeper
        self.answers: list[asyncio.Future[bytes]] = []


def running() -> HostKeeper:
    """Return the keeper whose code runs."""
    process = PROCESS.get()
    assert isinstance(process, KeeperProcess)
    return process.keeper


async def _at(name: str) -> HostKeeper:
    """Return the keeper of that name after a delay. Raises StorageError if it is unreachable."""
    keeper = running()
    await keeper.world.piece()
    other = keeper.world.keeper_of(name)
    if other is None or keeper.world.is_cut(keeper.host.name, name):
        raise StorageError(f"{name} cannot be reached")
    return other


class Wire(Reporting):
    """Sends reports to the leader. Some are lost."""

    def enter(
        self, epoch: int, hosts: Sequence[KeeperHost], groups: Sequence[GuardedGroup]
    ) -> None:
        super().enter(epoch, hosts, groups)
        for task in self._tasks:
            task.add_done_callback(running().ended)

    async def _sent(self, host: KeeperHost, report: Report) -> Standing:
        world = running().world
        body = codec(Report).encode(report)
        await self._travel(host)
        if world.random.random() < world.doubles:
            self.run_later(self._again(host, body))
        async with asyncio.timeout(ANSWER_S):
            answer = await self._answer(host, body)
        await self._travel(host)
        return codec(Standing).decode(answer, "a standing")

    async def _travel(self, host: KeeperHost) -> None:
        keeper = running()
        draw = keeper.world.random
        for _ in range(draw.choice([1, 1, 1, 2, 6])):
            await keeper.world.piece()
        if keeper.world.is_cut(self.name, host.name) or draw.random() < keeper.world.loses:
            raise TimeoutError("lost")

    async def _again(self, host: KeeperHost, body: bytes) -> None:
        """Send the same report again, later."""
        with contextlib.suppress(CoordinationError, OSError, TimeoutError):
            await self._travel(host)
            await self._answer(host, body)

    async def _answer(self, host: KeeperHost, body: bytes) -> bytes:
        """Return the answer of the current keeper of the host."""
        world = running().world
        other = world.keeper_of(host.name)
        if other is None:
            raise ConnectionRefusedError
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        other.process.answers.append(answer)

        async def hear() -> None:
            try:
                told = await other.agreement.reporting.hear(body)
            except (CoordinationError, StaleReportError) as error:
                if not answer.done():
                    answer.set_exception(CoordinationError(str(error)))
            else:
                if not answer.done():
                    answer.set_result(told)

        world.loop.spawn(other.process, hear())
        try:
            return await answer
        finally:
            other.process.answers.remove(answer)


class Peers:
    """Reads the memory of other keepers."""

    def __init__(self, generation: GenerationId) -> None:
        self.generation = generation

    def driver(self, name: str) -> str:
        """See the real one."""
        return name

    async def label(self, name: str, rank: int, run: str) -> Label:
        """Return the label of an image that the keeper holds, or has encoded in parity."""
        keeper = await _at(name)
        for held in keeper.images(self.generation):
            if held.label is not None and held.label.rank == rank:
                return held.label
        with keeper.guards.opened(self.generation) as guarded:
            if guarded is None or rank not in guarded.labels:
                raise NotFoundError("no such label is in memory")
            return Label.decode(guarded.labels[rank])

    async def pieces(self, name: str, number: int) -> dict[int, State | None]:
        """Return a piece of each image that the keeper holds, by rank."""
        keeper = await _at(name)
        found = {
            held.label.rank: held.memory.pieces[number]
            for held in keeper.images(self.generation)
            if held.label is not None
        }
        if not found:
            raise NotFoundError("no such image is in memory")
        return found

    async def parity(self, name: str, number: int) -> dict[int, State | None]:
        """Return a piece of the keeper's parity: the encoded pieces, by rank."""
        keeper = await _at(name)
        with keeper.guards.opened(self.generation) as guarded:
            if guarded is None:
                raise NotFoundError("no such parity is in memory")
            assert isinstance(guarded, Parity)
            return guarded.pieces[number]


@contextlib.asynccontextmanager
async def _peers_of(id: GenerationId, hosts: object, certificate: str) -> AsyncIterator[Peers]:
    yield Peers(id)


@dataclass(eq=False)
class Parity:
    """Parity on a member of a group. Each piece names the pieces that it encodes."""

    group: GuardedGroup
    member: int
    generation: GenerationId
    labels: dict[int, bytes]
    pieces: list[dict[int, State | None]]
    nbytes: int = 0

    def close(self) -> None:
        """Do nothing."""


async def guard(
    group: GuardedGroup,
    member: int,
    generation: GenerationId,
    labels: Mapping[int, bytes],
    pull: Peers,
    room: object,
) -> Parity:
    """Encode the images of the other members, piece by piece."""
    if running().world.full:
        raise OSError("no memory for parity")
    others = [place for place in range(len(group.names)) if place != member]
    pieces: list[dict[int, State | None]] = []
    for number in range(PIECES):
        pieces.append({})
        for other in others:
            found = await pull.pieces(group.names[other], number)
            for rank in group.ranks[other]:
                if rank not in found:
                    raise NotFoundError("no such image is in memory")
                pieces[-1][rank] = found[rank]
    return Parity(group, member, generation, dict(labels), pieces)


async def rebuild(
    group: GuardedGroup,
    want_rank: int,
    lost: Sequence[int],
    labels: Mapping[int, bytes],
    pull: Peers,
    memory: Memory,
) -> Label:
    """Rebuild an image. It is correct if all pieces read belong to one generation."""
    label = Label.decode(labels[want_rank])
    without = {group.member_of(want_rank), *lost}
    if len(without) > parity_of(group.mode):
        raise DamagedError("too many members are lost")
    left = [name for member, name in enumerate(group.names) if member not in without]
    for number in range(PIECES):
        images: dict[int, State | None] = {}
        parities = []
        for name in left:
            images |= await pull.pieces(name, number)
            parities.append(await pull.parity(name, number))
        memory.pieces[number] = combined(want_rank, images, parities)
    memory.pages = tuple(memory.pieces)
    if not is_sealed(memory, label):
        raise DamagedError("the rebuilt image does not match its label")
    return label


def combined(
    want_rank: int,
    images: Mapping[int, State | None],
    parities: Sequence[Mapping[int, State | None]],
) -> State | None:
    """Return the recovered piece, or None if the parity encodes other pieces than those read."""
    for parity in parities:
        if any(parity[rank] != images[rank] for rank in parity.keys() & images.keys()):
            return None
    found = {parity[want_rank] for parity in parities}
    return found.pop() if len(found) == 1 else None


def is_sealed(memory: Memory, label: Label) -> bool:
    """Return whether memory matches its label."""
    return repr(memory.pieces).encode() == label.digests


# Storage.


@contextlib.asynccontextmanager
async def _opened_for(request: object, writers: int) -> AsyncIterator[tuple[object, None]]:
    yield SimpleNamespace(uri="simulated://"), None


async def _begin(driver: object) -> object:
    world = running().world
    await world.piece()
    world.count("begun to flush")
    return SimpleNamespace(id=f"attempt-{world.counts['begun to flush']}")


async def write_part(
    driver: object, attempt: str, image: Slot, compression: None, borrowing: object
) -> object:
    """Write an image, piece by piece. May fail."""
    world, label = running().world, image.label
    assert label is not None
    written: list[State | None] = []
    image.memory.users["flush"] += 1
    try:
        for number in range(PIECES):
            await world.piece()
            written.append(image.memory.pieces[number])
    finally:
        image.memory.users["flush"] -= 1
    if repr(written).encode() != label.digests:
        raise DamagedError(f"the image of rank {label.rank} is damaged")
    if world.random.random() < world.flush_fails:
        raise StorageError("storage is away")
    world.written[attempt, label.rank] = written
    return SimpleNamespace(stored_nbytes=1, borrowed_nbytes=0, extents=None)


def _fragment_of(label: Label, attempt: str, nbytes: None, extents: None) -> object:
    return label, attempt


async def _commit(
    driver: object,
    attempt: object,
    fragments: Sequence[Any],
    compression: None,
    branch: str,
    increments: int,
) -> None:
    keeper = running()
    keeper.world.check_commit(keeper, fragments)
    await keeper.world.piece()
    keeper.world.commit(fragments)


async def _give_up(driver: object, attempt: object) -> None:
    pass


async def _offload(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def _spared_memory(nbytes: int) -> Memory:
    if running().world.full:
        raise OSError("no memory for an image")
    return Memory(nbytes)


_OWN: list[tuple[Any, dict[str, Any]]] = [
    (agreement, {"Reporting": Wire}),
    (
        flush,
        {
            "opened_for": _opened_for,
            "begin": _begin,
            "write_part": write_part,
            "commit_attempt": _commit,
            "give_up": _give_up,
            "peers_of": _peers_of,
        },
    ),
    (Label, {"fragment": _fragment_of}),
    (
        guards,
        {
            "peers_of": _peers_of,
            "guard": guard,
            "rebuild": rebuild,
            "offload": _offload,
            "spared_memory": _spared_memory,
            "_Pull": lambda peers, *_: peers,
        },
    ),
]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Run the real code of keepers on the simulated surroundings during the body."""
    with contextlib.ExitStack() as stack:
        for owner, own in _OWN:
            stack.enter_context(mock.patch.multiple(owner, **own))
        yield
