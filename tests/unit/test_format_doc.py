"""``docs/reference/format.md`` suffices to write a reader: here is one, which uses no line of the
package's own code.

The reader is the first half of this file. It uses only json, struct, numpy, xxhash, lz4 and
zstandard, and verifies every chunk.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from support.bits import difference, flip, image_in
from support.lending import save_borrowing, save_whole
from support.ranks import as_ranks

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.state.flattening.flatten import flatten

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS = {"dict": dict, "list": list, "tuple": tuple}
VALUES = {
    "$int": lambda c: int(c, 16),
    "$float": float,
    "$complex": lambda c: complex(float(c[0]), float(c[1])),
    "$bytes": base64.b64decode,
    "$bytearray": lambda c: bytearray(base64.b64decode(c)),
    "$numpy": lambda c: np.frombuffer(base64.b64decode(c[1]), np.dtype(c[0]))[0],
}


def digest(data: bytes) -> bytes:
    """Return xxh3-128 in canonical form: 16 bytes, the most significant first."""
    return int(xxhash.xxh3_128_intdigest(data)).to_bytes(16, "big")


class Reader:
    """A checkpoint in a folder, as one rank sees it."""

    def __init__(self, folder: Path, rank: int) -> None:
        data = (folder / "manifest.safetensors").read_bytes()
        assert data[-16:] == digest(data[:-16])
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        self.head = json.loads(header.pop("__metadata__")["holdfast"])
        assert (self.head["version"], self.head.get("compression")) in (
            (1, None),
            (2, "lz4"),
            (3, None),
            (4, None),
        )
        self.columns = {
            name: self.column(data[8 + length :], entry) for name, entry in header.items()
        }
        self.channel = folder.parent
        self.folder = folder / "data" / self.head["attempt"]
        self.rank = rank
        self.images = dict[int, bytes]()
        self.first_shard = np.append(0, np.cumsum(self.columns["tensor.shards"]))
        ends = np.cumsum(self.columns["tensor.name_nbytes"])
        blob = self.columns["tensor.name"].astype(np.uint8).tobytes()
        self.names = [
            blob[end - n : end].decode()
            for end, n in zip(ends, self.columns["tensor.name_nbytes"], strict=True)
        ]

    def column(self, body: bytes, entry: dict[str, Any]) -> np.ndarray:
        start, stop = entry["data_offsets"]
        return (
            np.frombuffer(body[start:stop], BITS[int(entry["dtype"][1:]) // 8])
            .reshape(entry["shape"])
            .astype(np.int64)
        )

    def optional(self, name: str) -> np.ndarray:
        return self.columns.get(name, np.zeros(len(self.names), np.int64)) - 1

    def image(self, number: int) -> bytes:
        """Return the bytes of an image, with every chunk verified against the manifest."""
        if number not in self.images:
            chunk, block = self.head["chunk_nbytes"], self.head["block_nbytes"]
            hashed, before = (
                self.columns["image.hashed_nbytes"][i] for i in (number, slice(number))
            )
            data = self.file(number, int(hashed))
            assert len(data) == hashed + 16 * -(-hashed // block)
            first = (-(-before // chunk)).sum()
            pages = b""
            for i, start in enumerate(range(0, hashed, chunk)):
                stop = min(start + chunk, hashed)
                page = b"".join(
                    digest(data[a : min(a + block, stop)]) for a in range(start, stop, block)
                )
                assert (
                    digest(page)
                    == self.columns["chunk.digest"][first + i].astype(np.uint8).tobytes()
                )
                pages += page
            assert data[hashed:] == pages
            self.images[number] = data
        return self.images[number]

    def shared(self, number: int, hashed: int) -> bytes:
        """Return the bytes of an image of version 3, from all its files."""
        c, lenders = self.columns, self.head["lenders"]
        block, blocks_per_chunk = (
            self.head["block_nbytes"],
            self.head["chunk_nbytes"] // self.head["block_nbytes"],
        )

        def stored(row: int, at: int, nbytes: int) -> bytes:
            lender, rank, part = (c[f"file.{name}"][row] for name in ("lender", "rank", "part"))
            folder = self.folder / "lent" / lenders[lender - 1] if lender else self.folder
            with open(folder / (f"{rank}.safetensors" if part == 2 else f"{rank}.{part}.blocks"), "rb") as file:  # fmt: skip
                file.seek(at)
                data = file.read(nbytes)
                assert file.seek(0, 2) == c["file.nbytes"][row]
            assert len(data) == nbytes
            return data

        first = c["extent.count"][:number].sum()
        data = b""
        for e in range(first, first + c["extent.count"][number]):
            nbytes = min(c["extent.blocks"][e] * block, hashed - len(data))
            data += stored(c["extent.file"][e], c["extent.block"][e] * block, nbytes)
        assert len(data) == hashed
        before = c["image.hashed_nbytes"][:number]
        chunk = (-(-before // self.head["chunk_nbytes"])).sum()
        for first_block in range(0, -(-hashed // block), blocks_per_chunk):
            count = min(blocks_per_chunk, -(-hashed // block) - first_block)
            data += stored(c["page.file"][chunk], 16 * c["page.slot"][chunk], 16 * count)
            chunk += 1
        return data

    def patched(self, number: int, hashed: int, to: str = "") -> bytes:
        """Return the bytes of an image of a weights version, from its patches ``to`` a base."""
        patches, chunk, block = (
            self.head[key] for key in ("patches", "chunk_nbytes", "block_nbytes")
        )
        count = 1 + patches["to_anchor"]
        to = to or ("anchor" if patches["to_anchor"] else "previous")
        sequence, attempt = patches[to]
        base = Reader(self.channel / f"{sequence:08d}", self.rank)
        assert base.head["attempt"] == attempt
        data = (
            self.folder / f"{self.columns['image.rank'][number]}.safetensors.patch"
        ).read_bytes()
        if self.head["version"] == 4:
            assert len(data) == self.columns["image.stored_nbytes"][number]
        chunks, blocks = -(-hashed // chunk), -(-hashed // block)
        index_at = len(data) - 4 * count * chunks - 16
        assert data[-16:] == digest(data[index_at:-16])
        sizes = np.frombuffer(data, "<u4", count * chunks, index_at).reshape(chunks, count).tolist()
        image, at = bytearray(base.image(number)[:hashed]), 0
        for number_of, (first, *second) in enumerate(sizes):
            part = slice(number_of * chunk, min((number_of + 1) * chunk, hashed))
            if first == part.stop - part.start:
                image[part] = data[at : at + first]
            elif to == "previous":
                image[part] = self.applied(data[at : at + first], image[part], block, differs=True)
            else:
                patch = data[at + first : at + first + second[0]]
                image[part] = self.applied(patch, image[part], block, differs=False)
            at += -(-(first + sum(second)) // 4096) * 4096
        assert at + 16 * blocks == index_at
        return bytes(image) + data[at:index_at]

    def applied(self, patch: bytes, base: bytes, block: int, *, differs: bool) -> bytes:
        """Return a chunk after a patch."""
        if not patch:
            return base
        n, packed = struct.unpack("<II", patch[:8])
        blocks = -(-len(base) // block)
        at = 8 + -(-blocks // 8)
        plain = np.unpackbits(np.frombuffer(patch[8:at], np.uint8), bitorder="little")[:blocks]
        raw = zstandard.ZstdDecompressor().decompress(
            patch[at : at + packed], max_output_size=6 * n + 1
        )
        gaps = np.frombuffer(raw, np.uint8, 4 * n).reshape(4, n).T.copy().view("<u4")[:, 0]
        values = np.frombuffer(raw, np.uint8, 2 * n, 4 * n).reshape(2, n).T.copy().view("<u2")[:, 0]
        where = np.cumsum(gaps.astype(np.int64)) - 1
        made = np.frombuffer(base, "<u2").copy()
        made[where] = made[where] + values if differs else values
        result, at = bytearray(made.tobytes()), at + packed
        for number in np.flatnonzero(plain):
            place = slice(number * block, min((number + 1) * block, len(base)))
            result[place] = patch[at : at + place.stop - place.start]
            at += place.stop - place.start
        assert (at, len(result), len(raw)) == (len(patch), len(base), 6 * n)
        return bytes(result)

    def file(self, number: int, hashed: int) -> bytes:
        """Return the bytes of an image, unpacked if they are packed."""
        if self.head["version"] == 4:
            return self.patched(number, hashed)
        if self.head["version"] == 3:
            return self.shared(number, hashed)
        key = self.folder / f"{self.columns['image.rank'][number]}.safetensors"
        if self.head["version"] == 1:
            return key.read_bytes()
        data = (self.folder / f"{key}.lz4").read_bytes()
        block = self.head["block_nbytes"]
        chunk = self.head["chunk_nbytes"]
        assert len(data) == self.columns["image.stored_nbytes"][number]
        blocks, chunks = -(-hashed // block), -(-hashed // chunk)
        pages_at, index_at = (
            len(data) - n - 4 * blocks - 16 * chunks - 16 for n in (16 * blocks, 0)
        )
        assert data[-16:] == digest(data[index_at:-16])
        sizes = np.frombuffer(data, "<u4", blocks, index_at).tolist()
        digests = [data[index_at + 4 * blocks + 16 * i :][:16] for i in range(chunks)]
        image, at = b"", 0
        for first in range(0, blocks, chunk // block):
            start = at
            for number_of, size in enumerate(sizes[first : first + chunk // block], first):
                whole = min(block, hashed - number_of * block)
                stored, at = data[at : at + size], at + size
                image += (
                    stored
                    if size == whole
                    else lz4.block.decompress(stored, uncompressed_size=whole)
                )
            padded = -(-at // 4096) * 4096
            assert digest(data[start:padded]) == digests[first * block // chunk]
            assert data[at:padded] == bytes(padded - at)
            at = padded
        assert (at, len(image)) == (pages_at, hashed)
        return image + data[pages_at:index_at]

    def tensor(self, row: int) -> np.ndarray:
        """Return the bits of a tensor, as unsigned integers of its itemsize."""
        c, alias = self.columns, self.optional("tensor.alias")
        row = row if alias[row] < 0 else alias[row]
        dtype, ndim = BITS[self.head["dtypes"][c["tensor.dtype"][row]][1]], c["tensor.ndim"][row]
        out, missing = np.zeros(c["tensor.shape"][row, :ndim], dtype), c["tensor.shape"][row].prod()
        for s in range(self.first_shard[row], self.first_shard[row + 1]):
            offsets, lengths = c["shard.offsets"][s, :ndim], c["shard.lengths"][s, :ndim]
            box = np.frombuffer(
                self.image(c["shard.image"][s]), dtype, lengths.prod(), c["shard.start"][s]
            )
            out[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = (
                box.reshape(lengths)
            )
            missing -= lengths.prod()
        assert missing == 0
        return out

    def value(self, by_rank: list[Any]) -> Any:
        known = sorted(r for ranks, _ in by_rank for r in ranks)
        rank = self.rank if self.rank in known else known[self.rank % len(known)]
        (value,) = (value for ranks, value in by_rank if rank in ranks)
        return VALUES[next(iter(value))](*value.values()) if isinstance(value, dict) else value

    def seen(self, name: str, row: int) -> bool:
        """Return whether this rank sees ``row`` under ``name``, rather than another owner's row."""
        owner = self.optional("tensor.owner")
        rows = [r for r, n in enumerate(self.names) if n == name]
        owners = sorted(owner[r] for r in rows)
        mine = (
            -1
            if -1 in owners
            else self.rank
            if self.rank in owners
            else owners[self.rank % len(owners)]
        )
        return owner[row] == mine

    def state(self) -> Any:
        """Return the whole state, with bits for tensors and original values for the rest."""
        tree = self.head["tree"]
        kinds = [KINDS[k] for *_, k in tree["containers"]]
        items = [{} for _ in tree["containers"]]
        prefixes = [""]
        for parent, key, _ in tree["containers"][1:]:
            prefixes.append(f"{prefixes[parent]}{key}.")
        keys = {(c, text): key for c, text, key in tree["tensor_keys"]}
        for row, (name, c) in enumerate(
            zip(self.names, self.columns["tensor.container"].tolist(), strict=True)
        ):
            text = name.removeprefix(prefixes[c])
            if self.seen(name, row):
                items[c][keys.get((c, text), text) if kinds[c] is dict else int(text)] = (
                    self.tensor(row)
                )
        for c, key, by_rank in tree["values"]:
            items[c][key] = self.value(by_rank)
        for c in range(len(items) - 1, -1, -1):
            parent, key, _ = tree["containers"][c]
            made = items[c] if kinds[c] is dict else kinds[c](items[c][i] for i in sorted(items[c]))
            if parent < 0:
                return made
            items[parent][key] = made
        return None


def newest(channel: Path) -> Reader:
    """Return the newest version of a weight channel."""
    sequence = 0
    if (channel / "newest.json").exists():  # put after the version that it names
        head = json.loads((channel / "newest.json").read_bytes())
        assert head["version"] == 1
        sequence = head["sequence"]
    while (channel / f"{sequence + 1:08d}" / "manifest.safetensors").exists():
        sequence += 1
    return Reader(channel / f"{sequence:08d}", 0)


def bits(node: Any) -> Any:
    """Return a state with its tensors as bits, to compare it with the reader's."""
    if isinstance(node, torch.Tensor):
        size = node.dtype.itemsize
        return (
            node.contiguous()
            .view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[size])
            .numpy()
        )
    if isinstance(node, np.ndarray):
        return node.view(BITS[node.dtype.itemsize])
    if isinstance(node, dict):
        return {key: bits(item) for key, item in node.items()}
    return type(node)(map(bits, node)) if isinstance(node, list | tuple) else node


def rich_state(rank: int) -> dict[str, Any]:
    """Return a state with all kinds of entries; ``w`` is larger than a chunk."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(3000, 1500, generator=generator)
    model = {
        "w": w,
        "x.tied": w,
        "bf16": torch.randn(70, 30, generator=generator).bfloat16(),
        "f8": torch.randn(5, 5, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 7),
        "flags": torch.tensor([True, False]),
    }
    values = [
        1,
        -1.5,
        True,
        None,
        "text",
        b"bytes",
        bytearray(b"array"),
        2**1100,
        float("-inf"),
        1 + 2j,
        np.float32(0.1),
    ]
    own = {"seed": torch.arange(rank, rank + 4), "rank": rank}
    return {"model": model, "values": values, "pair": (torch.ones(2), {"deep": "er"}), 3: torch.ones(1), "own": own,
            "array": np.arange(6).reshape(2, 3), "empty": {}}  # fmt: skip


def save_on_ranks(folder: Path, states: Sequence[dict[str, Any]], compression: Any = None) -> None:
    """Save a checkpoint of several ranks, all in this process."""
    driver = open_driver(folder)
    jobs = [SaveJob(flatten(state), 11, 64 << 20, compression=compression) for state in states]
    as_ranks(len(states), lambda team: run_save(driver, team, jobs[team.rank]))
    asyncio.run(driver.close())


@pytest.mark.parametrize(("rank", "compression"), [(1, None), (5, "lz4")])
def test_the_reader_reads_what_ranks_saved_together(
    tmp_path: Path, rank: int, compression: Any
) -> None:
    """Each rank sees its own values. Further ranks see the values of a rank in turn."""
    save_on_ranks(tmp_path, [rich_state(rank) for rank in range(3)], compression)
    reader = Reader(tmp_path, rank)
    assert (reader.head["step"], reader.head["world"]) == (11, 3)
    assert len(reader.columns["image.rank"]) == 3
    assert difference(bits(rich_state(rank % 3)), reader.state()) is None


def test_the_reader_reads_what_borrows_from_earlier_checkpoints(tmp_path: Path) -> None:
    """This holds after those are gone, too. The reader notices damage in a borrowed file."""
    states = [rich_state(rank) for rank in range(2)]
    save_whole(tmp_path / "0", states)
    for step in (1, 2):
        states = [copy.deepcopy(state) for state in states]
        for state in states:
            state["model"]["w"][1000 * step :: 700] += 1
            state["model"]["x.tied"] = state["model"]["w"]
        save_borrowing(tmp_path / str(step), states, tmp_path / str(step - 1))
    for step in (0, 1):
        shutil.rmtree(tmp_path / str(step))
    for rank in range(2):
        reader = Reader(tmp_path / "2", rank)
        assert (reader.head["version"], len(reader.head["lenders"])) == (3, 2)
        assert difference(bits(states[rank]), reader.state()) is None
    (lent,) = (tmp_path / "2").glob("data/*/lent/*/0.safetensors")
    flip(lent, 5000)
    with pytest.raises(AssertionError):
        Reader(tmp_path / "2", 0).state()


def test_the_reader_notices_damage(tmp_path: Path) -> None:
    """The reader refuses a flipped bit in an image or in the manifest."""
    holdfast.save(tmp_path, rich_state(0))
    for path in (image_in(tmp_path), tmp_path / "manifest.safetensors"):
        flip(path, path.stat().st_size // 2)
        with pytest.raises(AssertionError):
            Reader(tmp_path, 0).state()


def test_the_reader_reads_versions_of_weights(tmp_path: Path) -> None:
    """It reads versions from patches to the previous one and to the anchor. It notices damage."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(3000, 3000, generator=generator).bfloat16()
    scales = torch.randn(99, generator=generator).to(torch.float8_e4m3fn)
    seen = set()
    with holdfast.publish(tmp_path, anchor=6) as publisher:
        for version in range(0, 36, 4):
            publisher.push(version, {"model": {"w": w, "scales": scales}}).wait()
            reader = newest(tmp_path)
            assert reader.head["step"] == version
            assert difference(bits({"w": w, "scales": scales}), reader.state()["model"]) is None
            patches = reader.head.get("patches", {})
            if patches.get("whole") or patches.get("to_anchor"):
                hashed = int(reader.columns["image.hashed_nbytes"][0])
                assert reader.patched(0, hashed, "previous")[:hashed] == reader.image(0)[:hashed]
            seen.add((reader.head["version"], patches.get("to_anchor"), patches.get("whole")))
            flat = w.view(-1).view(torch.int16)
            flat[torch.rand(flat.shape, generator=generator) < 0.005] += 1
            w[200:240] = torch.randn(40, 3000, generator=generator).bfloat16()
    assert seen == {(1, None, None), (4, False, False), (4, True, False), (1, False, True)}
    patch = next((tmp_path / "00000009").rglob("*.patch"))
    flip(patch, 5000)
    with pytest.raises((AssertionError, zstandard.ZstdError)):
        Reader(tmp_path / "00000009", 0).state()
