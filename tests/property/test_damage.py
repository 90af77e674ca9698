"""Damage anywhere in a checkpoint, for every reader. HOLDFAST_TEST_DAMAGE=all tries every byte."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from support.lending import TinyBorrowed
from support.tiny import BLOCK_NBYTES, READERS, Damaged, Tiny, tiny

import holdfast
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.format.packed import Compression

PART = os.environ.get("HOLDFAST_TEST_DAMAGE", "")
ALL = PART != ""
FIRST, LAST = (0, None) if PART in ("", "all") else map(int, PART.split("-"))
FLIPS, CUTS = 250, 60
PACKED_FLIPS, PACKED_CUTS = 60, 20
_names = itertools.count()

pytestmark = pytest.mark.timeout(7200 if ALL else 120)


def undamaged(compression: Compression | None = None) -> Tiny:
    """Make a checkpoint, and check that every reader gets the saved values."""
    made = Tiny(f"tiny-{next(_names)}", compression)
    for reader in READERS.values():
        reader(made.uri)
    made.verify()
    return made


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    """Return a checkpoint without damage."""
    return undamaged()


@pytest.fixture(scope="module")
def compressed() -> Tiny:
    """Return a checkpoint with compressed images."""
    made = undamaged("lz4")
    assert all(key.endswith(".safetensors.lz4") for key in images(made))
    return made


def sampled(
    rng: np.random.Generator, what: list[tuple[str, int]], count: int
) -> Iterator[tuple[str, int]]:
    """Yield all places, those of a part, or a sample."""
    rows = (
        range(len(what))[FIRST:LAST]
        if ALL
        else sorted(rng.choice(len(what), min(count, len(what)), replace=False).tolist())
    )
    return (what[row] for row in rows)


def readers(turn: int) -> Iterable[str]:
    """Return all readers, or one in turn."""
    return READERS if ALL else [list(READERS)[turn % len(READERS)]]


def images(checkpoint: Tiny) -> list[str]:
    """Return the keys of its images."""
    return [key for key in checkpoint.files if key != MANIFEST_KEY]


def places(checkpoint: Tiny, keys: Iterable[str]) -> list[tuple[str, int]]:
    """Return every byte of these files."""
    return [(key, at) for key in keys for at in range(len(checkpoint.files[key]))]


def changed(whole: bytes, start: int, data: bytes) -> bytes:
    """Return ``whole`` with other bytes from ``start`` on."""
    return whole[:start] + data + whole[start + len(data) :]


def flipped(checkpoint: Tiny, key: str, position: int, turn: int) -> Damaged:
    """Flip one bit or all bits of a byte, or zero it, in turn."""
    whole = checkpoint.files[key]
    pattern = (1 << turn % 8, 0xFF, whole[position] or 0x80)[turn // 8 % 3]
    data = changed(whole, position, bytes([whole[position] ^ pattern]))
    return Damaged(key, data, position, position + 1)


def region(checkpoint: Tiny, key: str, position: int) -> str:
    """Return the region of an image to which a byte belongs."""
    m, image = checkpoint.manifest, sorted(checkpoint.files).index(key)
    begin = m.shards.start
    end = begin + m.shards.nbytes(m.tensors)
    if position >= int(m.images.hashed_nbytes[image]):
        return "digests"
    if ((m.shards.image == image) & (begin <= position) & (position < end)).any():
        return "tensors"
    return "header" if position < BLOCK_NBYTES else "padding"


def test_a_flipped_byte_is_refused_or_changes_nothing(
    checkpoint: Tiny, rng: np.random.Generator
) -> None:
    """Readers refuse every flip in bytes they need; ``verify`` finds all."""
    everywhere = places(checkpoint, checkpoint.files)
    seen: Counter[tuple[str, str]] = Counter()
    last = [
        (key, len(data) - 1 - 5 * i) for key, data in checkpoint.files.items() for i in range(8)
    ]
    for turn, (key, position) in enumerate([*last, *sampled(rng, everywhere, FLIPS)]):
        damage = flipped(checkpoint, key, position, turn)
        for reader in readers(turn):
            outcome = checkpoint.judge(reader, damage)
            where = "manifest" if key == MANIFEST_KEY else region(checkpoint, key, position)
            seen[where, outcome] += 1
            if (
                where == "manifest"
                or (reader == "copy" and where != "digests")
                or (reader[:4] == "load" and where == "tensors")
            ):
                assert outcome == "refused", (key, position, reader)
        checkpoint.verify(damage)
    assert seen["tensors", "refused"]
    assert seen["digests", "unnoticed"]


def test_a_file_cut_short_or_grown_is_refused_or_changes_nothing(
    checkpoint: Tiny, rng: np.random.Generator
) -> None:
    """This holds at every length, and with additional bytes at the end."""
    everywhere = places(checkpoint, checkpoint.files)
    edges = [
        (key, length)
        for key, length in everywhere
        if length % BLOCK_NBYTES in (0, 1, BLOCK_NBYTES - 1)
    ]
    for turn, (key, length) in enumerate([*edges, *sampled(rng, everywhere, CUTS)]):
        whole = checkpoint.files[key]
        cut = Damaged(key, whole[:length], length, len(whole))
        for reader in readers(turn):
            outcome = checkpoint.judge(reader, cut)
            assert outcome == "refused" or key != MANIFEST_KEY
        if turn % 4 == 0 or ALL:
            checkpoint.verify(cut)
    for key, reader in itertools.product(checkpoint.files, READERS):
        whole = checkpoint.files[key]
        for more in (b"\0", b"x" * 5000, whole):
            grown = Damaged(key, whole + more, len(whole), len(whole) + len(more))
            assert checkpoint.judge(reader, grown) == (
                "refused" if key == MANIFEST_KEY else "unnoticed"
            )
            checkpoint.verify(grown)


@pytest.mark.nightly(5)
@pytest.mark.parametrize("reader", READERS)
def test_pages_that_are_not_theirs_are_refused(checkpoint: Tiny, reader: str) -> None:
    """Zeroed, filled, torn and misplaced pages are refused."""
    for key, sector in itertools.product(checkpoint.files, (512, BLOCK_NBYTES)):
        whole = checkpoint.files[key]
        for position in range(
            0, len(whole), sector if ALL or sector == BLOCK_NBYTES else 3 * sector
        ):
            page = whole[position : position + sector]
            astray = (whole[:sector] if position else whole[-sector:])[: len(page)]
            for other in (bytes(len(page)), b"\xff" * len(page), astray):
                if other == page:
                    continue
                first = next(i for i, (a, b) in enumerate(zip(page, other, strict=True)) if a != b)
                last = next(i for i in range(len(page), 0, -1) if page[i - 1] != other[i - 1])
                damage = Damaged(
                    key, changed(whole, position, other), position + first, position + last
                )
                outcome = checkpoint.judge(reader, damage)
                if key == MANIFEST_KEY or (
                    reader[:4] == "load" and BLOCK_NBYTES <= position < len(whole) - BLOCK_NBYTES
                ):
                    assert outcome == "refused", (key, position)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_files_in_the_wrong_place_are_refused(
    compression: Any, reader: str, request: pytest.FixtureRequest
) -> None:
    """Files are missing, empty, or of another rank, attempt or checkpoint: all, or one."""
    checkpoint: Tiny = request.getfixturevalue("compressed" if compression else "checkpoint")
    a, b = images(checkpoint)
    files = checkpoint.files
    others = tiny(f"tiny-{next(_names)}", step=1, compression=compression)
    theirs = sorted(key for key in others if key != MANIFEST_KEY)

    def placed(key: str, data: bytes | None) -> Damaged:
        return Damaged(key, data, 0, 1 << 40)

    for key in files:
        assert checkpoint.judge(reader, placed(key, None)) == "refused"
        assert checkpoint.judge(reader, placed(key, b"")) == "refused"
    for damages in (
        [placed(a, files[b])], [placed(b, files[a])], [placed(a, files[b]), placed(b, files[a])],
        [placed(a, others[theirs[0]])], [placed(a, others[theirs[0]]), placed(b, others[theirs[1]])],
        [placed(a, files[MANIFEST_KEY])], [placed(MANIFEST_KEY, files[a])],
    ):  # fmt: skip
        assert checkpoint.judge(reader, *damages) == "refused"
    # A manifest of another checkpoint names images that are not here.
    checkpoint.put(MANIFEST_KEY, others[MANIFEST_KEY])
    try:
        with pytest.raises(holdfast.DamagedError, match="lost with their whole file") as caught:
            READERS[reader](checkpoint.uri)
        assert caught.value.key in theirs
    finally:
        checkpoint.put(MANIFEST_KEY, files[MANIFEST_KEY])


def test_a_flipped_byte_of_a_compressed_image_is_refused_or_changes_nothing(
    compressed: Tiny, rng: np.random.Generator
) -> None:
    """Compressed images behave like plain ones. ``verify`` also finds flips that unpack to the same
    bytes."""
    everywhere = places(compressed, images(compressed))
    index = [
        (key, position)
        for key, position in everywhere
        if position >= len(compressed.files[key]) - 100
    ]
    seen: Counter[str] = Counter()
    for turn, (key, position) in enumerate(
        [*index[:: 1 if ALL else 5], *sampled(rng, everywhere, PACKED_FLIPS)]
    ):
        damage = flipped(compressed, key, position, turn)
        for reader in readers(turn):
            outcome = compressed.judge(reader, damage)
            seen[outcome] += 1
            assert (
                outcome == "refused"
                or reader != "copy"
                or compressed.unpacked(damage).start >= compressed.hashed
            )
        compressed.verify(damage)
    assert seen["refused"]


def test_a_compressed_image_cut_short_is_refused(
    compressed: Tiny, rng: np.random.Generator
) -> None:
    """A truncated image has lost its index; ``verify`` finds appended bytes."""
    everywhere = places(compressed, images(compressed))
    for turn, (key, length) in enumerate(sampled(rng, everywhere, PACKED_CUTS)):
        whole = compressed.files[key]
        cut = Damaged(key, whole[:length], length, len(whole))
        for reader in readers(turn):
            compressed.judge(reader, cut)
        assert compressed.judge("load", cut) == "refused" or key == images(compressed)[1]
        compressed.verify(cut)
    for key in images(compressed):
        whole = compressed.files[key]
        grown = Damaged(key, whole + b"more", len(whole), len(whole) + 4)
        assert compressed.judge("load", grown) == "unnoticed"
        compressed.verify(grown)


def test_damage_in_files_that_images_share_is_refused_or_changes_nothing(
    rng: np.random.Generator,
) -> None:
    """Files are flipped, cut, lost and exchanged. ``verify`` finds every flip in a used byte."""
    shared = TinyBorrowed(f"tiny-{next(_names)}")
    assert shared.manifest.version == 3
    for reader in READERS.values():
        reader(shared.uri)
    shared.verify()
    keys = images(shared)
    assert len(keys) >= 3
    seen: Counter[str] = Counter()
    for turn, (key, position) in enumerate(sampled(rng, places(shared, keys), PACKED_FLIPS)):
        damage = flipped(shared, key, position, turn)
        for reader in readers(turn):
            seen[shared.judge(reader, damage)] += 1
        if shared.uses(damage):
            shared.verify(damage)
        cut = Damaged(key, shared.files[key][:position], position, len(shared.files[key]))
        shared.judge(list(READERS)[turn % len(READERS)], cut)
        shared.verify(cut)
    assert seen["refused"]
    for key, reader in itertools.product(keys, READERS):
        lost = Damaged(key, None, 0, len(shared.files[key]))
        shared.judge(reader, lost)
        shared.judge(reader, Damaged(key, shared.files[keys[keys.index(key) - 1]], 0, 1 << 40))
        assert shared.judge("copy", lost) == "refused"
    shared.verify(*(Damaged(key, None, 0, len(shared.files[key])) for key in keys))
