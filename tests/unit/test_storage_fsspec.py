"""A checkpoint seen through fsspec: what numpy, safetensors, pandas and DuckDB find there, and what
is read for it."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from fsspec.registry import register_implementation
from hypothesis import given
from hypothesis import strategies as st
from support.bits import flip, image_in
from support.drivers import HookedDriver
from support.given import Serve
from support.ranks import save_cut

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.errors import DamagedError, ReplacedError
from holdfast.planner.box import Box
from holdfast.storage.integrations.fsspec import HoldfastFileSystem

# As the entry point does for an installed package.
register_implementation("holdfast", HoldfastFileSystem, clobber=True)


def state(rng: np.random.Generator) -> dict[str, Any]:
    """Return tensors of several dtypes and shapes, an odd name, a tied tensor, and values of
    several kinds."""
    w = torch.from_numpy(rng.standard_normal((300, 200)))
    return {
        "w": w,
        "tied": w,
        "half": torch.arange(10, dtype=torch.bfloat16),
        "c": torch.tensor([1 + 2j]),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "odd/[name]*": torch.arange(3),
        "array": rng.standard_normal(5),
        "step": 12,
        "lr": 0.5,
        "name": "run",
    }


@pytest.fixture
def saved(tmp_path: Path, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    """Save a checkpoint; return it and its state."""
    made = state(rng)
    holdfast.save(tmp_path / "step-12", made)
    return f"file://{tmp_path}/step-12", made


@pytest.fixture
def fs(saved: tuple[str, dict[str, Any]]) -> HoldfastFileSystem:
    """Return its file system."""
    return HoldfastFileSystem(saved[0])


def test_the_root_lists_a_file_per_tensor_and_format(fs: HoldfastFileSystem) -> None:
    """Files are named after tensors, encoded if necessary. There is no .npy if numpy lacks the
    dtype, and no .safetensors if that format does."""
    assert set(fs.ls("", detail=False)) == {
        *(f"{n}.{kind}" for n in ("w", "tied", "flags", "scalar", "empty", "array") for kind in ("npy", "safetensors")),
        "half.safetensors", "c.npy", "odd%2F%5Bname%5D%2A.npy", "odd%2F%5Bname%5D%2A.safetensors",
        "tensors.csv", "values.json", "images",
    }  # fmt: skip
    assert fs.ls("images", detail=False) == ["images/0.safetensors"]
    assert fs.isdir("images") and fs.isfile("w.npy") and not fs.exists("nothing.npy")  # noqa: PT018
    with pytest.raises(FileNotFoundError):
        fs.ls("nothing")


def test_numpy_opens_every_tensor_that_it_can(
    fs: HoldfastFileSystem, saved: tuple[str, dict[str, Any]]
) -> None:
    """Equal in dtype, shape and bits, by an open file and by its bytes."""
    with pytest.raises(PermissionError, match="read-only"):
        fs.open("new.npy", "wb")
    for name in ("w", "tied", "c", "flags", "scalar", "empty", "array"):
        expected = np.asarray(saved[1][name])
        with fs.open(f"{name}.npy") as file:
            loaded = np.load(file)
        assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
        assert loaded.tobytes() == expected.tobytes()
        assert np.load(io.BytesIO(fs.cat_file(f"{name}.npy"))).tobytes() == expected.tobytes()


def test_safetensors_opens_images_and_tensors(
    fs: HoldfastFileSystem, saved: tuple[str, dict[str, Any]]
) -> None:
    """A tensor is alone in its file, under its own name; an image holds all that a rank wrote."""
    for file, name in [("half", "half"), ("odd%2F%5Bname%5D%2A", "odd/[name]*")]:
        loaded = safetensors.torch.load(fs.cat_file(f"{file}.safetensors"))
        assert list(loaded) == [name]
        assert loaded[name].dtype == saved[1][name].dtype
        assert torch.equal(loaded[name], saved[1][name])
    image = safetensors.torch.load(fs.cat_file("images/0.safetensors"))
    assert torch.equal(image["tied"], saved[1]["w"])


def test_pandas_reads_tables_and_values(saved: tuple[str, dict[str, Any]]) -> None:
    """A chained URL is all that is needed."""
    table = pd.read_csv(f"holdfast://tensors.csv::{saved[0]}").set_index("name")
    assert table.loc["w", "nbytes"] == 300 * 200 * 8
    assert table.loc["w", "shape"] == "300 200"
    assert table.loc["w", "alias_of"] == "tied"
    values = pd.read_json(f"holdfast://values.json::{saved[0]}", dtype=False).set_index("path")[
        "value"
    ]
    assert values['state["step"]'] == 12


def test_duckdb_reads_tables(fs: HoldfastFileSystem) -> None:
    """The file system must be registered first."""
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    with duckdb.connect() as connection:
        connection.register_filesystem(fs)
        rows = connection.sql(
            "SELECT nbytes FROM read_csv('holdfast://tensors.csv') WHERE name = 'w'"
        ).fetchall()
    assert rows == [(300 * 200 * 8,)]


@pytest.mark.parametrize(
    ("start", "end"),
    [(None, None), (-9, None), (120, 137), (5, 5), (0, 10**9)],
)
def test_ranges_mean_what_slices_mean(
    fs: HoldfastFileSystem, start: int | None, end: int | None
) -> None:
    """Across the made-up header and the data, negative and beyond the end."""
    whole = fs.cat_file("array.npy")
    assert fs.cat_file("array.npy", start, end) == whole[start:end]
    assert len(whole) == fs.size("array.npy") == 128 + 40


def test_a_range_reads_only_its_blocks(serve: Serve) -> None:
    """A row of a large tensor costs its block and the checksums of its chunk, not the tensor."""
    read: list[int] = []

    class Counting(HookedDriver):
        async def read(self, key: str, start: int, into: memoryview) -> None:
            read.append(len(into))
            await super().read(key, start, into)

    uri = serve(lambda path: Counting(MemoryDriver(path)))
    holdfast.save(uri, {"w": torch.zeros(4000, 1000)})
    fs = HoldfastFileSystem(uri)
    read.clear()
    assert fs.cat_file("w.npy", 1_000_128, 1_004_128) == bytes(4000)
    assert sum(read) <= 2 * 65536 + 4096
    read.clear()
    assert fs.cat_file("w.npy", 0, 128)[:6] == b"\x93NUMPY"
    assert read == []


def test_damage_is_an_error_and_never_a_value(
    saved: tuple[str, dict[str, Any]], fs: HoldfastFileSystem
) -> None:
    """A flipped byte of a tensor is found when its file is read; other tensors can still be read."""
    image = image_in(Path(saved[0].removeprefix("file://")))
    flip(image, image.read_bytes().index(saved[1]["w"].numpy().tobytes()) + 1000)
    with pytest.raises(DamagedError, match="'tied'"):
        fs.cat_file("w.npy", 900, 2000)
    with pytest.raises(DamagedError), fs.open("w.npy") as file:
        np.load(file)


def test_a_replaced_checkpoint_says_so(
    saved: tuple[str, dict[str, Any]], fs: HoldfastFileSystem
) -> None:
    """An open file system refuses a replaced checkpoint; a new one shows it."""
    assert fs.isfile("w.npy")
    holdfast.save(saved[0], {"w": torch.ones(2)})
    with pytest.raises(ReplacedError):
        fs.cat_file("w.npy")
    assert np.load(io.BytesIO(HoldfastFileSystem(saved[0]).cat_file("w.npy"))).tolist() == [
        1.0,
        1.0,
    ]


def test_no_torch_is_needed(saved: tuple[str, dict[str, Any]]) -> None:
    """A process that reads through the file system never imports torch."""
    code = (
        "import sys, io, numpy; from holdfast.storage.integrations.fsspec import "
        "HoldfastFileSystem\n"
        "fs = HoldfastFileSystem(sys.argv[1]); fs.ls('')\n"
        "assert numpy.load(io.BytesIO(fs.cat_file('w.npy'))).shape == (300, 200)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, saved[0]], check=True, timeout=60)


# However the shards lie


@pytest.fixture(scope="module")
def sharded() -> Iterator[tuple[holdfast.Checkpoint, dict[str, np.ndarray]]]:
    """Save a checkpoint whose tensors lie in boxes of four ranks, of uneven sizes and cut in either
    dimension."""
    rng = np.random.default_rng(7)
    tensors = {
        "quarters": rng.standard_normal((37, 53)),
        "last": rng.integers(0, 1 << 30, (5, 7, 11), dtype=np.int32),
        "columns": rng.standard_normal((1000, 300)).astype(np.float32),
        "bytes": rng.integers(0, 255, 9, dtype=np.uint8),
    }
    cuts = {
        "quarters": [(0, 20, 37), (0, 5, 53)],
        "last": [(0, 5), (0, 7), (0, 3, 6, 9, 11)],
        "columns": [(0, 1000), (0, 100, 101, 299, 300)],
        "bytes": [(0, 1, 4, 5, 9)],
    }
    boxes = {
        name: [
            Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
            for cell in itertools.product(*map(itertools.pairwise, ends))
        ]
        for name, ends in cuts.items()
    }
    save_cut(open_driver("memory://sharded"), tensors, boxes)
    with holdfast.open("memory://sharded") as checkpoint:
        yield checkpoint, tensors


@given(data=st.data())
def test_any_range_of_a_sharded_tensor_is_read(
    sharded: tuple[holdfast.Checkpoint, dict[str, np.ndarray]], data: st.DataObject
) -> None:
    """Bytes in row-major order, whatever boxes they lie in, also from within one element to within
    another."""
    checkpoint, expected = sharded
    name = data.draw(st.sampled_from(sorted(expected)))
    whole = expected[name].tobytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert checkpoint.read_bytes(name, start, stop) == whole[start:stop]
