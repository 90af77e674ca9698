"""The current checkpoint at a URI: fetches, decodes and checks its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.spans import Where, span
from ...drivers.contract import Driver
from ...errors import DamagedError, NotACheckpointError, NotFoundError, UnsupportedFormatError
from ..format.manifest import MANIFEST_KEY, Manifest, attempt_in, check_complete
from ..runtime.engine import offload


async def read_manifest(driver: Driver) -> tuple[Manifest, bytes]:
    """Return the current manifest and its bytes. Raises NotACheckpointError and DamagedError."""
    with span("manifest", Where(MANIFEST_KEY)):
        data = await _get_manifest(driver)
        return await decoded_manifest(driver.uri, MANIFEST_KEY, data), data


async def current_attempt(driver: Driver) -> str | None:
    """Return the id of the current manifest's attempt, or None without a manifest.

    Verifies the checksum but does not decode the tables, which for a large state takes longer than
    fetching them. Raises DamagedError; UnsupportedFormatError, because a newer release's manifest
    must not be overwritten.
    """
    try:
        data = await _get_manifest(driver)
    except NotACheckpointError:
        return None
    with _location_added(driver.uri):
        return await offload(attempt_in, data)


async def is_current(driver: Driver, attempt: str) -> bool:
    """Return whether the current manifest is of this attempt, without decoding the tables."""
    data = await _get_manifest(driver)
    with _location_added(driver.uri):
        return await offload(attempt_in, data) == attempt


async def _get_manifest(driver: Driver) -> bytes:
    try:
        return await driver.get(MANIFEST_KEY)
    except NotFoundError as error:
        raise NotACheckpointError(
            "nothing is committed here",
            uri=driver.uri,
            key=MANIFEST_KEY,
            advice="Is the URI that of one checkpoint? `holdfast ls` lists them.",
        ) from error


async def decoded_manifest(uri: str, key: str, data: bytes) -> Manifest:
    """Decode and check the manifest ``key``. Raises DamagedError and UnsupportedFormatError."""
    with _location_added(uri, key):
        manifest = await offload(Manifest.decode, data)
        check_complete(manifest, "the manifest")
        return manifest


@contextmanager
def _location_added(uri: str, key: str = MANIFEST_KEY) -> Iterator[None]:
    try:
        yield
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri = uri
        error.key = key
        raise
