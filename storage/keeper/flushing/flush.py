"""Flushes a generation from memory to storage, with the same protocol as a save: each keeper writes
its own images, and the leader commits."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from ....drivers.contract import Driver
from ....drivers.registry import opened_driver
from ....drivers.uri import divided, parse
from ....errors import DamagedError, SaveError, SupersededError
from ....planner.image import DIGEST_NBYTES, ImageLayout
from ...arenas.label import GenerationId, Label
from ...arenas.messages import Flush, FlushEnd
from ...format.extents import Extents
from ...format.manifest import image_key
from ...format.packed import Compression, checked_compression
from ...pipeline.base import Base, Borrowing, ChosenBase, chosen
from ...pipeline.borrowing import Incremental
from ...pipeline.image_writer import WrittenImage
from ...pipeline.memory_writer import write_memory
from ...protocol.collect import give_up
from ...protocol.commit import begin, commit_attempt
from ..decisions.standing import FlushOrder, Written
from ..reading import peers_of
from ..reporting import Reporting
from ..tiers import LocalImage

_LOOK_S = 1.0


@asynccontextmanager
async def opened_for(
    request: Flush, writers: int
) -> AsyncIterator[tuple[Driver, Compression | None]]:
    """Open the driver and the compression that a trainer has requested, for the body. Applies the
    environment of the request to this process for good, so the last trainer's driver settings
    count. Raises UsageError or UriError for a bad URI or options."""
    os.environ.update(request.environment)
    async with opened_driver(request.uri, writers, **json.loads(request.options)) as driver:
        yield driver, checked_compression(request.compression or None)


def base_of(request: Flush) -> Base | None:
    """Return where a flush looks for equal bytes: at the requested name beside the checkpoint."""
    if request.base is None:
        return None
    folder, _ = divided(parse(request.uri))
    options = json.loads(request.options)
    limits = Incremental.of(request.limits)
    return Base.below(folder, options, lambda: request.base or None, limits)


async def flush_part(request: Flush, order: FlushOrder, images: Sequence[LocalImage]) -> Written:
    """Write this keeper's images for an attempt that another keeper commits. They are durable on
    return. Raises StorageError, DamagedError if an image has changed in memory, and as
    :func:`opened_for`."""
    borrowing = Borrowing(base_of(request), ChosenBase(order.base, order.base_key))
    async with opened_for(request, images[0].label.world) as (driver, compression):
        parts = [
            await write_part(driver, order.attempt, image, compression, borrowing)
            for image in images
        ]
    ranks = tuple(image.label.rank for image in images)
    stored = tuple(part.stored_nbytes for part in parts)
    return Written(
        *(order.attempt, ranks, stored),
        borrowed_nbytes=sum(part.borrowed_nbytes for part in parts),
        extents=tuple(b"" if part.extents is None else part.extents.encode() for part in parts),
    )


async def flush(
    request: Flush,
    generation: GenerationId,
    images: Sequence[LocalImage],
    reporting: Reporting,
    is_wanted: Callable[[], bool],
) -> FlushEnd:
    """Have all keepers of the job write a generation, and commit it. ``images``: the images held by
    this keeper, the leader.

    Raises SaveError if another keeper fails to write its part or has not reported for too long,
    DamagedError if an image of this keeper has changed in memory, and SupersededError if the
    generation is no longer wanted, or images of it are gone; then nothing is committed. Also raises
    as :func:`opened_for` and :func:`commit_attempt`.
    """
    if not images:
        raise DamagedError(f"no image of step {generation.step} is in memory")
    world = images[0].label.world
    async with opened_for(request, world) as (driver, compression):
        attempt = await begin(driver)
        try:
            base = base_of(request)
            choice = await chosen(base, driver)
            borrowing = Borrowing(base, choice)
            reporting.order(FlushOrder(generation, attempt.id, choice.attempt, choice.key))
            own = {
                image.label.rank: await write_part(
                    driver, attempt.id, image, compression, borrowing
                )
                for image in images
            }
            stored = {rank: part.stored_nbytes for rank, part in own.items()}
            extents = {rank: part.extents for rank, part in own.items()}
            borrowed_nbytes = sum(part.borrowed_nbytes for part in own.values())
            labels = {image.label.rank: image.label for image in images}
            written = await _written(reporting, is_wanted)
            for name, part in written.items():
                stored |= dict(zip(part.ranks, part.stored_nbytes, strict=True))
                extents |= _extents(part)
                borrowed_nbytes += part.borrowed_nbytes
                labels |= await _labels(reporting, images[0].label.run, generation, name, part)
            if labels.keys() != set(range(world)):
                lacking = sorted(set(range(world)) - labels.keys())
                # Alone, this keeper cannot get it any more: the job now runs on other hosts.
                kind = SupersededError if reporting.is_alone else SaveError
                raise kind(f"no keeper has written the image of rank {lacking[0]}")
            _check_wanted(is_wanted)
        except BaseException:
            await give_up(driver, attempt)
            raise
        fragments = [
            labels[rank].fragment(
                attempt.id, None if compression is None else stored[rank], extents.get(rank)
            )
            for rank in range(world)
        ]
        await commit_attempt(
            *(driver, attempt, fragments, compression, request.branch),
            increments=choice.increments,
        )
    nbytes = sum(label.nbytes for label in labels.values() if label.digests)
    return FlushEnd(
        *(generation, attempt.id, nbytes),
        borrowed_nbytes=borrowed_nbytes,
        base=borrowing.uri,
        why_whole=borrowing.why_whole,
    )


async def _written(reporting: Reporting, is_wanted: Callable[[], bool]) -> Mapping[str, Written]:
    others = reporting.lead.names - {reporting.name}
    while True:
        written = reporting.lead.written()
        for name, part in written.items():
            if part.gone or part.damaged:
                # This keeper retains its images: a restart may rebuild the lost ones from them.
                raise SupersededError(f"the keeper {name} no longer holds it: {part.problem}")
            if part.problem:
                raise SaveError(f"the keeper {name} cannot write its part: {part.problem}")
        _check_wanted(is_wanted)
        if written.keys() >= others:
            return {name: written[name] for name in sorted(others)}
        # If the job was restarted on other hosts meanwhile, its keepers do not report here.
        if gone := [*reporting.unheard(), *sorted(others - reporting.lead.names)]:
            raise SaveError(f"the keeper {gone[0]} has stopped reporting")
        await reporting.moved(_LOOK_S)


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise SupersededError("a resume has discarded this step")


def _extents(part: Written) -> dict[int, Extents | None]:
    """Return the extents of each image of a part. Raises DamagedError."""
    what = "the extents of a keeper's part"
    encoded = zip(part.ranks, part.extents, strict=False)
    return {rank: Extents.decode(data, what) if data else None for rank, data in encoded}


async def _labels(
    reporting: Reporting, run: str, generation: GenerationId, name: str, part: Written
) -> dict[int, Label]:
    async with peers_of(generation, reporting.hosts, reporting.certificate) as peers:
        found = await asyncio.gather(*(peers.label(name, rank, run) for rank in part.ranks))
    return dict(zip(part.ranks, found, strict=True))


async def write_part(
    driver: Driver,
    attempt: str,
    image: LocalImage,
    compression: Compression | None,
    borrowing: Borrowing,
) -> WrittenImage:
    """Write one image for an attempt; a rank without shards writes none. Raises as
    :func:`write_image`."""
    if not image.label.digests:
        return WrittenImage(np.empty((0, DIGEST_NBYTES), np.uint8), 0)
    key = image_key(attempt, image.label.rank, compression)
    return await write_image(driver, key, image, compression, borrowing)


async def write_image(
    driver: Driver,
    key: str,
    image: LocalImage,
    compression: Compression | None = None,
    borrowing: Borrowing | None = None,
) -> WrittenImage:
    """Write an image that has shards, from where it lies. It is durable on return. Raises
    StorageError, and DamagedError if the image has changed in memory."""
    label = image.label
    layout = ImageLayout.of_sizes(
        label.hashed_end, label.nbytes, label.chunk_nbytes, label.block_nbytes
    )
    borrower = None if borrowing is None else (borrowing, label.rank)
    written = await write_memory(driver, key, layout, image.memory, compression, borrower=borrower)
    if written.digests.tobytes() != label.digests:
        raise DamagedError(
            f"the image of rank {label.rank} of step {label.generation.step} has changed in memory",
            rank=label.rank,
        )
    return written
