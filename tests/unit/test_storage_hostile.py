"""Forged manifests with valid checksums are refused at once, with our errors, in little memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forgery import (
    Alter,
    Columns,
    Head,
    entry,
    forge,
    head,
    renamed,
    replace_manifest,
    stored,
    tree,
    use,
)  # fmt: skip

import holdfast
from holdfast.drivers import contract
from holdfast.drivers.local.driver import LocalDriver
from holdfast.planner.coverage import ROUNDS_MAX, flawed
from holdfast.storage.format import columns as format_columns
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.format.tree import Container, Tree
from holdfast.storage.runtime.engine import start

MEMORY_NBYTES = 1 << 30
TOP = (1 << 63) - 1
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Limit the address space to the current use plus a gibibyte."""
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_NBYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def overlapping(columns: Columns, fields: Head) -> None:
    """Make two shards of tensor "again", of half its size each, at the same place."""
    columns["tensor.shards"][1] += 1
    for name in ("shard.image", "shard.start", "shard.offsets", "shard.lengths"):
        columns[name] = np.insert(columns[name], 0, columns[name][0], axis=0)
    columns["shard.lengths"][:2, 0] = 2


def sharing(columns: Columns, fields: Head) -> None:
    """Make a thousand shards, and as many rows, over the same few bytes."""
    columns["tensor.shape"][1, 0] = columns["tensor.shape"][0, 0] = 4
    n = 1000
    columns["tensor.shards"] = columns["tensor.shards"].astype(np.uint32)
    columns["tensor.shape"] = columns["tensor.shape"].astype(np.uint32)
    columns["tensor.shards"][1] = n
    columns["tensor.shape"][:2, 0] = 4 * n
    for name in ("shard.image", "shard.start", "shard.offsets", "shard.lengths"):
        columns[name] = np.concatenate([np.repeat(columns[name][:1], n, axis=0), columns[name][1:]])
    columns["shard.offsets"] = columns["shard.offsets"].astype(np.uint32)
    columns["shard.offsets"][:n, 0] = np.arange(n) * 4


def hollow(columns: Columns, fields: Head) -> None:
    """Make tensor "again" empty, with strides that overflow."""
    columns["tensor.shape"] = np.pad(
        columns["tensor.shape"].astype(np.uint64), ((0, 0), (0, 1)), constant_values=1
    )
    columns["tensor.shape"][:2] = [0, 1 << 40, 1 << 40]
    columns["tensor.ndim"][:2] = 3
    columns["tensor.shards"][1] = 0
    for name in ("shard.image", "shard.start", "shard.offsets", "shard.lengths"):
        columns[name] = columns[name][1:]
    for name, fill in (("shard.offsets", 0), ("shard.lengths", 1)):
        columns[name] = np.pad(columns[name], ((0, 0), (0, 1)), constant_values=fill)


def spliced(text: str) -> Alter:
    """Put JSON text in the place of a value."""

    def alter(columns: Columns, fields: Head) -> None:
        fields["tree"]["values"][0][2] = [[[0], "SPLICE"]]
        fields["text"] = json.dumps(fields).replace('"SPLICE"', text)

    return alter


def shards_that_wrap(columns: Columns, fields: Head) -> None:
    """Set shard counts so that their sum wraps around to the right total."""
    counts = columns["tensor.shards"].astype(np.uint64)
    counts[:] = [1 << 62, 1 << 62, 1 << 62, 1 << 62, int(counts.sum())]
    columns["tensor.shards"] = counts


def names_that_wrap(columns: Columns, fields: Head) -> None:
    """Set lengths of names that wrap around thousands of times, so that all names coincide."""
    rounds, blob = 20_000, np.full(1 << 20, 65, np.uint8)
    n = 4 * rounds
    one = [len(blob), TOP - len(blob), TOP - len(blob), 2 * len(blob) + 2 - len(blob)]
    columns["tensor.name"], columns["tensor.name_nbytes"] = blob, np.array(one * rounds, np.uint64)
    for name in ("tensor.dtype", "tensor.ndim", "tensor.container", "tensor.shards"):
        columns[name] = np.resize(columns[name], n)


def images_that_wrap(columns: Columns, fields: Head) -> None:
    """Set chunk counts of images so that, in 64 bits, they match the number of digests."""
    fields["chunk_nbytes"] = fields["block_nbytes"] = 4096
    n = 1 << 13
    columns["image.rank"] = np.arange(n, dtype=np.uint16)
    columns["image.hashed_nbytes"] = np.full(n, TOP, np.uint64)
    fields["world"] = n
    columns["chunk.digest"] = np.zeros((0, 16), np.uint8)


def pages_of_terabytes(columns: Columns, fields: Head) -> None:
    """Declare a 4 TiB image in 16,384 large chunks of small blocks: 16 GiB of digests."""
    fields["chunk_nbytes"], fields["block_nbytes"] = 256 << 20, 4096
    columns["image.hashed_nbytes"] = np.array([1 << 42], np.uint64)
    columns["chunk.digest"] = np.zeros((1 << 14, 16), np.uint8)


def index_of_gigabytes(columns: Columns, fields: Head) -> None:
    """Declare the same image compressed: its block index would take 4 GiB."""
    pages_of_terabytes(columns, fields)
    fields["version"], fields["compression"] = 2, "lz4"
    columns["image.stored_nbytes"] = np.array([1 << 42], np.uint64)


def large_tensor(columns: Columns, fields: Head) -> None:
    """Declare a tensor of a terabyte with the matching number of digests."""
    fields["chunk_nbytes"], fields["block_nbytes"] = 256 << 20, 1 << 20
    columns["image.hashed_nbytes"] = np.array([(1 << 40) + (1 << 20)], np.uint64)
    columns["chunk.digest"] = np.zeros((4097, 16), np.uint8)
    shape = columns["tensor.shape"].astype(np.uint64)
    rows = (shape[:2] == shape[1]).all(axis=1)
    shape[:2][rows] = [1 << 36, 4]
    columns["tensor.shape"] = shape
    columns["shard.lengths"] = columns["shard.lengths"].astype(np.uint64)
    columns["shard.lengths"][0] = [1 << 36, 4]
    columns["shard.start"] = columns["shard.start"].astype(np.uint64)


def chain(columns: Columns, fields: Head) -> None:
    """Nest eight thousand containers; their prefixes grow quadratically, to 64 megabytes."""
    known = fields["tree"]["containers"]
    fields["tree"]["containers"] = known + [[max(0, n - 1) if n > len(known) else 0, "k", "dict"] for n in range(len(known), 8_000)]  # fmt: skip


def long_key(columns: Columns, fields: Head) -> None:
    """Put five thousand containers under a key of a million letters."""
    known = fields["tree"]["containers"]
    below = [[len(known), str(n), "dict"] for n in range(5_000)]
    fields["tree"]["containers"] = [*known, [0, "k" * 1_000_000, "dict"], *below]


def billions(columns: Columns, fields: Head) -> None:
    """Declare tables of a billion rows without columns, which take no bytes."""
    for name in ("tensor.shape", "shard.offsets", "shard.lengths"):
        columns[name] = np.zeros((10**9, 0), np.uint8)


def owners(columns: Columns, fields: Head) -> None:
    """Let five thousand ranks each own a tensor of the same name."""
    n, fields["world"] = 5_000, 5_000
    columns["tensor.name"] = np.full(n, 65, np.uint8)
    columns["tensor.name_nbytes"] = np.ones(n, np.uint8)
    for name in ("tensor.dtype", "tensor.ndim", "tensor.container", "tensor.shards"):
        columns[name] = np.zeros(n, np.uint8)
    columns["tensor.ndim"][:] = 1
    columns["tensor.shape"] = np.zeros((n, 1), np.uint8)
    columns["tensor.owner"] = np.arange(1, n + 1).astype(np.uint32)
    columns.pop("tensor.alias", None)
    for name in ("shard.image", "shard.start"):
        columns[name] = columns[name][:0]
    columns["shard.offsets"] = columns["shard.lengths"] = np.zeros((0, 1), np.uint8)


HUGE = 2**64 - 1

FORGERIES: dict[str, Alter] = {
    # A single column that contradicts the others: tests/property/test_storage_manifest.py.
    "shards that wrap round": shards_that_wrap,
    "names that wrap round": names_that_wrap,
    "images that wrap round": images_that_wrap,
    "pages of terabytes": pages_of_terabytes,
    "an index of gigabytes": index_of_gigabytes,
    "a tensor of a terabyte": large_tensor,
    "a chain of containers": chain,
    "a key of a million letters": long_key,
    "tables of a billion rows": billions,
    "five thousand owners": owners,
    "a world of 2^60 ranks": head("world", 1 << 60),
    "a run of 2^30 items": tree("orders", [[0, [["t", 1 << 30]]]]),
    "two huge dimensions": lambda c, h: (entry("tensor.shape", (1, 0), 1 << 32)(c, h), c["tensor.shape"].__setitem__((1, 1), 1 << 32)) and None,
    "alias of fewer dimensions": entry("tensor.ndim", 0, 1), "overlapping shards": overlapping, "shards that share bytes": sharing,
    "index of 5000 digits": renamed("list.0", "list." + "1" * 5000), "index in other digits": renamed("list.0", "list.٣"),
    "value nested deeply": spliced('{"$x":' + "[" * 900 + "]" * 900 + "}"), "value nested too deeply": spliced(DEEP),
    "all shards at one place": entry("shard.start", slice(None), 4096),
    "version 2": head("version", 2), "version 3": head("version", 3), "version 4": head("version", 4), "version 5": head("version", 5), "version of text": head("version", "1"), "no version": lambda c, h: h.pop("version") and None,
    "version null": head("version", None), "attempt outside": head("attempt", "../../../etc"), "attempt null": head("attempt", None),
    "step of text": head("step", "x"), "huge step": head("step", 10**400), "infinite step": head("step", float("inf")), "world 0": head("world", 0),
    "huge world": head("world", 10**30), "created nan": head("created_s", float("nan")), "chunks of nothing": head("chunk_nbytes", 0),
    "chunks of 1 TB": head("chunk_nbytes", 1 << 40), "chunks of 1 GB": head("chunk_nbytes", 1 << 30), "blocks of one byte": head("block_nbytes", 1),
    "blocks of 3 bytes": lambda c, h: (h.__setitem__("block_nbytes", 3), h.__setitem__("chunk_nbytes", 3 * (4 << 20)))[0],
    "negative blocks": head("block_nbytes", -65536), "infinite chunks": head("chunk_nbytes", float("inf")), "dtypes null": head("dtypes", None),
    "dtype of size 0": head("dtypes", [["float32", 0], ["int64", 8]]), "dtype of another size": head("dtypes", [["float32", 8], ["int64", 8]]),
    "tensors without elements, and of huge strides": hollow, "version true": head("version", True), "created at infinity": head("created_s", float("inf")),
    "step of 1.5": head("step", 1.5), "world of text": head("world", "1"), "two tensors of one name": renamed("w", "again"),
    "run of 10^30": tree("orders", [[0, [["t", 10**30]]]]), "run of two kinds": tree("orders", [[0, [["tv", 1]]]]), "run of no kind": tree("orders", [[0, [["", 1]]]]),
    "blocks by the million": lambda c, h: (h.__setitem__("block_nbytes", 4096), h.__setitem__("chunk_nbytes", 1 << 30))[0],
    "key of 5000 digits": lambda c, h: h["tree"]["containers"][1].__setitem__(1, {"$int": "0x" + "f" * 5000}),
    "dtype that is a module": head("dtypes", [["_dynamo", 4], ["int64", 8]]), "images in a square": lambda c, h: c.__setitem__("image.rank", c["image.rank"].reshape(1, 1)),
    "dtype that is none": head("dtypes", [["nn", 4], ["os", 8]]), "dtype with a path": head("dtypes", [["../float32", 4], ["int64", 8]]),
    "tree null": head("tree", None), "tree of a list": head("tree", []), "no root": tree("containers", []),
    "root of a root": lambda c, h: h["tree"]["containers"][0].__setitem__(0, 0), "containers in a circle": lambda c, h: h["tree"]["containers"][1].__setitem__(0, 2),
    "container in itself": lambda c, h: h["tree"]["containers"][1].__setitem__(0, 1), "parent of -5": lambda c, h: h["tree"]["containers"][1].__setitem__(0, -5),
    "kind of set": lambda c, h: h["tree"]["containers"][1].__setitem__(2, "set"), "key of a list": lambda c, h: h["tree"]["containers"][1].__setitem__(1, [1]),
    "list key of 2^62": lambda c, h: h["tree"]["values"][0].__setitem__(1, 1 << 62), "value nowhere": lambda c, h: h["tree"]["values"][0].__setitem__(0, 77),
    "value of no rank": lambda c, h: h["tree"]["values"][0].__setitem__(2, []), "value for nobody": lambda c, h: h["tree"]["values"][0].__setitem__(2, [[[], 1]]),
    "two values at one key": lambda c, h: h["tree"]["values"].append(h["tree"]["values"][0]),
    "value where a tensor is": lambda c, h: h["tree"]["values"].append([0, "w", [[[0], 1]]]),
    "value where a container is": lambda c, h: h["tree"]["values"].append([0, "list", [[[0], 1]]]),
    "two containers at one key": lambda c, h: h["tree"]["containers"].append(h["tree"]["containers"][1]),
    "kinds of no container": tree("kinds", [[9, "Counter"]]), "kind of a container that is none": tree("kinds", [["x", "Counter"]]), "kinds of 3": tree("kinds", 3),
    "kind of a list": tree("kinds", [[1, "Counter"]]), "placements of no rank": tree("placements", [[[9], [["w", ["R"]]]]]), "placements of 3": tree("placements", [[[0], [[3]]]]),
    "placements of an object": tree("placements", {"a": 1}), "no arrays": lambda c, h: h["tree"].pop("arrays") and None,
    "strange tensor keys": tree("tensor_keys", [[0, "w", {"a": 1}]]), "tensor keys nowhere": tree("tensor_keys", [[88, "w", 1]]),
    "arrays of bfloat16": lambda c, h: (tree("arrays", ["w"])(c, h), head("dtypes", [["bfloat16", 2], ["int64", 8]])(c, h)) and None,
    **{
        f"header {text[:20]!r}": (lambda c, h, text=text: h.__setitem__("text", text))
        for text in ["", "null", "[]", "7", '"x"', DEEP, '{"version": ' + DEEP + "}", "{", '{"version":1,"version":1}', '{"version":1}', "\ud800"]
    },
    **{
        f"value {text[:40]}": (lambda c, h, text=text: h["tree"]["values"][0].__setitem__(2, [[[0], json.loads(text)]]))
        for text in [
            '{"$pickle": "gASVAAAA"}', '{"$int": "zz"}', '{"$int": 5}', ('{"$float": ' '"1e999x"}'), '{"$float": [1]}', '{"$bytes": "*"}', '{"$bytes": 7}',
            '{"$complex": ["1"]}', '{"$complex": "ab"}', ('{"$numpy": ["O", ' '"AAAAAAAAAAA="]}'), ('{"$numpy": ' '["<f4", ""]}'), ('{"$numpy": ' '["<U999999999", ' '"AAAA"]}'),
            '{"$numpy": ["<f4"]}', ('{"$numpy": ' '[null, null]}'), ('{"$numpy": ["V8", ' '"AAAAAAAAAAA="]}'), ('{"$numpy": ' '["f4,f4", ' '"AAAAAAAAAAA="]}'),
            '{"$torch.dtype": "nn"}', ('{"$torch.dtype": ' '"os.system"}'), '{"$torch.dtype": 5}', '{"$torch.device": "x:y"}', '{"$torch.device": -7}',
            '{"$torch.Size": ["a"]}', '{"$torch.Size": 5}', ('{"$torch.Size": ' '[1e400]}'), ('{"a": ' '1, "b": 2}'), '{}', ('{"$numpy": ' '{"a": 1}}'),
            '{"$numpy": ["(1,,2)f4,f4", "AAAA"]}', ('{"$numpy": ' '["<f4", ' '"AAAAAAAAAAA="]}'), ('{"$torch.dtype": ' '"_dynamo"}'), '{"$torch.device": 3}', '[1, 2]',
            '{"$numpy": ["<U4294967296", "AAAA"]}',
        ]
    },
}  # fmt: skip


@pytest.mark.nightly(27)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_an_error_of_ours(name: str) -> None:
    """A forged manifest raises one of our errors on open, list, load, verify and read."""
    uri = stored()
    forge(uri, FORGERIES[name])
    use(uri)


HARMLESS = {
    "value where a tensor is",
    "value where a container is",
    "a world of 2^60 ranks",
    "a run of 2^30 items",
    "five thousand owners",
}


@pytest.mark.parametrize("name", [name for name in FORGERIES if name not in HARMLESS])
def test_what_a_forged_manifest_claims_is_not_loaded(name: str) -> None:
    """Manifests that make no sense raise DamagedError or UnsupportedFormatError."""
    uri = stored()
    forge(uri, FORGERIES[name])
    with pytest.raises((holdfast.DamagedError, holdfast.UnsupportedFormatError)):
        holdfast.load(uri)


@pytest.mark.parametrize(
    "attempt",
    [
        "",
        "..",
        "/etc",
        "20260101T000000-0000000a/../x",
        "20260101T000000-0000000a\n",
        "http://other.host/x",
    ],
)
def test_a_manifest_names_nothing_elsewhere(attempt: str) -> None:
    """A manifest that names another place is refused before any access to it."""
    uri = stored()
    forge(uri, head("attempt", attempt))
    with pytest.raises(holdfast.DamagedError) as caught:
        holdfast.load(uri)
    assert caught.value.key == MANIFEST_KEY


def test_shards_that_share_bytes_of_an_image_are_refused() -> None:
    """An overlap of one element is an error that names the tensor and the byte."""
    uri = stored()

    def shifted(columns: Columns, fields: Head) -> None:
        columns["shard.start"] = columns["shard.start"].astype(np.uint64)
        row = int(np.argsort(columns["shard.start"])[1])
        columns["shard.start"][row] -= 8

    forge(uri, shifted)
    text = r"a shard of 'list.0' begins inside another, at byte 4,1.. of data/"
    with pytest.raises(holdfast.DamagedError, match=text):
        holdfast.open(uri)


def test_another_version_is_not_guessed_at() -> None:
    """The error for another format version names it and the versions that this release reads."""
    uri = stored()
    forge(uri, FORGERIES["version 5"])
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"version 5.*versions 1 to 4"):
        holdfast.open(uri)


def bodies() -> dict[str, bytes]:
    """Yield files with a valid checksum that are not safetensors files of ours."""
    name = {"__metadata__": {"holdfast": "{}"}}

    def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text + data

    def column(**fields: Any) -> Any:
        return name | {
            "tensor.dtype": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} | fields
        }

    return {
        "nothing": b"", "header of 16 EB": file(b"{}", length=HUGE), "header longer than the file": file(b"{}", length=1 << 20),
        "deep": file(DEEP.encode()), "duplicate keys": file(b'{"a":1,"a":2}'), "no UTF-8": file(b'{"\xff":1}'), "no object": file([1]),
        "column beyond the end": file(column(data_offsets=[0, 1 << 40], shape=[1 << 40]), b"ab"), "column backwards": file(column(data_offsets=[2, 0]), b"ab"),
        "negative offset": file(column(data_offsets=[-2, 0]), b"ab"), "negative shape": file(column(shape=[-1, -2]), b"ab"),
        "huge shape": file(column(shape=[1 << 62, 1 << 62, 0]), b"ab"), "shape of text": file(column(shape="ab"), b"ab"),
        "shape of null": file(column(shape=None), b"ab"), "unknown dtype": file(column(dtype="F9"), b"ab"), "dtype of a list": file(column(dtype=["U8"]), b"ab"),
        "entry of text": file(name | {"x": "y"}), "metadata of a list": file({"__metadata__": [1]}), "no metadata": file({}),
        "metadata of numbers": file({"__metadata__": {"holdfast": 1}}), "three offsets": file(column(data_offsets=[0, 1, 2]), b"ab"),
        "infinite offset": file(b'{"__metadata__":{},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1e999]}}', b"a"),
        "65 dimensions": file(column(shape=[1] * 64 + [2]), b"ab"), "not a number": file(column(shape=[float("nan")]), b"ab"),
    }  # fmt: skip


@pytest.mark.nightly(3)
@pytest.mark.parametrize("name", bodies())
def test_a_file_that_is_no_manifest_is_damage(name: str) -> None:
    """A file with a valid checksum whose header makes no sense is damage."""
    uri = stored()
    body = bodies()[name]
    replace_manifest(uri, body + digest(body))
    raised = use(uri)
    assert raised
    assert all(isinstance(error, holdfast.DamagedError) for error in raised)


def test_an_object_that_is_not_small_is_not_got(tmp_path: Path) -> None:
    """A driver refuses a huge small object by its size, before it reads a byte."""
    (tmp_path / "o").touch()
    os.truncate(tmp_path / "o", contract.SMALL_NBYTES_MAX + 1)
    driver = LocalDriver(tmp_path)
    try:
        with pytest.raises(holdfast.DamagedError, match="4,294,967,296") as caught:
            start(driver.get("o")).result()
        assert caught.value.key == "o"
    finally:
        start(driver.close()).result()


def test_what_no_reader_would_accept_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save refuses a state whose container paths are too long for any reader."""
    tree = Tree([Container(-1, None, "dict"), Container(0, "k" * (1 << 20), "dict")])
    tree.containers += [Container(1, str(n), "dict") for n in range(100)]
    assert tree.paths_too_long
    state = {"k" * (1 << 20): {str(n): {"x": 1} for n in range(100)}}
    with pytest.raises(holdfast.SaveError, match="shorter keys"):
        holdfast.save("memory://too-long", state)
    monkeypatch.setattr(format_columns, "HEADER_NBYTES_MAX", 1 << 20)
    with pytest.raises(holdfast.SaveError, match="as JSON"):
        holdfast.save("memory://too-large", {"x": "x" * (1 << 20)})


def test_boxes_that_are_peeled_off_one_by_one_are_judged_right() -> None:
    """Coverage of a tiling that needs more rounds of cuts than the limit is still exact."""
    n = 4 * ROUNDS_MAX
    low, size, offsets, lengths = np.zeros(2, np.int64), np.full(2, n), [], []
    for i in range(n - 1):
        slab = size - low
        slab[i % 2] = 1
        offsets.append(low.copy())
        lengths.append(slab)
        low[i % 2] += 1
    offsets.append(low)
    lengths.append(size - low)
    shape, tensor = np.array([[n, n]]), np.zeros(n, np.int64)
    assert not flawed(shape, tensor, np.array(offsets), np.array(lengths))[0]
    offsets[n - 10] = offsets[n - 10] - [0, 1]
    assert flawed(shape, tensor, np.array(offsets), np.array(lengths))[0]
