"""A flush: a generation in memory becomes a checkpoint in storage, by the same steps as a save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...errors import SupersededError
from ..arenas.messages import Flush
from ..format.fragment import Fragment
from ..format.lineage import ROOT
from ..format.manifest import image_key
from ..format.packed import Compression, checked_compression
from ..protocol.attempt import Attempt
from ..protocol.collect import give_up
from ..protocol.commit import begin
from ..protocol.whole import commit_attempt
from .tiers import HeldImage
from .written import write_image

__all__ = ["flush", "flush_to"]


async def flush_to(
    request: Flush, images: Sequence[HeldImage], is_wanted: Callable[[], bool] = lambda: True
) -> str:
    """:func:`flush` as a trainer has asked for it; the id of the attempt. What configures drivers
    is from now on what configures them for that trainer. Raises UsageError and UriError, too, for
    what is no URI or no options."""
    os.environ.update(request.environment)
    driver = open_driver(request.uri, len(images), **json.loads(request.options))
    try:
        compression = checked_compression(request.compression or None)
        return (await flush(driver, images, compression, request.branch, is_wanted)).id
    finally:
        await driver.close()


async def flush(
    driver: Driver,
    images: Sequence[HeldImage],
    compression: Compression | None = None,
    branch: str = ROOT,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Attempt:
    """Write the images of a generation, one for each rank, in order; and commit them as one
    checkpoint. ``is_wanted()`` is asked before the commit. Raises DamagedError where memory no
    longer holds what was sealed, SupersededError where it is not wanted any more; as
    :func:`commit_attempt`. Then nothing is committed, unless the put of the manifest failed."""
    attempt = await begin(driver)
    try:
        fragments = [await _fragment(driver, attempt, image, compression) for image in images]
        if not is_wanted():
            raise SupersededError("a resume has gone on from before this step", uri=driver.uri)
    except BaseException:
        await give_up(driver, attempt)
        raise
    await commit_attempt(driver, attempt, fragments, compression, branch)
    return attempt


async def _fragment(
    driver: Driver, attempt: Attempt, image: HeldImage, compression: Compression | None
) -> Fragment:
    """Write one image; return what the manifest is to say of it."""
    label = image.label
    stored_nbytes = 0
    if label.digests:  # a rank without a shard writes no file
        key = image_key(attempt.id, label.rank, compression)
        stored_nbytes = await write_image(driver, key, image, compression)
    return label.fragment(attempt.id, None if compression is None else stored_nbytes)
