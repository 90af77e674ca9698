"""Hashes captured images in place, and appends their digest pages. Verifies images in the same
way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...core.aio import at_most
from ...core.units import ceil_div
from ...planner.image import DIGEST_NBYTES
from ..arenas.label import Label
from ..arenas.memory import Memory
from ..format.digest import digest, page_of
from ..runtime.engine import CPU_THREADS, offload


async def seal(memory: Memory, draft: Label) -> Label:
    """Hash the image in ``memory``, write its pages, and return the ``draft`` of its label with the
    digests of its chunks. With nothing to hash, the rank has no shards, and so no image."""
    digests = bytearray(DIGEST_NBYTES * ceil_div(draft.hashed_end, draft.chunk_nbytes))

    def sealed(chunk: int, page: bytes, at: int) -> None:
        memory.view[at : at + len(page)] = page
        digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES] = digest(page)

    await _each_page(memory, draft, sealed)
    return replace(draft, digests=bytes(digests))


async def is_sealed(memory: Memory, label: Label) -> bool:
    """Return whether ``memory``, of ``label.nbytes``, holds its image and pages."""
    damaged = set[int]()
    digests = label.digests

    def compare(chunk: int, page: bytes, at: int) -> None:
        expected = digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES]
        if digest(page) != expected or memory.view[at : at + len(page)] != page:
            damaged.add(chunk)

    if len(digests) != DIGEST_NBYTES * ceil_div(label.hashed_end, label.chunk_nbytes):
        return False
    await _each_page(memory, label, compare)
    return not damaged


async def _each_page(memory: Memory, label: Label, take: Callable[[int, bytes, int], None]) -> None:
    """Hash all chunks, and call ``take`` in threads with each one's number, page, and the offset of
    that page in the image."""
    page_nbytes = DIGEST_NBYTES * (label.chunk_nbytes // label.block_nbytes)

    def hash_chunk(chunk: int) -> None:
        start = chunk * label.chunk_nbytes
        end = min(start + label.chunk_nbytes, label.hashed_end)
        page = page_of(memory.view[start:end], label.block_nbytes)
        take(chunk, page, label.hashed_end + chunk * page_nbytes)

    chunks = range(ceil_div(label.hashed_end, label.chunk_nbytes))
    await at_most(CPU_THREADS, (offload(hash_chunk, chunk) for chunk in chunks))
