"""Corrupted bytes raise an error that names the place; they are never loaded as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkpoint with several chunks: tensors x (40 MB) and y."""
    path = tmp_path_factory.mktemp("large") / "c"
    holdfast.save(
        path, {"x": torch.arange(10 << 20, dtype=torch.float32), "y": torch.arange(100_000)}
    )
    return path


def changed(path: Path, alter: Callable[[bytearray], None]) -> Callable[[], None]:
    """Alter an image in place; return a function that restores it."""
    (image,) = path.rglob("0.safetensors")
    whole = image.read_bytes()
    data = bytearray(whole)
    alter(data)
    image.write_bytes(data)
    return lambda: image.write_bytes(whole) and None


@pytest.mark.nightly(8)
@pytest.mark.parametrize(
    "position",
    [4096, 4096 + (16 << 20) - 4097, (16 << 20) + 70_000, (32 << 20) + 5, 4096 + (40 << 20) - 1],
)
def test_a_slice_is_verified_on_its_own(
    position: int, large: Path, rng: np.random.Generator
) -> None:
    """Only slices that touch the damaged block fail."""

    def damage(data: bytearray) -> None:
        data[position] ^= 0x10

    undo = changed(large, damage)
    try:
        index = (position - 4096) // 4
        with holdfast.open(large) as c:
            with pytest.raises(holdfast.DamagedError, match="'x'"):
                c.read("x", index)
            block = position // 65536 * 65536
            for other in (block - 1, block + 65536):
                if 4096 <= other < 4096 + (40 << 20):
                    assert c.read("x", (other - 4096) // 4).item() == (other - 4096) // 4
            report = c.verify()
            assert [(d.start, d.stop, d.tensors[0]) for d in report.damages] == [
                (block, block + 65536, "x")
            ]
        with pytest.raises(holdfast.DamagedError, match="'x'"):
            holdfast.load(large)
    finally:
        undo()


def test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data(large: Path) -> None:
    """Damaged checksums are not taken for damaged data.

    Loads succeed, reads of slices are refused, and verify names the damage.
    """

    def damage(data: bytearray) -> None:
        data[-300] ^= 1

    undo = changed(large, damage)
    try:
        assert torch.equal(holdfast.load(large)["x"], torch.arange(10 << 20, dtype=torch.float32))
        with holdfast.open(large) as c:
            with pytest.raises(holdfast.DamagedError, match="checksums"):
                c.read("x", slice(10_400_000, 10_400_001))
            assert ["checksums" in d.what for d in c.verify().damages] == [True]
    finally:
        undo()


def test_verify_reports_every_damage_and_progress(large: Path) -> None:
    """Verify reports all damage, and counts bytes."""

    def damage(data: bytearray) -> None:
        for position in (5, 70_000, 70_001, (20 << 20) + 3, (33 << 20)):
            data[position] ^= 0xFF

    undo = changed(large, damage)
    seen: list[tuple[int, int]] = []
    try:
        with holdfast.open(large) as c:
            report = c.verify(lambda done, total: seen.append((done, total)))
    finally:
        undo()
    assert [d.start for d in report.damages] == [0, 65536, 20 << 20, 33 << 20]
    assert report.files == 1
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert report.nbytes > 40 << 20
    with holdfast.open(large) as c:
        assert c.verify().ok
