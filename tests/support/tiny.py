"""A checkpoint of two ranks in a few kilobytes, with many chunks, and checks for its readers."""

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
    """Return a rank's state: shared and own tensors of several types and shapes, and values."""
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
    """Save a checkpoint of two ranks at ``memory://name``; return its files."""
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
    """Compress the images; return the new manifest."""
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
    """Cut the images into small chunks; return the new manifest."""
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
    """Load the whole state into new tensors."""
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
    """Read slices: rows, columns, one element, and every rank's own tensor."""
    truth = state_of(0)["w"]
    with holdfast.open(uri) as c:
        for index in ((slice(3, 5),), (slice(None), slice(7, 9)), (15, 199)):
            assert torch.equal(c.read("w", index), truth[index])
        assert torch.equal(c.read("tied", rows=slice(0, 1)), truth[:1])
        assert [c.read("own", 5, rank=rank).item() for rank in range(2)] == [0, 1]
        assert list(c.values()) == [('state["lr"]', 0.25)]


def byte_ranges(uri: str) -> None:
    """Read ranges of bytes, without torch."""
    truth = raw(state_of(0)["w"])
    with holdfast.open(uri) as c:
        for a, b in ((0, 10), (5000, 9001), (len(truth) - 3, len(truth))):
            assert c.read_bytes("w", a, b) == truth[a:b]
        assert c.read_bytes("deep.0.b") == raw(state_of(0)["deep"][0]["b"])


def files(uri: str) -> None:
    """Read the files that fsspec shows, except the images, which fsspec does not verify."""
    view = HoldfastFileSystem(uri)
    w = raw(state_of(0)["w"])
    assert view.cat_file("w.npy")[-len(w) :] == w
    assert view.cat_file("w.safetensors")[-len(w) :] == w
    assert view.cat_file("own@1.npy")[-4:] == np.float32(1).tobytes()


def copied(uri: str) -> None:
    """Copy the checkpoint. The copy must be complete, or absent if the copy fails."""
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
    """Damage to bytes [start, stop) of a file: ``data`` replaces them; None: the file is gone."""

    key: str
    data: bytes | None
    start: int
    stop: int


class Tiny:
    """A checkpoint that can be damaged and repaired."""

    def __init__(
        self,
        name: str,
        compression: Compression | None = None,
        files: dict[str, bytes] | None = None,
    ) -> None:
        """Use the existing ``files``, or save a new checkpoint if None."""
        self.uri, self._driver = f"memory://{name}", MemoryDriver(name)
        self.files = files or tiny(name, compression=compression)
        self.manifest, _ = start(read_manifest(self._driver)).result()

    @property
    def hashed(self) -> int:
        """Return the number of bytes of each image that digests cover, at least."""
        return int(self.manifest.images.hashed_nbytes.min())

    def put(self, key: str, data: bytes | None) -> None:
        """Replace a file, or delete it if ``data`` is None."""
        start(self._driver.delete(key) if data is None else self._driver.put(key, data)).result()

    def judge(self, reader: str, *damages: Damaged) -> str:
        """Read with damage. Return "refused" for a located error, "unnoticed" for saved values."""
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
        """Return whether the error names the damaged file, its bytes, and their tensors."""
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
        """Check that ``verify`` locates each damage, or that the manifest is refused."""
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
    """Return whether the manifest is missing, and the error says that nothing is committed."""
    gone = any(d.key == MANIFEST_KEY and d.data is None for d in damages)
    return (
        gone
        and isinstance(error, holdfast.NotACheckpointError)
        and "nothing is committed here" in error.message
    )
