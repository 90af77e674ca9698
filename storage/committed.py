"""What is committed at a URI now: the manifest that is there, got, decoded and checked."""

from __future__ import annotations

from ..drivers.contract import Driver
from ..errors import DamagedError, NotACheckpointError, NotFoundError, UnsupportedFormatError
from .format.manifest import MANIFEST_KEY, Manifest, check_complete
from .pipeline.engine import offload

__all__ = ["decoded", "get_manifest", "read_manifest"]


async def read_manifest(driver: Driver) -> tuple[Manifest, bytes]:
    """The current manifest and its bytes. Raises NotACheckpointError, DamagedError, UnsupportedFormatError."""
    data = await get_manifest(driver)
    return await decoded(driver, data), data


async def get_manifest(driver: Driver) -> bytes:
    """The bytes of the current manifest, whatever they are. Raises NotACheckpointError."""
    try:
        return await driver.get(MANIFEST_KEY)
    except NotFoundError as error:
        advice = "Is the URI that of one checkpoint? `holdfast ls` lists them."
        raise NotACheckpointError(
            "nothing is committed here", uri=driver.uri, key=MANIFEST_KEY, advice=advice
        ) from error


async def decoded(driver: Driver, data: bytes) -> Manifest:
    """The manifest in ``data``, which is that of ``driver``. Raises DamagedError, UnsupportedFormatError."""
    try:
        manifest = await offload(Manifest.decode, data)
        check_complete(manifest, "the manifest")
        return manifest
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri, error.key = driver.uri, MANIFEST_KEY
        raise
