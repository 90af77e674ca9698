"""Bytes that are not what was written are an error that says where, and never a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drivers import contents
from support.ranks import load_as_ranks, save_as_ranks
from support.simulation.turns import BUDGET_NBYTES, run_inline, save_of

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.pipeline.verifier import VerifyReport, verify_images
from holdfast.storage.protocol.current import read_manifest

STATE = {
    "w": torch.arange(40.0).reshape(5, 8),
    "b": torch.arange(7, dtype=torch.int16).flip(0),
    "lr": 0.25,
    "deep": [{"t": torch.tensor(3)}],
}


async def load(storage: MemoryDriver) -> Any:
    """What a reader gets."""
    return (await run_build(storage, 0, BUDGET_NBYTES))[0]


async def verify(storage: MemoryDriver) -> VerifyReport:
    """What ``Checkpoint.verify`` finds."""
    manifest, _ = await read_manifest(storage)
    return await verify_images(storage, manifest, BUDGET_NBYTES, lambda done, total: None)


@pytest.fixture
def storage() -> MemoryDriver:
    """A small checkpoint."""
    made = MemoryDriver()
    run_inline(save_of(STATE)(made))
    return made


def image_of(storage: MemoryDriver) -> str:
    """The key of its image."""
    return next(key for key in run_inline(contents(storage)) if key.endswith("0.safetensors"))


def flipped(data: bytes, position: int, bit: int) -> bytes:
    """``data`` with one bit changed."""
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def test_an_image_that_is_gone_is_damage(storage: MemoryDriver) -> None:
    """The error names it, and what was in it."""

    async def run() -> None:
        key = next(key for key in await contents(storage) if key.endswith("0.safetensors"))
        await storage.delete(key)
        with pytest.raises(holdfast.DamagedError, match="'w'") as caught:
            await load(storage)
        assert caught.value.key == key
        (damage,) = (await verify(storage)).damages
        assert (damage.key, damage.what, set(damage.tensors)) == (
            key,
            "the file is missing",
            {"w", "b", "deep.0.t"},
        )

    run_inline(run())


def test_an_image_of_another_attempt_is_damage(storage: MemoryDriver) -> None:
    """The same job, a step earlier: names, shapes and sizes are the same, the bytes are not."""

    async def run() -> None:
        key = next(key for key in await contents(storage) if key.endswith("0.safetensors"))
        before = await storage.get(key)
        await save_of(STATE | {"w": STATE["w"] + 1})(storage)
        key = next(key for key in await contents(storage) if key.endswith("0.safetensors"))
        assert len(before) == len(await storage.get(key))
        await storage.put(key, before)
        with pytest.raises(holdfast.DamagedError):
            await load(storage)
        assert not (await verify(storage)).ok

    run_inline(run())


def test_two_images_that_changed_places_are_damage() -> None:
    """Files of the same size under each other's name."""
    storage = MemoryDriver()
    save_as_ranks(storage, [{"own": torch.full((100,), float(rank))} for rank in range(2)])
    loaded = load_as_ranks(storage, [{"own": torch.zeros(100)} for _ in range(2)])
    assert [state["own"][0].item() for state in loaded] == [0, 1]

    async def run() -> None:
        a, b = sorted(
            key for key in await contents(storage) if key.endswith(".safetensors") and "data" in key
        )
        first, second = await storage.get(a), await storage.get(b)
        await storage.put(a, second)
        await storage.put(b, first)
        with pytest.raises(holdfast.DamagedError):
            await load(storage)
        assert {d.key for d in (await verify(storage)).damages} == {a, b}

    run_inline(run())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several chunks: tensors x (40 MB) and y."""
    path = tmp_path_factory.mktemp("large") / "c"
    holdfast.save(
        path, {"x": torch.arange(10 << 20, dtype=torch.float32), "y": torch.arange(100_000)}
    )
    return path


def changed(path: Path, alter: Callable[[bytearray], None]) -> Callable[[], None]:
    """Alter an image in place; return what undoes it."""
    (image,) = path.rglob("0.safetensors")
    whole = image.read_bytes()
    data = bytearray(whole)
    alter(data)
    image.write_bytes(data)
    return lambda: image.write_bytes(whole) and None


@pytest.mark.parametrize(
    "position",
    [4096, 4096 + (16 << 20) - 4097, (16 << 20) + 70_000, (32 << 20) + 5, 4096 + (40 << 20) - 1],
)
def test_a_slice_is_verified_on_its_own(
    position: int, large: Path, rng: np.random.Generator
) -> None:
    """A read that touches the damaged block raises and names its bytes."""

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
    """Whole chunks are checked against the manifest alone, so a load succeeds."""

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
    """Not only the first; bytes are counted."""

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


def test_no_flipped_byte_reaches_a_target(storage: MemoryDriver) -> None:
    """A load that raises has not put a damaged byte into the caller's tensors."""
    key = image_of(storage)

    async def run() -> None:
        await storage.put(key, flipped(await storage.get(key), 4100, 3))

    run_inline(run())
    into = {
        "w": torch.full((5, 8), -1.0),
        "b": torch.full((7,), -1, dtype=torch.int16),
        "lr": 0.0,
        "deep": [{"t": torch.tensor(-1)}],
    }
    with pytest.raises(holdfast.DamagedError):
        load_as_ranks(storage, [into])
    assert (into["w"] == -1).all()
    assert into["lr"] == 0.0
