"""Manifests of every form survive a round trip, and altered columns are refused per the format.

The checksum is recomputed after each change, to reach the checks behind it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.bits import plain
from support.effort import examples

import holdfast
from holdfast.planner.box import flat_to_boxes
from holdfast.planner.table import ShardTable, TensorTable
from holdfast.storage.format.columns import decode_columns, encode_columns, narrowed
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import Manifest, VerifiedManifest, check_complete
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.format.tree import Container, Tree, Value

ATTEMPT = "20200101T000000-00000000"
DTYPES = (("float32", 4), ("uint8", 1), ("complex128", 16), ("bfloat16", 2))
CONTAINERS = [
    Container(-1, None, "dict"),
    Container(0, "d", "dict"),
    Container(1, "l", "list"),
    Container(0, 7, "tuple"),
]
PREFIXES = ["", "d.", "d.l.", "7."]
BLOCK, CHUNK = 4096, 8192

Columns = dict[str, np.ndarray]


@st.composite
def tensor_tables(draw: st.DrawFn, world: int) -> tuple[TensorTable, np.ndarray]:
    """Draw tensors, some empty, tied or of one rank, and the container of each."""
    rows: list[tuple[str, int, tuple[int, ...], int, int, int]] = []
    for number in range(draw(st.integers(0, 6))):
        container, owner = draw(st.integers(0, 3)), draw(st.integers(-1, world - 1))
        letters = "" if container > 1 else draw(st.sampled_from(["w", "é", "a.b", ""]))
        key = f"{letters}{number}"
        dtype, alias = draw(st.integers(0, 3)), -1
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        roots = [row for row, (*_, root, _) in enumerate(rows) if root < 0]
        if roots and draw(st.booleans()):
            alias = draw(st.sampled_from(roots))
            dtype, shape = rows[alias][1:3]
        rows.append((PREFIXES[container] + key, dtype, shape, container, alias, owner))
    for other in range(world) if draw(st.booleans()) else ():  # as for generators of all ranks
        rows.append(("rng", 1, (draw(st.integers(1, 3)),), 0, -1, other))
    names, dtypes, shapes, containers, aliases, owners = (
        zip(*rows, strict=True) if rows else [()] * 6
    )
    ndim = np.array([len(shape) for shape in shapes], np.int64)
    shape = np.array([[*shape, *[1] * (3 - len(shape))] for shape in shapes], np.int64).reshape(
        -1, 3
    )
    ints = [np.array(column, np.int64) for column in (aliases, owners, containers)]
    return TensorTable(names, np.array(dtypes, np.uint8), DTYPES, ndim, shape, *ints[:2]), ints[2]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw a manifest: tensors cut into random boxes, each in the image of a random rank."""
    world = draw(st.integers(1, 3))
    tensors, container = draw(tensor_tables(world))
    shards: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
    for row, lengths in enumerate(tensors.shape.tolist()):
        if tensors.alias[row] < 0:
            volume = math.prod(lengths)
            cuts = sorted({0, volume, *draw(st.lists(st.integers(0, volume), max_size=3))})
            boxes = [
                box for a, b in itertools.pairwise(cuts) for box in flat_to_boxes(lengths, a, b)
            ]
            shards += [
                (row, box.offsets, box.lengths, draw(st.integers(0, world - 1))) for box in boxes
            ]
    ends, start = dict.fromkeys(range(world), BLOCK), np.zeros(len(shards), np.int64)
    itemsize = [tensors.itemsize[row] for row, *_ in shards]
    for index in sorted(range(len(shards)), key=lambda i: -itemsize[i]):
        start[index] = ends[shards[index][3]]
        ends[shards[index][3]] += math.prod(shards[index][2]) * itemsize[index]
    ranks = sorted({rank for *_, rank in shards})
    hashed = np.array(
        [-(-ends[rank] // BLOCK) * BLOCK + BLOCK * draw(st.integers(0, 2)) for rank in ranks],
        np.int64,
    )
    boxes = [
        np.array([shard[side] for shard in shards], np.int64).reshape(-1, 3) for side in (1, 2)
    ]
    chunks = int((-(-hashed // CHUNK)).sum())
    digests = np.frombuffer(b"".join(digest(b"%d" % i) for i in range(chunks)), np.uint8).reshape(
        -1, 16
    )
    table = ShardTable(
        np.array([row for row, *_ in shards], np.int64), *boxes,
        np.array([ranks.index(rank) for *_, rank in shards], np.int64), start,
    )  # fmt: skip
    tree = Tree(list(CONTAINERS), [Value(0, "v", [([0], 1.5)])] * draw(st.integers(0, 1)))
    packed = draw(st.booleans())
    sizes = [
        behind(nbytes, CHUNK, BLOCK) + draw(st.integers(0, nbytes)) for nbytes in hashed.tolist()
    ]
    stored = np.array(sizes, np.int64) if packed else None
    images = ImageTable(np.array(ranks, np.int64), hashed, digests, stored)
    step, compression = draw(st.none() | st.integers(0, 1 << 62)), "lz4" if packed else None
    sides = (tensors, container, table, images, CHUNK, BLOCK, compression)
    return Manifest(ATTEMPT, step, world, 1.5, tree, *sides)  # type: ignore[arg-type]


def behind(hashed_nbytes: int, chunk_nbytes: int, block_nbytes: int) -> int:
    """Return the bytes of a compressed image's file that are never compressed: pages and index."""
    return 20 * -(-hashed_nbytes // block_nbytes) + 16 * -(-hashed_nbytes // chunk_nbytes) + 16


@examples(60)
@given(manifests())
def test_a_manifest_of_any_form_comes_back(manifest: Manifest) -> None:
    """Every column and field survives."""
    assert plain(Manifest.decode(manifest.encode())) == plain(manifest)
    check_complete(manifest, "it")


@examples(60)
@given(manifests(), st.data())
def test_who_takes_a_manifest_as_checked_sees_of_wanted_tensors_what_is_in_it(
    manifest: Manifest, data: st.DataObject
) -> None:
    """A partial decode of a checked manifest returns everything but the shards of other tensors."""
    encoded = manifest.encode()
    rows = st.lists(st.integers(0, len(manifest.tensors) - 1))
    wanted = np.array(data.draw(rows) if manifest.tensors.names else [], int)
    shards, mine = manifest.shards, np.isin(manifest.shards.tensor, wanted)
    columns = (shards.tensor, shards.offsets, shards.lengths, shards.image, shards.start)
    expected = replace(manifest, shards=ShardTable(*(column[mine] for column in columns)))
    seen = VerifiedManifest.decode(memoryview(encoded))
    assert len(seen.manifest.shards) == 0
    assert plain(seen.with_shards_of(wanted)) == plain(expected)


def fits(columns: Columns, head: dict[str, Any]) -> bool:
    """Return whether a reader may accept this, by the list in docs/reference/format.md."""
    if columns["tensor.dtype"].dtype != np.uint8:
        return False
    if any(columns[name].ndim != (2 if name in TABLES else 1) for name in SHAPED):
        return False
    if any(
        int(column.max(initial=0)) >= 1 << 63
        for name, column in columns.items()
        if name != "tensor.name"
    ):
        return False
    c = {name: column.tolist() for name, column in columns.items()}
    n, shards = len(c["tensor.dtype"]), len(c["shard.start"])
    width = columns["tensor.shape"].shape[1]
    of_shards = [
        columns[name].shape == (shards, width) for name in ("shard.offsets", "shard.lengths")
    ]
    same = (
        all(of_shards)
        and len(c["shard.image"]) == shards
        and len(c["image.rank"]) == len(c["image.hashed_nbytes"])
    )
    if not same or any(
        len(column) != n
        for name, column in c.items()
        if name[:7] == "tensor." and name != "tensor.name"
    ):
        return False
    return tensors_fit(c, head, n, width, columns["tensor.name"].tobytes()) and shards_fit(
        c, head, columns["chunk.digest"]
    )


def tensors_fit(c: dict[str, Any], head: dict[str, Any], n: int, width: int, blob: bytes) -> bool:
    """Check names, dtypes, shapes, ties, owners and containers."""
    ends, known = [0, *itertools.accumulate(c["tensor.name_nbytes"])], set()
    if ends[-1] != len(blob):
        return False
    for row in range(n):
        shape, tie, owner, container = (
            c[f"tensor.{name}"][row] for name in ("shape", "alias", "owner", "container")
        )
        ndim, dtype = c["tensor.ndim"][row], c["tensor.dtype"][row]
        if (
            dtype >= len(head["dtypes"])
            or ndim > width
            or container >= len(PREFIXES)
            or tie > n
            or owner > head["world"]
        ):
            return False
        if any(length != 1 for length in shape[ndim:]) or math.prod(shape) >= 1 << 56:
            return False
        kind = ("dtype", "ndim", "shape")
        if tie and (
            c["tensor.alias"][tie - 1]
            or any(c[f"tensor.{k}"][tie - 1] != c[f"tensor.{k}"][row] for k in kind)
        ):
            return False
        try:
            name = blob[ends[row] : ends[row + 1]].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return False
        key = name.removeprefix(PREFIXES[container])
        if (
            not name.startswith(PREFIXES[container])
            or (container > 1 and not key.isdecimal())
            or (name, owner) in known
        ):
            return False
        known.add((name, owner))
    return True


def shards_fit(c: dict[str, Any], head: dict[str, Any], digests: np.ndarray) -> bool:
    """Check boxes and their places, and images."""
    hashed, ranks, counts = c["image.hashed_nbytes"], c["image.rank"], c["tensor.shards"]
    if (
        sum(counts) != len(c["shard.start"])
        or len(set(ranks)) != len(ranks)
        or any(r >= head["world"] for r in ranks)
    ):
        return False
    if head["version"] == 2:
        stored = c["image.stored_nbytes"]
        least = [behind(nbytes, head["chunk_nbytes"], head["block_nbytes"]) for nbytes in hashed]
        if len(stored) != len(hashed) or any(
            not isinstance(s, int) or not low <= s <= low + h
            for s, low, h in zip(stored, least, hashed, strict=True)
        ):
            return False
    if digests.dtype != np.uint8 or digests.shape != (
        sum(-(-nbytes // head["chunk_nbytes"]) for nbytes in hashed),
        16,
    ):
        return False
    taken: list[list[tuple[int, int]]] = [[] for _ in hashed]
    shard = 0
    for row, count in enumerate(counts):
        shape, itemsize, volume = (
            c["tensor.shape"][row],
            head["dtypes"][c["tensor.dtype"][row]][1],
            0,
        )
        for _ in range(count):
            box = list(
                zip(c["shard.offsets"][shard], c["shard.lengths"][shard], shape, strict=True)
            )
            image, start, nbytes = (
                c["shard.image"][shard],
                c["shard.start"][shard],
                math.prod(c["shard.lengths"][shard]) * itemsize,
            )
            if image >= len(hashed) or any(
                length < 1 or offset + length > limit for offset, length, limit in box
            ):
                return False
            if start % itemsize or start < 4096 or start + nbytes > hashed[image]:
                return False
            taken[image].append((start, start + nbytes))
            volume, shard = volume + math.prod(c["shard.lengths"][shard]), shard + 1
        if volume != (0 if c["tensor.alias"][row] else math.prod(shape)):
            return False
    return all(a[1] <= b[0] for runs in taken for a, b in itertools.pairwise(sorted(runs)))


def shortened(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Remove one row."""
    return np.delete(column, data.draw(st.integers(0, len(column) - 1)), axis=0)


def lengthened(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Repeat one row, at any place."""
    at, like = (data.draw(st.integers(0, len(column) - 1)) for _ in "ab")
    return np.insert(column, at, column[like], axis=0)


def duplicated(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Give one row the entries of another."""
    source, target = (data.draw(st.integers(0, len(column) - 1)) for _ in "ab")
    column = column.copy()
    column[target] = column[source]
    return column


def altered(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Change one entry by a little, or to the largest possible number."""
    flat = column.astype(np.uint64).reshape(-1)
    at = data.draw(st.integers(0, len(flat) - 1))
    by = data.draw(st.sampled_from([-1, 1, -16, 16, 4096]))
    out = data.draw(
        st.sampled_from([0, 255, 1 << 32, 1 << 56, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    )
    flat[at] = data.draw(st.sampled_from([max(0, int(flat[at]) + by), out]))
    found = flat.reshape(column.shape)
    return found if found.max() >= 1 << 63 else narrowed(found)


def reshaped(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Return the same entries in other dimensions: a list as a table, and a table as a list."""
    if column.ndim == 1:
        return column.reshape(data.draw(st.sampled_from([(-1, 1), (1, -1)])))
    return data.draw(
        st.sampled_from([column.reshape(-1), np.ascontiguousarray(column.T), column[:, :-1].copy()])
    )


def retyped(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Return the bytes as another unsigned type, or the numbers in a wider one (allowed)."""
    if data.draw(st.booleans()):
        return column.astype(data.draw(st.sampled_from([np.uint16, np.uint32, np.uint64])))
    flat = np.ascontiguousarray(column).reshape(-1)
    types = [np.uint8, np.uint16, np.uint32, np.uint64]
    fitting = [t for t in types if flat.nbytes % np.dtype(t).itemsize == 0]
    return flat.view(data.draw(st.sampled_from(fitting)))


WAYS: list[Callable[[np.ndarray, st.DataObject], np.ndarray]] = [
    shortened, lengthened, duplicated, altered, reshaped, retyped,
]  # fmt: skip
NAMES = [
    "tensor.name", "tensor.name_nbytes", "tensor.dtype", "tensor.ndim", "tensor.shape", "tensor.container", "tensor.shards",
    "tensor.alias", "tensor.owner", "shard.image", "shard.start", "shard.offsets", "shard.lengths", "image.rank",
    "image.hashed_nbytes", "image.stored_nbytes", "chunk.digest",
]  # fmt: skip
TABLES = {"tensor.shape", "shard.offsets", "shard.lengths", "chunk.digest"}
"""Columns of several dimensions."""
SHAPED = set(NAMES) - {"tensor.name", "image.stored_nbytes"}
"""Columns whose dimensions a reader checks first."""


def parts_of(manifest: Manifest) -> tuple[Columns, dict[str, Any]]:
    """Return all columns, and the header."""
    columns, metadata = decode_columns(manifest.encode(), "it")
    n = len(manifest.tensors)
    return {
        "tensor.alias": np.zeros(n, np.uint8),
        "tensor.owner": np.zeros(n, np.uint8),
    } | columns, json.loads(metadata["holdfast"])


def decoded(columns: Columns, head: dict[str, Any]) -> Manifest:
    """Return the manifest as a reader decodes it."""
    manifest = Manifest.decode(encode_columns(columns, {"holdfast": json.dumps(head)}))
    check_complete(manifest, "it")
    return manifest


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@examples(60)
@given(
    manifest=manifests().filter(lambda m: len(m.shards)),
    name=st.sampled_from(NAMES),
    data=st.data(),
)
def test_a_spoiled_column_is_refused_exactly_if_it_contradicts_the_rest(
    way: Callable[[np.ndarray, st.DataObject], np.ndarray],
    manifest: Manifest,
    name: str,
    data: st.DataObject,
) -> None:
    """A reader raises DamagedError exactly for a column that no writer could have written."""
    columns, head = parts_of(manifest)
    assert fits(columns, head)
    assume(name in columns)
    columns[name] = way(columns[name], data)
    try:
        decoded(columns, head)
    except holdfast.DamagedError:
        assert not fits(columns, head)
    else:
        assert fits(columns, head)


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(manifest=manifests().filter(lambda m: len(m.shards)))
def test_a_column_that_is_missing_or_of_another_type_is_damage(
    name: str, manifest: Manifest
) -> None:
    """A missing, signed, floating or boolean column is damage."""
    columns, head = parts_of(manifest)
    assume(name in columns)
    column = columns.pop(name)
    if name not in ("tensor.alias", "tensor.owner"):
        with pytest.raises(holdfast.DamagedError):
            decoded(columns, head)
    whole = encode_columns(
        columns | {name: column.astype(np.uint32)}, {"holdfast": json.dumps(head)}
    )
    for code in ("I32", "F32", "BOOL"):
        with pytest.raises(holdfast.DamagedError):
            Manifest.decode(retyped_file(whole, name, code))


def retyped_file(whole: bytes, name: str, code: str) -> bytes:
    """Return the file with a header that gives a column the type ``code``."""
    length = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length : -16]
    header[name]["dtype"] = code
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = len(text).to_bytes(8, "little") + text + body
    return file + digest(file)


FIELDS = [
    "version",
    "attempt",
    "step",
    "world",
    "created_s",
    "dtypes",
    "chunk_nbytes",
    "block_nbytes",
    "tree",
]


@pytest.mark.parametrize("field", FIELDS)
@examples(5)
@given(manifest=manifests().filter(lambda m: len(m.shards)))
def test_a_field_of_the_header_that_makes_no_sense_is_refused(
    field: str, manifest: Manifest
) -> None:
    """A header field is refused if it has another type, is not finite, is a negative size or is
    missing.
    """
    columns, head = parts_of(manifest)
    nonsense = [
        float("nan"),
        float("-inf"),
        {},
        [[]],
        "\x00",
        *([] if field in ("step", "created_s") else [-1, -(1 << 70)]),
    ]
    for spoiled in (
        *({**head, field: value} for value in nonsense),
        {key: head[key] for key in head if key != field},
    ):
        with pytest.raises((holdfast.DamagedError, holdfast.UnsupportedFormatError)):
            decoded(columns, spoiled)
