"""Compressed checkpoints: saves, reads, copies, and hostile input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from support.commands import run, run_json
from support.drivers import contents, storage_at
from support.forgery import forge
from support.ranks import BUDGET_NBYTES, as_ranks
from support.tiny import Tiny

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.format.packed import Compression, Index, index_nbytes
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.pipeline.mapping import image_driver
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.flattening.flatten import flatten

CHUNK_NBYTES = 16 << 20


def state(seed: int = 1) -> dict[str, Any]:
    """Return three chunks: one shrinks to nothing, one a little, and one not at all."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "random": torch.randn(CHUNK_NBYTES // 4, generator=generator),
        "zeros": torch.zeros(CHUNK_NBYTES // 4),
        "mixed": torch.randint(0, 2, (900_000,), generator=generator),
        "lr": 0.5,
        "one": torch.tensor(7),
    }


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """Return the saved state."""
    return state()


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, truth: dict[str, Any]) -> str:
    """Save a compressed checkpoint on disk; return its URI."""
    folder = str(tmp_path_factory.mktemp("packed") / "c")
    holdfast.save(folder, truth, compression="lz4", step=3)
    return folder


def image_in(uri: str) -> Path:
    """Return its only image."""
    (image,) = Path(uri).glob("data/*/0.safetensors.lz4")
    return image


def test_what_is_saved_comes_back(uri: str, truth: dict[str, Any]) -> None:
    """A compressed checkpoint is loaded, filled, sliced and verified."""
    assert difference(truth, holdfast.load(uri)) is None
    into = {
        name: torch.full_like(t, 3) if isinstance(t, torch.Tensor) else None
        for name, t in truth.items()
    }
    assert difference(truth, holdfast.load(uri, into=into)) is None
    with holdfast.open(uri) as c:
        for rows in (slice(0, 1), slice(16_380, 16_390), slice(899_999, 900_000)):
            assert torch.equal(c.read("mixed", rows=rows), truth["mixed"][rows])
        assert c.read_bytes("zeros", 5, 200_000) == bytes(199_995)
        assert c.verify().ok
        assert c.compression == "lz4"


@pytest.mark.parametrize("where", ["off", "on"])
@pytest.mark.parametrize("budget_nbytes", [None, 32 << 20])
def test_wherever_and_within_any_budget(
    where: str, budget_nbytes: int | None, truth: dict[str, Any], uri: str, tmp_path: Path
) -> None:
    """Saves past the page cache, with small budgets or lazy ones write the same bytes."""
    to = f"file://{tmp_path / 'c'}?direct={where}"
    handle = holdfast.async_save(
        to, truth, compression="lz4", budget_nbytes=budget_nbytes, lazy=budget_nbytes is None
    )
    handle.wait()
    assert difference(truth, holdfast.load(to, budget_nbytes=32 << 20)) is None
    assert handle.report is not None
    assert handle.report.stored_nbytes == image_in(uri).stat().st_size
    assert image_in(str(tmp_path / "c")).read_bytes() == image_in(uri).read_bytes()


def test_the_report_and_the_commands_tell_what_is_stored(uri: str, truth: dict[str, Any]) -> None:
    """The report and ``show`` give the stored size; a plain save writes format version 1."""
    to = fresh_uri()
    report = holdfast.save(to, truth, compression="lz4")
    stored_nbytes = image_in(uri).stat().st_size
    manifest_nbytes = (Path(uri) / MANIFEST_KEY).stat().st_size
    assert CHUNK_NBYTES < report.stored_nbytes == stored_nbytes < report.nbytes / 2
    plain = holdfast.save(to, truth)
    assert plain.nbytes == plain.stored_nbytes == report.nbytes

    shown = run_json("show", uri)
    assert (shown["format_version"], shown["compression"]) == (2, "lz4")
    assert shown["stored_nbytes"] == stored_nbytes + manifest_nbytes
    assert "version 2, lz4, attempt" in run("show", uri).stdout
    assert run_json("verify", uri)["ok"]
    assert run_json("show", to)["format_version"] == 1
    manifest = start(storage_at(to).get(MANIFEST_KEY)).result()
    assert b"compress" not in manifest
    assert b"stored_nbytes" not in manifest


@pytest.mark.parametrize("compression", ["zstd", True, ["lz4"]], ids=repr)
def test_an_unknown_compression_is_refused_before_anything_is_done(
    compression: Any, tmp_path: Path
) -> None:
    """Everything that saves refuses an unknown compression."""
    calls: list[Callable[[], Any]] = [
        lambda: holdfast.save(tmp_path / "c", {"w": torch.ones(3)}, compression=compression),
        lambda: holdfast.async_save(tmp_path / "c", {"w": torch.ones(3)}, compression=compression),
        lambda: holdfast.Checkpointer(tmp_path / "c", compression=compression),
    ]
    for call in calls:
        with pytest.raises(holdfast.UsageError, match="compression="):
            call()
    assert list(tmp_path.iterdir()) == []


def test_without_lz4_both_ways_say_how_to_get_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lz4, saves, loads and copies name the missing package. Everything else works."""
    for name in ("lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: holdfast.save(tmp_path / "c", {"w": torch.ones(3)}, compression="lz4"),
        lambda: holdfast.load(uri),
        lambda: holdfast.copy(uri, tmp_path / "d"),
    ):
        with pytest.raises(holdfast.UsageError, match="pip install lz4"):
            call()
    with holdfast.open(uri) as c:
        assert c.tensors["mixed"].shape == (900_000,)
    assert not (tmp_path / "c").exists()
    holdfast.save(tmp_path / "plain", {"w": torch.ones(3)})


def test_ranks_that_compress_differently_are_told_so() -> None:
    """Ranks that disagree on compression all raise UsageError, and nothing is committed."""
    storage = MemoryDriver()

    async def save(team: StoreTeam) -> Any:
        compression: Compression | None = "lz4" if team.rank else None
        job = SaveJob(flatten({"w": torch.ones(50)}), None, BUDGET_NBYTES, compression=compression)
        return await run_save(storage, team, job)

    for error in as_ranks(2, save):
        assert isinstance(error, holdfast.UsageError)
        assert "rank 1 saves with compression='lz4', rank 0 with None" in str(error)
    assert start(contents(storage)).result() == {}


def test_a_copy_has_the_same_bytes(
    uri: str, truth: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy does not compress again, and sends nothing twice."""
    to = tmp_path / "copy"

    def never(*_: Any, **__: Any) -> bytes:
        raise AssertionError("packed anew")

    monkeypatch.setattr(lz4.block, "compress", never)
    first, again = holdfast.copy(uri, to), holdfast.copy(uri, to, overwrite=True)
    assert first.sent_nbytes == first.nbytes == image_in(uri).stat().st_size
    assert (again.sent_nbytes, again.nbytes) == (0, first.nbytes)
    assert image_in(str(to)).read_bytes() == image_in(uri).read_bytes()
    assert difference(truth, holdfast.load(to)) is None


def test_an_unknown_version_or_compression_is_not_guessed() -> None:
    """A later version or compression is unsupported; a missing field of version 2 is damage."""
    for alter, kind in (
        (lambda c, h: h.update(compression="zstd"), holdfast.UnsupportedFormatError),
        (lambda c, h: h.update(compression=None), holdfast.UnsupportedFormatError),
        (lambda c, h: h.pop("compression"), holdfast.DamagedError),
        (lambda c, h: c.pop("image.stored_nbytes"), holdfast.DamagedError),
    ):
        to = fresh_uri()
        holdfast.save(to, {"w": torch.zeros(5000)}, compression="lz4")
        forge(to, alter)
        with pytest.raises(kind):
            holdfast.open(to)


class Forged:
    """A compressed checkpoint whose first image gets a forged index with a valid checksum."""

    def __init__(self) -> None:
        self.tiny = Tiny(fresh_uri().removeprefix("memory://"), "lz4")
        self.key, m = min(key for key in self.tiny.files if key != MANIFEST_KEY), self.tiny.manifest
        geometry = (int(m.images.hashed_nbytes[0]), m.chunk_nbytes, m.block_nbytes)
        self.file = self.tiny.files[self.key]
        self.cut = len(self.file) - index_nbytes(*geometry)
        self.index = Index.decode(self.file[self.cut :], *geometry)
        self.sizes = self.index.sizes.copy()

    def check(self, data: bytes, says: str, **changes: Any) -> None:
        """Put the data, followed by the changed index. A load must say what is wrong."""
        index = replace(self.index, sizes=self.sizes, **changes)
        self.tiny.put(self.key, data + index.encode())
        with pytest.raises(holdfast.DamagedError, match=says) as caught:
            holdfast.load(self.tiny.uri)
        assert caught.value.key == self.key


Rewrite = Callable[[np.ndarray], None]


def set_to(value: int) -> Rewrite:
    """Set the size of the last block."""

    def rewrite(sizes: np.ndarray) -> None:
        sizes[-1] = value

    return rewrite


def move(nbytes: int) -> Rewrite:
    """Let the second block take bytes from the first, or give it some."""

    def rewrite(sizes: np.ndarray) -> None:
        sizes[:2] += np.array([nbytes, -nbytes])

    return rewrite


@pytest.mark.parametrize(
    ("rewrite", "says"),
    [
        (set_to(0), "impossible size"),
        (set_to(4097), "impossible size"),
        (set_to(4096), "not what was written"),  # random bytes, as they are
        (lambda sizes: sizes.__setitem__(slice(None), 1), "add up to those of the file"),
        (move(1), "cannot be unpacked"),
        (move(-1), "impossible size"),
    ],
)
def test_an_index_that_lies_is_refused(rewrite: Rewrite, says: str) -> None:
    """Impossible or inconsistent sizes in an index with a valid checksum are damage."""
    forged = Forged()
    rewrite(forged.sizes)
    forged.check(forged.file[: forged.cut], says)
    with holdfast.open(forged.tiny.uri) as c:
        assert not c.verify().ok


@pytest.mark.parametrize("nbytes", [0, 4095, 4097, 900_000])
def test_a_block_of_another_size_is_refused(nbytes: int) -> None:
    """A block that unpacks to another size is damage, even with valid checksums."""
    forged = Forged()
    bomb = lz4.block.compress(bytes(nbytes), store_size=False)
    chunk, start, stop = bomb.ljust(4096, b"\0"), *forged.index.chunk_start[-2:].tolist()
    assert len(chunk) == stop - start == 4096
    digests = forged.index.digests.copy()
    forged.sizes[-1], digests[-1] = len(bomb), np.frombuffer(digest(chunk), np.uint8)
    data = forged.file[:start] + chunk + forged.file[stop : forged.cut]
    forged.check(data, "cannot be unpacked", digests=digests)


def test_what_hands_over_what_it_reads_counts_twice() -> None:
    """A read of a compressed image holds it twice in memory: as stored, and unpacked."""
    storage = MemoryDriver()
    tiny = Tiny("packed-traits", "lz4")
    storage.traits = replace(storage.traits, hands_over=True)
    traits = image_driver(storage, tiny.manifest).traits
    assert (traits.hands_over, traits.read_copies) == (False, 2)
    assert image_driver(MemoryDriver(), tiny.manifest).traits == MemoryDriver().traits
    assert image_driver(storage, replace(tiny.manifest, compression=None)) is storage
