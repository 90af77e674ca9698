"""Sealing: a captured image is hashed where it lies, and its pages are written behind it."""

from __future__ import annotations

from ...core.aio import at_most
from ...core.units import ceil_div
from ...planner.image import DIGEST_NBYTES
from ..arenas.memory import Memory
from ..format.digest import digest, page_of
from ..runtime.engine import CPU_THREADS, offload

__all__ = ["seal"]


async def seal(memory: Memory, hashed_end: int, chunk_nbytes: int, block_nbytes: int) -> bytes:
    """Hash bytes [0, hashed_end) of the image in ``memory``, write its pages, and return the
    digests of its chunks, 16 bytes each. Nothing is done where nothing is hashed: a rank without a
    shard has no image."""
    chunks = ceil_div(hashed_end, chunk_nbytes)
    digests = bytearray(DIGEST_NBYTES * chunks)
    page_nbytes = DIGEST_NBYTES * (chunk_nbytes // block_nbytes)

    def hash_chunk(chunk: int) -> None:
        start = chunk * chunk_nbytes
        page = page_of(memory.view[start : min(start + chunk_nbytes, hashed_end)], block_nbytes)
        at = hashed_end + chunk * page_nbytes
        memory.view[at : at + len(page)] = page
        digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES] = digest(page)

    await at_most(CPU_THREADS, (offload(hash_chunk, chunk) for chunk in range(chunks)))
    return bytes(digests)
