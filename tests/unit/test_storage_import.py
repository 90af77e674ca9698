"""``holdfast.import_`` and ``holdfast import``: checkpoints of safetensors files, bit for bit, and
nothing of files that are not what they say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import difference, fresh_uri, random_bits
from support.given import Serve

import holdfast
from holdfast.cli import app
from holdfast.drivers.contract import Buffer, ObjectInfo
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
INDEX = "model.safetensors.index.json"


def model_of(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Tensors of every dtype, and odd shapes."""
    model = {f"l.{dtype}": random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    return model | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "one": torch.ones(1).bool(),
    }


def write_sharded(folder: Path, parts: dict[str, dict[str, torch.Tensor]]) -> None:
    """Files, and the index of them."""
    folder.mkdir(exist_ok=True)
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_file_becomes_a_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    """Given by itself or by its folder; the checkpoint is whole, and has every bit."""
    model = model_of(rng)
    save_file(model, tmp_path / "any.safetensors")
    for source in (tmp_path, tmp_path / "any.safetensors"):
        uri = fresh_uri()
        report = holdfast.import_(source, uri, step=5)
        assert difference(model, holdfast.load(uri)) is None
        with holdfast.open(uri) as c:
            assert c.verify().ok
            assert (c.step, c.attempt, c.nbytes) == (5, report.attempt, report.nbytes)
        assert report.files == ("any.safetensors",)
        assert report.tensors == len(model)


def test_images_that_are_larger_than_an_object_may_be_are_refused_before_anything_is_put(
    tmp_path: Path,
) -> None:
    """An attempt that could never succeed is not left to be resumed."""
    save_file({"w": torch.ones(1000)}, tmp_path / "any.safetensors")
    store = tmp_path / "store"
    with pytest.raises(holdfast.StorageError, match="would have"):
        holdfast.import_(tmp_path, f"fsspec+file://{store}?object_max_nbytes=2KiB")
    assert not [path for path in store.rglob("*") if path.is_file()]


def test_a_model_of_several_files_becomes_one_checkpoint(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Tensors that are larger than a chunk, and cut by chunks anywhere, in a small budget."""
    parts = {
        "a.safetensors": {"big": random_bits(rng, torch.int16, (9_000_001,)), "b": torch.ones(3)},
        "c.safetensors": {"c": random_bits(rng, torch.uint8, (20_000_003,)), "d": torch.ones(5)},
    }
    write_sharded(tmp_path, parts)
    uri = fresh_uri()
    heard: list[tuple[int, int]] = []
    holdfast.import_(
        tmp_path, uri, budget_nbytes=1 << 20, progress=lambda *nbytes: heard.append(nbytes)
    )
    assert (
        difference({k: v for p in parts.values() for k, v in p.items()}, holdfast.load(uri)) is None
    )
    assert heard[-1][0] == heard[-1][1] > 38_000_000


def test_there_and_back(tmp_path: Path, rng: np.random.Generator) -> None:
    """What was exported, in several files, is imported to the same state."""
    model = model_of(rng)
    uri = fresh_uri()
    holdfast.save(uri, {"model": model})
    names = ["model.*"]
    holdfast.export(uri, tmp_path, only=names, rename={"model.*": "*"}, file_nbytes=5000)
    back = fresh_uri()
    holdfast.import_(tmp_path, back, rename={"*": "model.*"})
    assert holdfast.load(back, into={"model": {k: torch.empty_like(v) for k, v in model.items()}})
    report = holdfast.diff(uri, back)
    assert not report.tensors
    assert report.equal_tensors == len(model)


def test_names_are_chosen_and_changed(tmp_path: Path) -> None:
    """By patterns, as in an export; a clash is refused, and nothing is made."""
    save_file({"a.w": torch.ones(1), "b.w": torch.zeros(1)}, tmp_path / "model.safetensors")
    uri = fresh_uri()
    holdfast.import_(tmp_path, uri, only=["b.*"], rename={"b.*": "x.*"})
    assert difference({"x.w": torch.zeros(1)}, holdfast.load(uri)) is None
    with pytest.raises(holdfast.UsageError, match="would both be named 'w'"):
        holdfast.import_(tmp_path, fresh_uri(), rename={"*.w": "w"})


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """And then whole."""
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    uri = fresh_uri()
    holdfast.save(uri, {"x": 1, "y": torch.ones(1)})
    with pytest.raises(holdfast.ExistsError, match="a checkpoint already exists"):
        holdfast.import_(tmp_path, uri)
    assert holdfast.load(uri)["x"] == 1
    holdfast.import_(tmp_path, uri, overwrite=True)
    assert list(holdfast.load(uri)) == ["w"]


class Noting(LocalDriver):
    """Adds to ``keys`` what it is asked for."""

    def __init__(self, root: Path, keys: list[str]) -> None:
        super().__init__(root)
        self.keys = keys

    async def read(self, key: str, start: int, into: Buffer) -> None:
        self.keys.append(key)
        await super().read(key, start, into)

    async def stat(self, key: str) -> ObjectInfo:
        self.keys.append(key)
        return await super().stat(key)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..",
        "x.safetensors\0", "", ".", "a.bin", 7, None, ["x.safetensors"], {"a": 1},
    ],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused_before_anything_is_read(
    tmp_path: Path, serve: Serve, file: object
) -> None:
    """Also if its first entries are honest; nothing is made at the destination."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, folder / "good.safetensors")
    save_file({"stolen": torch.ones(1)}, tmp_path / "secret.safetensors")
    weight_map = {"w": "good.safetensors", "stolen": file}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    keys: list[str] = []
    source = serve(lambda path: Noting(folder, keys))
    with pytest.raises(holdfast.DamagedError, match="not a file in its folder"):
        holdfast.import_(source, tmp_path / "out")
    assert set(keys) == {INDEX}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": 1}',
        "[" * 100_000,
        "\0",
    ],
)
def test_an_index_that_is_none_is_damage(tmp_path: Path, text: str) -> None:
    """Whatever is in it."""
    save_file({"w": torch.ones(1)}, tmp_path / "good.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(holdfast.DamagedError, match="index"):
        holdfast.import_(tmp_path, fresh_uri())


def test_files_that_are_not_what_the_index_says_are_damage(tmp_path: Path) -> None:
    """A tensor that is missing, in another file, or not named; a file that is gone."""
    parts = {"a.safetensors": {"a": torch.ones(1)}, "b.safetensors": {"b": torch.ones(1)}}
    weight_maps = [
        {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"},
        {"a": "b.safetensors", "b": "a.safetensors"},
        {"a": "a.safetensors", "b": "a.safetensors"},
    ]
    for weight_map in weight_maps:
        write_sharded(tmp_path, parts)
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(holdfast.DamagedError, match="index and files disagree"):
            holdfast.import_(tmp_path, fresh_uri())
    write_sharded(tmp_path, parts | {"b.safetensors": {"b": torch.ones(1), "more": torch.ones(1)}})
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})
    )
    with pytest.raises(holdfast.DamagedError, match="where tensor 'more' is"):
        holdfast.import_(tmp_path, fresh_uri())
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(holdfast.NotFoundError):
        holdfast.import_(tmp_path, fresh_uri())


def test_several_files_without_an_index_are_no_model(tmp_path: Path) -> None:
    """They may be what is left of an interrupted export; nor are two models one, nor none."""
    with pytest.raises(holdfast.NotFoundError, match="no safetensors file"):
        holdfast.import_(tmp_path, fresh_uri())
    write_sharded(
        tmp_path, {"a.safetensors": {"a": torch.ones(1)}, "b.safetensors": {"b": torch.ones(1)}}
    )
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(holdfast.UnsupportedFormatError, match="several models"):
        holdfast.import_(tmp_path, fresh_uri())
    for index in tmp_path.glob("*.json"):
        index.unlink()
    with pytest.raises(
        holdfast.UnsupportedFormatError, match=r"an index: a\.safetensors, b\.safet"
    ):
        holdfast.import_(tmp_path, fresh_uri())
    for number in (1, 2):
        (tmp_path / f"{'ab'[number - 1]}.safetensors").rename(
            tmp_path / f"model-0000{number}-of-00002.safetensors"
        )
    with pytest.raises(holdfast.DamagedError, match="no index"):
        holdfast.import_(tmp_path, fresh_uri())


PLAIN = "model.safetensors"
SHARDS = ("model.fp16-00001-of-00002.safetensors", "model-00001-of-00002.fp16.safetensors")


def folder_of(folder: Path, keys: Sequence[str]) -> Path:
    """A folder with these files and indexes. Each model has a tensor with its name; an index names
    one of the shards."""
    for key in keys:
        if key.endswith(".json"):
            shard = SHARDS[".safetensors.index." in key]
            save_file({key: torch.ones(2)}, folder / f"{key}-00001-of-00001.safetensors")
            weight_map = {key: f"{key}-00001-of-00001.safetensors"}
            (folder / key).write_text(json.dumps({"weight_map": weight_map}))
            save_file({"of another": torch.ones(2)}, folder / shard)
        else:
            save_file({key: torch.ones(2)}, folder / key)
    return folder


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.safetensors.index.fp16.json"], "model.safetensors.index.fp16.json"),
        (["model.safetensors.fp16.index.json"], "model.safetensors.fp16.index.json"),
        (["model.fp16.safetensors.index.json"], "model.fp16.safetensors.index.json"),
        (["diffusion_pytorch_model.safetensors.index.fp16.json"],
         "diffusion_pytorch_model.safetensors.index.fp16.json"),
        (["model.fp16.safetensors"], "model.fp16.safetensors"),
        ([PLAIN, "model.fp16.safetensors", "model.non_ema.safetensors"], PLAIN),
        ([PLAIN, "model.safetensors.index.fp16.json"], PLAIN),
        ([INDEX, "model.safetensors.index.fp16.json", "model.safetensors.bf16.index.json"], INDEX),
        ([INDEX, "model.fp16.safetensors.index.json", "model.fp16.safetensors"], INDEX),
    ],
)  # fmt: skip
def test_of_a_model_and_its_variants_the_model_is_imported(
    tmp_path: Path, keys: list[str], expected: str
) -> None:
    """Wherever libraries put the name of a variant; a variant alone is the model."""
    uri = fresh_uri()
    holdfast.import_(folder_of(tmp_path, keys), uri)
    assert list(holdfast.load(uri)) == [expected]


@pytest.mark.parametrize(
    "keys",
    [
        ["model.bf16.safetensors", "model.fp16.safetensors"],
        ["model.safetensors.index.bf16.json", "model.safetensors.index.fp16.json"],
        ["llama-3.1.safetensors", "llama-3.safetensors"],
    ],
)
def test_of_several_models_none_is_guessed(tmp_path: Path, keys: list[str]) -> None:
    """They are named, and each is imported by its own URI."""
    folder_of(tmp_path, keys)
    with pytest.raises(holdfast.UnsupportedFormatError, match=", ".join(keys)):
        holdfast.import_(tmp_path, fresh_uri())
    for key in keys:
        uri = fresh_uri()
        holdfast.import_(tmp_path / key, uri)
        assert list(holdfast.load(uri)) == [key]


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_an_index_of_files_of_torch_is_refused_by_name(tmp_path: Path, variant: str) -> None:
    """And what reads them is said."""
    (tmp_path / f"pytorch_model.bin.index{variant}.json").write_text("{}")
    with pytest.raises(holdfast.UnsupportedFormatError, match="an index of torch"):
        holdfast.import_(tmp_path, fresh_uri())


NEWER = [
    torch.complex64, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
]  # fmt: skip


def test_newer_dtypes_are_imported_and_exported(tmp_path: Path, rng: np.random.Generator) -> None:
    """Bit for bit, in shapes of torch. Images have them as bytes, so that every reader opens them."""
    model = {str(dtype): random_bits(rng, dtype, (3, 5)) for dtype in NEWER}
    save_file(model, tmp_path / "m.safetensors")
    holdfast.import_(tmp_path / "m.safetensors", tmp_path / "c")
    assert difference(model, holdfast.load(tmp_path / "c")) is None
    with holdfast.open(tmp_path / "c") as c:
        assert c.verify().ok
    (image,) = tmp_path.glob("c/data/*/0.safetensors")
    assert load_file(image)["torch.float4_e2m1fn_x2"].shape == (3, 5, 1)
    assert holdfast.diff(tmp_path / "c", tmp_path / "c").equal
    holdfast.export(tmp_path / "c", tmp_path / "x")
    assert difference(model, load_file(tmp_path / "x" / PLAIN)) is None


def written(path: Path, code: str, shape: list[int], nbytes: int) -> Path:
    """A safetensors file with a tensor ``s`` of this dtype, and a plain one."""
    header = {
        "s": {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]},
        "w": {"dtype": "U8", "shape": [2], "data_offsets": [nbytes, nbytes + 2]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes + 2))
    return path


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [
        ("F6_E2M3", [4], 3),
        ("F6_E3M2", [4], 3),
        ("F4", [2, 3], 3),
        ("F4", [2, 1], 1),
        ("F128", [4], 64),
    ],
)
def test_a_dtype_that_torch_does_not_have_is_refused_by_name(
    tmp_path: Path, code: str, shape: list[int], nbytes: int
) -> None:
    """It is no damage. Without that tensor the file is imported."""
    file = written(tmp_path / "m.safetensors", code, shape, nbytes)
    with pytest.raises(holdfast.UnsupportedFormatError, match=rf"tensor 's' .* dtype '{code}'"):
        holdfast.import_(file, fresh_uri())
    uri = fresh_uri()
    holdfast.import_(file, uri, skip=["s"])
    assert holdfast.load(uri)["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("code", "shape"), [("F6_E2M3", [5]), ("F4", [3]), ("F4", [6]), ("C64", [1])]
)
def test_a_size_that_is_not_that_of_the_dtype_is_damage(
    tmp_path: Path, code: str, shape: list[int]
) -> None:
    """Of dtypes that are known, whether torch has them or not."""
    with pytest.raises(holdfast.DamagedError, match="'s' does not fill its data_offsets"):
        holdfast.import_(written(tmp_path / "m.safetensors", code, shape, 2), fresh_uri())


def test_what_a_file_says_of_itself_is_in_the_export_of_its_import(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all files; of two that contradict each other the first one counts, with a warning. What is
    loaded does not have it, and a copy keeps it."""
    for number, (name, rank) in enumerate([("a", "8"), ("b", "16")], 1):
        file = tmp_path / f"model-0000{number}-of-00002.safetensors"
        said = {"format": "pt", "ss_network_dim": rank, name: "layout\n"}
        save_file({name: torch.ones(2)}, file, metadata=said)
    weight_map = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate("ab", 1)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    uri, copied = fresh_uri(), fresh_uri()
    holdfast.import_(tmp_path, uri)
    assert "model-00002-of-00002.safetensors says '16' for 'ss_network_dim'" in caplog.text
    assert sorted(holdfast.load(uri)) == ["a", "b"]
    holdfast.copy(uri, copied)
    holdfast.export(copied, tmp_path / "x")
    with safe_open(tmp_path / "x" / PLAIN, "pt") as file:
        expected = {"format": "pt", "ss_network_dim": "8", "a": "layout\n", "b": "layout\n"}
        assert file.metadata() == expected


def test_metadata_that_is_no_text_is_no_header(tmp_path: Path) -> None:
    """As safetensors has it."""
    text = json.dumps({"__metadata__": {"format": 7}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(holdfast.DamagedError, match="not an object of strings"):
        holdfast.import_(tmp_path, fresh_uri())


@pytest.mark.parametrize("cut", [0, 4, 8, 50, -1])
def test_a_file_that_was_cut_is_damage(tmp_path: Path, cut: int) -> None:
    """Wherever; and one that is longer, too."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, file)
    data = file.read_bytes()
    for changed in (data[:cut], data + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(holdfast.DamagedError, match="contradicts its header"):
            holdfast.import_(file, fresh_uri())


def test_a_header_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    """A length is compared with the file before so much is read."""
    file = tmp_path / "model.safetensors"
    for length in (200_000_000, 1 << 63):
        with file.open("wb") as f:
            f.write(length.to_bytes(8, "little"))
            f.truncate(300_000_000)
        with pytest.raises(holdfast.DamagedError, match="a header of"):
            holdfast.import_(file, fresh_uri())


def test_a_file_that_changes_meanwhile_is_not_imported(tmp_path: Path, serve: Serve) -> None:
    """It is seen before the commit: half of each would be neither."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, file)

    class Touching(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            await super().read(key, start, into)
            if len(into) == 400:
                save_file({"w": torch.zeros(100)}, file)
                os.utime(file, ns=(1, 1))

    folder = serve(lambda path: Touching(tmp_path))
    uri = fresh_uri()
    with pytest.raises(holdfast.DamagedError, match="changed while it was read"):
        holdfast.import_(f"{folder}/{file.name}", uri)
    assert list(MemoryDriver(uri.removeprefix("memory://")).objects) == []


def run(*arguments: str, status: int) -> str:
    """What a command prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = app.run(arguments)
    assert ended == status, out.getvalue() + err.getvalue()
    return out.getvalue() + err.getvalue()


def test_the_command_imports(tmp_path: Path) -> None:
    """It says what it made, or why it did not."""
    save_file({"w": torch.ones(256)}, tmp_path / "model.safetensors")
    dest = tmp_path / "out"
    asked = ["import", str(tmp_path), str(dest), "--rename", "*=model.*", "--step", "3"]
    out = run(*asked, status=0)
    assert out.startswith(f"imported: file://{dest}: 1 tensor of 1 file, 1.00 KiB, 0.")
    assert "a checkpoint already exists" in run(*asked, status=2)
    found = json.loads(run(*asked, "--overwrite", "--json", status=0))
    assert (found["files"], found["tensors"], found["nbytes"]) == (["model.safetensors"], 1, 1024)
    assert [(c.step, c.tensors) for c in holdfast.list_checkpoints(dest)] == [(3, 1)]
