"""Corrupted bytes raise an error that names the place; they are never loaded as values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.bits import flip, image_in

import holdfast


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkpoint with several chunks: tensors x (40 MB) and y."""
    path = tmp_path_factory.mktemp("large") / "c"
    holdfast.save(
        path, {"x": torch.arange(10 << 20, dtype=torch.float32), "y": torch.arange(100_000)}
    )
    return path


@contextlib.contextmanager
def flipped(path: Path, *positions: int) -> Iterator[None]:
    """Flip bits at these positions of the image; restore it afterwards."""
    image = image_in(path)
    whole = image.read_bytes()
    for position in positions:
        flip(image, position)
    yield
    image.write_bytes(whole)


@pytest.mark.nightly(8)
@pytest.mark.parametrize(
    "position",
    [4096, 4096 + (16 << 20) - 4097, (16 << 20) + 70_000, (32 << 20) + 5, 4096 + (40 << 20) - 1],
)
def test_a_slice_is_verified_on_its_own(position: int, large: Path) -> None:
    """Only slices that touch the damaged block fail."""
    index = (position - 4096) // 4
    block = position // 65536 * 65536
    with flipped(large, position), holdfast.open(large) as c:
        with pytest.raises(holdfast.DamagedError, match="'x'"):
            c.read("x", index)
        for other in (block - 1, block + 65536):
            if 4096 <= other < 4096 + (40 << 20):
                assert c.read("x", (other - 4096) // 4).item() == (other - 4096) // 4
        report = c.verify()
        assert [(d.start, d.stop, d.tensors[0]) for d in report.damages] == [
            (block, block + 65536, "x")
        ]
        with pytest.raises(holdfast.DamagedError, match="'x'"):
            holdfast.load(large)


def test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data(large: Path) -> None:
    """Loads succeed, reads of slices are refused, and verify names the damaged checksums."""
    with flipped(large, -300), holdfast.open(large) as c:
        assert torch.equal(holdfast.load(large)["x"], torch.arange(10 << 20, dtype=torch.float32))
        with pytest.raises(holdfast.DamagedError, match="checksums"):
            c.read("x", slice(10_400_000, 10_400_001))
        assert ["checksums" in d.what for d in c.verify().damages] == [True]


def test_verify_reports_every_damage_and_progress(large: Path) -> None:
    """Verify reports all damage, and counts bytes."""
    seen: list[tuple[int, int]] = []
    positions = (5, 70_000, 70_001, (20 << 20) + 3, 33 << 20)
    with holdfast.open(large) as c:
        with flipped(large, *positions):
            report = c.verify(lambda done, total: seen.append((done, total)))
        assert c.verify().ok
    assert [d.start for d in report.damages] == [0, 65536, 20 << 20, 33 << 20]
    assert report.files == 1
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert report.nbytes > 40 << 20
