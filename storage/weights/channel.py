"""The folder of a weight channel.

    newest.json                 the head: the newest version, and all retained ones
    <sequence>/                 a version: a checkpoint, whole (an anchor) or stored as patches
    leases/<subscriber>.json    the version that a subscriber is reading

Versions are numbered without gaps. Each is a save that must not replace one, so of two publishers
only one publishes the next number. The head is a hint and may be stale: readers look for
the manifests of later versions.

A publisher withdraws versions in the head *before* it looks for leases. A subscriber puts its
lease *before* it reads the head again. So one of them sees the other, and no version is deleted
while it is being read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ...core.decoded_json import int_in, ints_in, object_in
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError, UnsupportedFormatError
from ..format.manifest import MANIFEST_KEY, PATCH, Manifest
from ..format.patches import CHANNEL_HEAD_KEY
from ..protocol.current import decoded_manifest

HEAD_KEY = CHANNEL_HEAD_KEY
LEASES_FOLDER = "leases"
PATCHES_TO_ANCHOR = 4
"""Distance between versions that have patches to their anchor too. A subscriber that starts with an
anchor never applies more patches than this."""
LEASE_S = 600.0
"""Lifetime of a lease, by the clock of the storage."""
LIST_LAG_S = 60.0
"""How long a listing of shared storage may lack an object that was put, as on NFS."""
_LOOK_S = 5.0
"""Interval of looks for a version whose publisher died before it changed the head."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a channel.

    ``sequence``: of the newest version, 0 for none; ``offered``: sequence of the oldest version
    that subscribers may begin to read; ``anchors`` and ``kept``: sequences of the anchors and of
    all versions that have not been deleted, ascending.
    """

    sequence: int = 0
    offered: int = 1
    anchors: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """Encode the head as JSON."""
        fields = {"sequence": self.sequence, "offered": self.offered}
        lists = {"anchors": self.anchors, "kept": self.kept}
        return json.dumps({"version": _VERSION, **fields, **lists}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Decode a head. Raises DamagedError and UnsupportedFormatError."""
        try:
            said = object_in(json.loads(data), "the head")
            version = int_in(said["version"], "version")
            sequence = int_in(said["sequence"], "sequence")
            offered = int_in(said["offered"], "offered")
            anchors = tuple(ints_in(said["anchors"], "anchors"))
            kept = tuple(ints_in(said["kept"], "kept"))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"the head of the weight channel cannot be read: {error}") from error
        if version != _VERSION:
            raise UnsupportedFormatError(f"the head of the weight channel has version {version}")
        return cls(sequence, offered, anchors, kept)

    def with_next(self, *, anchor: bool, keep: int) -> Head:
        """Return the head after one more version. It offers the newest ``keep`` versions, but none
        that was withdrawn before."""
        sequence = self.sequence + 1
        offered = max(self.offered, sequence - keep + 1)
        anchors = (*self.anchors, sequence) if anchor else self.anchors
        return Head(sequence, offered, anchors, (*self.kept, sequence))

    def without(self, deleted: Iterable[int]) -> Head:
        """Return the head after versions have been deleted."""
        gone = set(deleted)
        anchors = tuple(anchor for anchor in self.anchors if anchor not in gone)
        kept = tuple(sequence for sequence in self.kept if sequence not in gone)
        return Head(self.sequence, self.offered, anchors, kept)

    def unneeded(self, leased: Iterable[int]) -> list[int]:
        """Return the kept versions that neither an offered version nor a leased one needs."""
        read = {*(n for n in self.kept if n >= self.offered), *leased}
        needed: set[int] = set()
        for sequence in read:
            needed |= self._bases_of(sequence)
        return [sequence for sequence in self.kept if sequence not in needed]

    def _bases_of(self, sequence: int) -> set[int]:
        """Return the versions that a subscriber may need to build this one, with itself."""
        anchor = max((a for a in self.anchors if a <= sequence), default=0)
        first = max(anchor, sequence - PATCHES_TO_ANCHOR + 1)
        return {anchor, *range(first, sequence + 1)}


def version_key(sequence: int, key: str = "") -> str:
    """Return the key of a version's folder, or of an object in it."""
    return f"{sequence:08d}/{key}" if key else f"{sequence:08d}"


def is_immutable(key: str) -> bool:
    """Return whether an object of a channel never changes: an image, or its patches."""
    return key.endswith((".safetensors", f".{PATCH}")) and "/data/" in key


def lease_key(subscriber: str) -> str:
    """Return the key of a subscriber's lease."""
    return f"{LEASES_FOLDER}/{subscriber}.json"


async def read_head(driver: Driver) -> Head:
    """Return the head, empty if the channel has none yet. Raises DamagedError,
    UnsupportedFormatError and StorageError."""
    try:
        data = await driver.get(HEAD_KEY)
    except NotFoundError:
        return Head()
    return decoded_head(driver, data)


def decoded_head(driver: Driver, data: bytes) -> Head:
    """Decode the head. Raises DamagedError and UnsupportedFormatError."""
    try:
        return Head.decode(data)
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri = driver.uri
        error.key = HEAD_KEY
        raise


async def newest_after(driver: Driver, sequence: int) -> int:
    """Return the newest version, given one that exists, or 0."""
    while await has_version(driver, sequence + 1):
        sequence += 1
    return sequence


async def awaited(
    driver: Driver,
    is_newer: Callable[[int], Awaitable[bool]],
    timeout_s: float,
    on_look: Callable[[], None] = lambda: None,
) -> int:
    """Wait up to ``timeout_s`` until the newest version ``is_newer``; return it, or 0. Calls
    ``on_look`` before each wait."""
    until_s = time.monotonic() + timeout_s
    known = await driver.watch(HEAD_KEY, None, 0.0)
    while True:
        head = Head() if known is None else decoded_head(driver, known)
        newest = await newest_after(driver, head.sequence)
        if newest and await is_newer(newest):
            return newest
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return 0
        on_look()
        changed = await driver.watch(HEAD_KEY, known, min(_LOOK_S, left_s))
        known = changed or known


async def has_version(driver: Driver, sequence: int) -> bool:
    """Return whether a version is committed."""
    try:
        await driver.stat(version_key(sequence, MANIFEST_KEY))
    except NotFoundError:
        return False
    return True


async def read_version(driver: Driver, sequence: int) -> tuple[Manifest, bytes]:
    """Return the manifest of a version, and its bytes. Raises NotFoundError if it does not exist,
    DamagedError and UnsupportedFormatError."""
    key = version_key(sequence, MANIFEST_KEY)
    data = await driver.get(key)
    return await decoded_manifest(driver.uri, key, data), data


async def leased(driver: Driver, now_s: float, *, tidy: bool = False) -> list[int]:
    """Return the versions with a lease at ``now_s`` on the storage's clock, one for each lease.
    ``tidy``: delete old leases. A listing may show an earlier time of a lease, so it does not
    prove that one is old."""
    found: list[int] = []
    for info in [info async for info in driver.list(LEASES_FOLDER)]:
        age_s = now_s - info.modified_s
        if age_s > LEASE_S:
            with contextlib.suppress(NotFoundError):
                age_s = now_s - (await driver.stat(info.key)).modified_s
        if age_s <= LEASE_S:
            found += await _leased_by(driver, info.key)
        elif tidy and age_s > 2 * LEASE_S:
            await driver.delete(info.key)
    return found


async def _leased_by(driver: Driver, key: str) -> list[int]:
    try:
        said = object_in(json.loads(await driver.get(key)), "a lease")
        return [int_in(said["sequence"], "sequence")]
    except (NotFoundError, KeyError, TypeError, ValueError, RecursionError):
        return []  # it has just been released, or is none of ours


def encoded_lease(sequence: int) -> bytes:
    """Return the content of a lease of a version."""
    return json.dumps({"sequence": sequence}).encode()
