"""A checkpoint of two ranks in a few kilobytes, with many chunks, and judges of all its readers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import ImageLayout
from holdfast.storage.format.digest import digest, page_of
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.format.packed import Compression, Index, index_nbytes
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.integrations.fsspec import HoldfastFileSystem
from holdfast.storage.pipeline.image_writer import Packing
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime.engine import start

from .bits import difference, raw
from .drivers import contents
from .ranks import save_as_ranks

CHUNK_NBYTES, BLOCK_NBYTES = 8192, 4096
_SAID = re.compile(r"bytes ([\d,]+) to ([\d,]+)")
_copies = itertools.count()


def state_of(rank: int, step: int = 0) -> dict[str, Any]:
    """What a rank saves: shared and own tensors, of several types and shapes, and values."""
    w = torch.arange(16 * 200, dtype=torch.float32).reshape(16, 200) + 1000 * step
    return {
        "w": w,
        "tied": w,
        "own": torch.full((300,), float(rank + 10 * step)),
        "deep": [{"b": torch.arange(7, dtype=torch.int16).flip(0)}, torch.tensor(True)],
        "none": torch.empty(0, 3),
        "lr": 0.25 + step,
    }


def tiny(name: str, step: int = 0, compression: Compression | None = None) -> dict[str, bytes]:
    """The files of a new checkpoint of two ranks, at ``memory://name``."""
    driver = MemoryDriver(name)
    save_as_ranks(driver, [state_of(rank, step) for rank in range(2)])
    manifest, _ = start(read_manifest(driver)).result()
    files = {MANIFEST_KEY: rechunked(driver, manifest)}
    if compression is not None:
        files = {MANIFEST_KEY: compressed(driver, Manifest.decode(files[MANIFEST_KEY]))}
    start(driver.put(MANIFEST_KEY, files[MANIFEST_KEY])).result()
    images = start(contents(driver)).result().items()
    return files | {key: data for key, data in images if key.endswith(("ors", ".lz4"))}


def compressed(driver: MemoryDriver, m: Manifest) -> bytes:
    """Pack the images; return the manifest that says so."""
    sizes = []
    packed = replace(m, compression="lz4")
    for image, hashed in enumerate(m.images.hashed_nbytes.tolist()):
        data, none = (
            bytearray(start(driver.get(m.image_key(image))).result()),
            np.empty(0, np.int64),
        )
        layout = ImageLayout(
            b"", none, none, hashed, hashed, len(data), m.chunk_nbytes, m.block_nbytes
        )
        packing, stored = Packing(layout), b""
        for chunk in range(layout.chunks):
            view = memoryview(data)[slice(*layout.chunk_range(chunk))]
            packing.pack(chunk, view)
            stored += view[: packing.place(chunk)[1]]
        stored += data[hashed:] + packing.index()
        sizes.append(len(stored))
        start(driver.put(packed.image_key(image), stored)).result()
        start(driver.delete(m.image_key(image))).result()
    return replace(packed, images=replace(m.images, stored_nbytes=np.array(sizes))).encode()


def rechunked(driver: Driver, m: Manifest) -> bytes:
    """Cut the images into small chunks; return the manifest that says so."""
    digests = []
    for image, hashed in enumerate(m.images.hashed_nbytes.tolist()):
        key = m.image_key(image)
        data = start(driver.get(key)).result()[:hashed]
        pages = [
            page_of(memoryview(data)[a : a + CHUNK_NBYTES], BLOCK_NBYTES)
            for a in range(0, hashed, CHUNK_NBYTES)
        ]
        digests += map(digest, pages)
        start(driver.put(key, data + b"".join(pages))).result()
    column = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
    images = ImageTable(m.images.rank, m.images.hashed_nbytes, column)
    return replace(m, images=images, chunk_nbytes=CHUNK_NBYTES, block_nbytes=BLOCK_NBYTES).encode()


def load(uri: str) -> None:
    """The whole state, built anew."""
    assert difference(state_of(0), holdfast.load(uri)) is None


def load_into(uri: str) -> None:
    """Load the whole state into the caller's tensors, which get no damaged byte even on errors."""
    truth = state_of(0)
    into = state_of(0, step=7) | {"own": torch.full((300,), -1.0)}
    into["w"], into["tied"] = into["w"].clone(), into["tied"].clone()
    before = {name: into[name].clone() for name in ("w", "tied", "own")}
    try:
        holdfast.load(uri, into=into)
    finally:
        for name, old in before.items():
            assert torch.all((into[name] == truth[name]) | (into[name] == old)), (
                f"{name} has bytes that were never saved"
            )
    assert difference(truth, into) is None


def rows(uri: str) -> None:
    """Slices: rows, columns, one element, every rank's own."""
    truth = state_of(0)["w"]
    with holdfast.open(uri) as c:
        for index in ((slice(3, 5),), (slice(None), slice(7, 9)), (15, 199)):
            assert torch.equal(c.read("w", index), truth[index])
        assert torch.equal(c.read("tied", rows=slice(0, 1)), truth[:1])
        assert [c.read("own", 5, rank=rank).item() for rank in range(2)] == [0, 1]
        assert list(c.values()) == [('state["lr"]', 0.25)]


def byte_ranges(uri: str) -> None:
    """Ranges of bytes, without torch."""
    truth = raw(state_of(0)["w"])
    with holdfast.open(uri) as c:
        for a, b in ((0, 10), (5000, 9001), (len(truth) - 3, len(truth))):
            assert c.read_bytes("w", a, b) == truth[a:b]
        assert c.read_bytes("deep.0.b") == raw(state_of(0)["deep"][0]["b"])


def files(uri: str) -> None:
    """The files that fsspec shows, but for the images, of which it says that they are not verified."""
    view = HoldfastFileSystem(uri)
    w = raw(state_of(0)["w"])
    assert view.cat_file("w.npy")[-len(w) :] == w
    assert view.cat_file("w.safetensors")[-len(w) :] == w
    assert view.cat_file("own@1.npy")[-4:] == np.float32(1).tobytes()


def copied(uri: str) -> None:
    """A copy; where it is made it is whole, and where it fails nothing is there."""
    target = f"memory://tiny-copy-{next(_copies)}"
    try:
        holdfast.copy(uri, target)
    except holdfast.HoldfastError:
        assert holdfast.list_checkpoints(target) == []
        raise
    load(target)
    with holdfast.open(target) as c:
        assert c.verify().ok


READERS: Mapping[str, Callable[[str], None]] = {
    "load": load,
    "load into": load_into,
    "rows": rows,
    "bytes": byte_ranges,
    "files": files,
    "copy": copied,
}


@dataclass(frozen=True, slots=True)
class Damaged:
    """Bytes [start, stop) of a file are not what was saved but ``data``; None: the file is gone."""

    key: str
    data: bytes | None
    start: int
    stop: int


class Tiny:
    """A checkpoint that can be damaged and mended."""

    def __init__(
        self,
        name: str,
        compression: Compression | None = None,
        files: dict[str, bytes] | None = None,
    ) -> None:
        """``files`` are there already; None: those of a new checkpoint."""
        self.uri, self._driver = f"memory://{name}", MemoryDriver(name)
        self.files = files or tiny(name, compression=compression)
        self.manifest, _ = start(read_manifest(self._driver)).result()

    @property
    def hashed(self) -> int:
        """How far digests reach into each image, at least."""
        return int(self.manifest.images.hashed_nbytes.min())

    def put(self, key: str, data: bytes | None) -> None:
        """What is there from now on."""
        start(self._driver.delete(key) if data is None else self._driver.put(key, data)).result()

    def judge(self, reader: str, *damages: Damaged) -> str:
        """Read with damage: return "refused" for a located error, or "unnoticed" for the saved values."""
        for d in damages:
            self.put(d.key, d.data)
        try:
            READERS[reader](self.uri)
        except holdfast.CheckpointError as error:
            assert isinstance(error, holdfast.DamagedError | holdfast.NotACheckpointError), error
            if not _has_no_manifest(error, damages):
                assert any(self._names(error, d) for d in damages), (
                    error,
                    damages[0].key,
                    damages[0].start,
                )
            return "refused"
        finally:
            for d in damages:
                self.put(d.key, self.files[d.key])
        return "unnoticed"

    def _names(self, error: holdfast.CheckpointError, d: Damaged) -> bool:
        """Whether the error says which file it is, which bytes, and whose."""
        if error.key != d.key or d.key == MANIFEST_KEY:
            return error.key == d.key
        said = _SAID.search(error.message)
        assert said is not None
        start, stop = (int(number.replace(",", "")) for number in said.groups())
        m, image = self.manifest, sorted(self.files).index(d.key)
        if m.compression is not None:
            d = self.unpacked(d)
        begin = m.shards.start
        mine = (
            (m.shards.image == image)
            & (begin < stop)
            & (begin + m.shards.nbytes(m.tensors) > start)
        )
        names = {m.tensors.names[t] for t in m.shards.tensor[mine].tolist()}
        return (
            start < d.stop and d.start < stop and all(repr(name) in error.message for name in names)
        )

    def unpacked(self, d: Damaged) -> Damaged:
        """Return the damage to a compressed file as bytes of the image."""
        m, image, file = self.manifest, sorted(self.files).index(d.key), self.files[d.key]
        geometry = (int(m.images.hashed_nbytes[image]), m.chunk_nbytes, m.block_nbytes)
        index_at = len(file) - index_nbytes(*geometry)
        starts = Index.decode(file[index_at:], *geometry).chunk_start
        if d.stop > index_at:
            return replace(d, start=0, stop=int(m.images.nbytes(m.block_nbytes)[image]))
        if d.start >= starts[-1]:
            return replace(
                d,
                start=geometry[0] + d.start - int(starts[-1]),
                stop=geometry[0] + d.stop - int(starts[-1]),
            )
        first, last = (
            int(np.searchsorted(starts, at, "right")) - 1 for at in (d.start, d.stop - 1)
        )
        return replace(
            d, start=first * m.chunk_nbytes, stop=min((last + 1) * m.chunk_nbytes, geometry[0])
        )

    def verify(self, *damages: Damaged) -> None:
        """``verify`` finds each of these, and says where; or the manifest is refused."""
        for d in damages:
            self.put(d.key, d.data)
        try:
            with holdfast.open(self.uri) as c:
                found = c.verify().damages
            for d in damages:
                at = (
                    d
                    if d.key == MANIFEST_KEY or self.manifest.compression is None
                    else self.unpacked(d)
                )
                assert any(
                    f.key == d.key and f.start < at.stop and at.start < f.stop for f in found
                ), (found, d.start)
        except holdfast.CheckpointError as error:
            assert error.key == MANIFEST_KEY
            assert MANIFEST_KEY in {d.key for d in damages}
        finally:
            for d in damages:
                self.put(d.key, self.files[d.key])


def _has_no_manifest(error: holdfast.CheckpointError, damages: Sequence[Damaged]) -> bool:
    """Return whether the manifest is gone and the error says what lies there instead."""
    gone = any(d.key == MANIFEST_KEY and d.data is None for d in damages)
    return (
        gone
        and isinstance(error, holdfast.NotACheckpointError)
        and "nothing is committed here" in error.message
    )
