"""A group of four hosts protected by XOR, one process each, with two servers for their memory: the
keepers' own, and bare sockets.

Both send directly from images and parity. A bare server receives requests in the form of
:data:`ASKED` and sends the bytes from a thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ..core.units import round_up
from ..errors import NotFoundError
from ..planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES, PAGE_NBYTES, blocks_of
from ..planner.parity import ParityBlock
from ..storage.arenas.hosts import GuardedGroup
from ..storage.arenas.label import GenerationId, Label
from ..storage.arenas.memory import Memory, reserved_memory
from ..storage.keeper.parity.combining import Block
from ..storage.keeper.parity.guarding import guard
from ..storage.keeper.sealing import seal
from ..storage.keeper.serving.catalog import Content, Item
from ..storage.keeper.serving.serve import serve
from ..storage.keeper.serving.serve_options import ServeOptions

__all__ = ["ASKED", "GENERATION", "GROUP", "RUN", "key_of", "label_key", "room", "serve_group"]

RUN = "run"
GENERATION = GenerationId(1, 1)
GROUP = GuardedGroup("xor", ("a", "b", "c", "d"), ((0,), (1,), (2,), (3,)))
ASKED = struct.Struct("!64sQQ")
"""Key of an object, offset and number of bytes."""
_SENT_NBYTES = 1 << 20


def key_of(block: Block) -> str:
    """Return the key of the object that contains a block."""
    if isinstance(block, ParityBlock):
        return f"{block.member}/parity-{block.stripe}-{block.row}"
    return f"{block.member}/image"


def label_key(rank: int) -> str:
    """Return the key of a rank's label."""
    return f"{rank}/label"


def room(nbytes: int) -> Memory:
    """Return memory as a keeper allocates it for an image."""
    return reserved_memory(nbytes)


class _Shelf:
    """Objects in memory, by their keys below :data:`RUN`."""

    def __init__(self, objects: Mapping[str, memoryview]) -> None:
        self.objects = objects

    def listing(self) -> Sequence[Item]:
        """See ``Catalog``."""
        return [Item(f"{RUN}/{key}", len(view), 0.0) for key, view in self.objects.items()]

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """See ``Catalog``."""
        view = self.objects.get(key.removeprefix(f"{RUN}/"))
        if view is None:
            raise NotFoundError("no such object", key=key)
        yield Content(view, 0.0)

    def status(self) -> Mapping[str, object]:
        """See ``Catalog``."""
        return {}

    def metrics(self) -> str:
        """See ``Catalog``."""
        return ""


async def _image(rank: int, nbytes: int) -> tuple[Memory, Label]:
    """Return a sealed image of random bytes."""
    hashed_end = round_up(nbytes, PAGE_NBYTES)
    memory = room(hashed_end + DIGEST_NBYTES * blocks_of(hashed_end, BLOCK_NBYTES))
    random = np.random.default_rng(rank)
    for start in range(0, nbytes, CHUNK_NBYTES):
        part = memory.view[start : min(start + CHUNK_NBYTES, nbytes)]
        part[:] = random.bytes(len(part))
    draft = Label(
        run=RUN,
        generation=GENERATION,
        rank=rank,
        world=len(GROUP.names),
        nbytes=memory.nbytes,
        hashed_end=hashed_end,
        chunk_nbytes=CHUNK_NBYTES,
        block_nbytes=BLOCK_NBYTES,
        created_s=0.0,
    )
    digests = await seal(memory, hashed_end, CHUNK_NBYTES, BLOCK_NBYTES)
    return memory, replace(draft, digests=digests)


async def _objects(nbytes: int) -> tuple[dict[str, Memory], dict[str, bytes]]:
    """Return all images of ``nbytes`` with all their parity, and the labels."""
    images, labels = {}, {}
    for rank in range(len(GROUP.names)):
        images[rank], label = await _image(rank, nbytes)
        labels[rank] = label.encode()

    async def pull(member: int, lane: int, block: Block, start: int, into: memoryview) -> None:
        assert not isinstance(block, ParityBlock)
        begin = block.start + start
        into[:] = images[member].view[begin : begin + len(into)]

    objects = {f"{rank}/image": memory for rank, memory in images.items()}
    for member in range(len(GROUP.names)):
        held = await guard(GROUP, member, GENERATION, labels, pull, room)
        for parity in held.parities:
            assert parity.memory is not None
            objects[key_of(parity.block)] = parity.memory
    return objects, {label_key(rank): label for rank, label in labels.items()}


def _send(connection: socket.socket, objects: Mapping[str, memoryview]) -> None:
    with connection:
        while asked := connection.recv(ASKED.size, socket.MSG_WAITALL):
            key, start, nbytes = ASKED.unpack(asked)
            view = objects[key.rstrip(b"\0").decode()]
            for at in range(start, start + nbytes, _SENT_NBYTES):
                connection.sendall(view[at : min(at + _SENT_NBYTES, start + nbytes)])


def _accept(listening: socket.socket, objects: Mapping[str, memoryview]) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_send, args=(connection, objects), daemon=True).start()


def serve_group(nbytes: int, token: str, members: Sequence[int]) -> None:
    """Serve the memory of these ``members`` of a group, each in its own process, until standard
    input ends. Images have ``nbytes``. Each member prints its number, the port of its keeper's
    server and the port of its bare server."""
    objects, labels = asyncio.run(_objects(nbytes))
    children = []
    for member in members:
        child = os.fork()  # no thread of the work so far is left
        if not child:
            asyncio.run(_serve_member(member, token, objects, labels))
            return
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


async def _serve_member(
    member: int, token: str, objects: Mapping[str, Memory], labels: Mapping[str, bytes]
) -> None:
    # A forked process has the memory's descriptors, but not its mappings.
    held = {
        key: Memory(os.dup(memory.fd), memory.nbytes, writable=False).view
        for key, memory in objects.items()
        if key.startswith(f"{member}/")
    }
    held.update({key: memoryview(label) for key, label in labels.items()})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=(listening, held), daemon=True).start()
        async with serve(_Shelf(held), ServeOptions(token)) as server:
            # One write, because print may write the words separately, mixed with other members'
            # output.
            said = f"{member} {server.port} {listening.getsockname()[1]}\n"
            os.write(sys.stdout.fileno(), said.encode())
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
