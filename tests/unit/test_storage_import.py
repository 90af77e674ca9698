"""``holdfast.import_`` and ``holdfast import``: safetensors files become checkpoints, bit for bit,
and files that contradict themselves are refused."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import difference, fresh_uri, random_bits, saved
from support.commands import run, run_json
from support.drivers import Hook, HookedDriver, contents, dying_after
from support.given import Serve
from support.importing import imported, noted, objects_at

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.conversion.importing import ImportReport
from holdfast.storage.runtime import engine

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64,
]  # fmt: skip
INDEX = "model.safetensors.index.json"
PLAIN = "model.safetensors"
ONE = {"w": torch.ones(1)}


def write_sharded(
    folder: Path, parts: dict[str, dict[str, torch.Tensor]], index: object = None
) -> None:
    """Write files and their index, or the given one."""
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = index or {name: file for file, tensors in parts.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_file_becomes_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    """A file is given by itself or by its folder; every bit is in the checkpoint and its export."""
    model = {f"l.{dtype}": random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    model |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
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
    (image,) = (key for key in objects_at(uri) if key.endswith("0.safetensors"))
    (tmp_path / "image").write_bytes(objects_at(uri)[image][0])
    packed = load_file(tmp_path / "image")["l.torch.float4_e2m1fn_x2"]
    assert packed.shape == (51, 17, 1)  # as bytes, which every reader can open
    holdfast.export(uri, tmp_path / "x")
    assert difference(model, load_file(tmp_path / "x" / PLAIN)) is None


def test_image_larger_than_an_object_is_refused(tmp_path: Path) -> None:
    """An import that can never succeed leaves no attempt to resume."""
    save_file({"w": torch.ones(1000)}, tmp_path / "any.safetensors")
    store = tmp_path / "store"
    with pytest.raises(holdfast.StorageError, match="would have"):
        holdfast.import_(tmp_path, f"fsspec+file://{store}?object_max_nbytes=2KiB")
    assert not [path for path in store.rglob("*") if path.is_file()]


def test_several_files_become_one_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors larger than a chunk are imported within a small budget, and progress is reported."""
    parts = {
        "a.safetensors": {"big": random_bits(rng, torch.int16, (9_000_001,)), "b": torch.ones(3)},
        "c.safetensors": {"c": random_bits(rng, torch.uint8, (20_000_003,)), "d": torch.ones(5)},
    }
    write_sharded(tmp_path, parts)
    heard: list[tuple[int, int]] = []
    found = imported(tmp_path, budget_nbytes=1 << 20, progress=lambda *n: heard.append(n))
    assert difference(parts["a.safetensors"] | parts["c.safetensors"], found) is None
    assert heard[-1][0] == heard[-1][1] > 38_000_000


def test_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """With overwrite, nothing of the earlier checkpoint is left."""
    save_file(ONE, tmp_path / PLAIN)
    uri = saved({"x": 1, "y": torch.ones(1)})
    with pytest.raises(holdfast.ExistsError, match="a checkpoint already exists"):
        holdfast.import_(tmp_path, uri)
    assert holdfast.load(uri)["x"] == 1
    holdfast.import_(tmp_path, uri, overwrite=True)
    assert list(holdfast.load(uri)) == ["w"]


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors", "/etc/secret.safetensors", "..\\x.safetensors", "..", "x.safetensors\0", "a.bin", 7,
    ],
)  # fmt: skip
def test_index_that_leads_elsewhere_is_refused(tmp_path: Path, serve: Serve, file: object) -> None:
    """A file outside of the folder is refused before any file is read."""
    (tmp_path / "model").mkdir()
    save_file({"stolen": torch.ones(1)}, tmp_path / "secret.safetensors")
    weight_map = {"w": "good.safetensors", "stolen": file}
    write_sharded(tmp_path / "model", {"good.safetensors": ONE}, weight_map)
    source, keys = noted(serve, tmp_path / "model")
    with pytest.raises(holdfast.DamagedError, match="not a file in its folder"):
        holdfast.import_(source, tmp_path / "out")
    assert set(keys) == {INDEX}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', "[" * 100_000])
def test_malformed_index_is_damage(tmp_path: Path, text: str) -> None:
    """An index that cannot be parsed is damage, whatever it contains."""
    save_file(ONE, tmp_path / "good.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(holdfast.DamagedError, match="index"):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}, "'c' is"),
        ({"a": "b.safetensors", "b": "a.safetensors"}, "'a' is"),
        ({"a": "a.safetensors"}, "'b' is"),
    ],
)
def test_index_that_contradicts_the_files_is_damage(
    tmp_path: Path, index: dict[str, str], message: str
) -> None:
    """A tensor that is missing, elsewhere or unnamed is an error."""
    parts = {"a.safetensors": {"a": torch.ones(1)}, "b.safetensors": {"b": torch.ones(1)}}
    if len(index) == 1:
        parts = {"a.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}}
    write_sharded(tmp_path, parts, index)
    with pytest.raises(holdfast.DamagedError, match=f"index and files .*{message}"):
        imported(tmp_path)


def test_missing_files_are_errors(tmp_path: Path) -> None:
    """An empty folder, a file missing from an index, and files without their index are refused."""
    with pytest.raises(holdfast.NotFoundError, match="no safetensors file"):
        imported(tmp_path)
    parts = {f"model-0000{n}-of-00003.safetensors": {f"{n}": torch.ones(1)} for n in (1, 2, 3)}
    write_sharded(tmp_path, parts)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(holdfast.NotFoundError):
        imported(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(holdfast.DamagedError, match="no index"):
        imported(tmp_path)


SHARDS = ("model.fp16-00001-of-00002.safetensors", "model-00001-of-00002.fp16.safetensors")


def folder_of(folder: Path, keys: Sequence[str]) -> Path:
    """Return a folder with these files, each with a tensor of its name, and indexes of shards."""
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
        (["model.fp16.safetensors"], "model.fp16.safetensors"),
        ([PLAIN, "model.fp16.safetensors", "model.non_ema.safetensors"], PLAIN),
        ([PLAIN, "model.safetensors.index.fp16.json"], PLAIN),
        ([INDEX, "model.safetensors.index.fp16.json", "model.safetensors.bf16.index.json"], INDEX),
        ([INDEX, "model.fp16.safetensors.index.json", "model.fp16.safetensors"], INDEX),
        (["model.bf16.safetensors", "model.fp16.safetensors"], None),
        (["model.safetensors.index.bf16.json", "model.safetensors.index.fp16.json"], None),
        (["llama-3.1.safetensors", "llama-3.safetensors"], None),
    ],
)
def test_plain_model_is_preferred_to_variants(
    tmp_path: Path, keys: list[str], expected: str | None
) -> None:
    """A model's variants are recognised by name; between several models there is no guess."""
    folder = folder_of(tmp_path, keys)
    if expected is not None:
        assert list(imported(folder)) == [expected]
        return
    with pytest.raises(holdfast.UnsupportedFormatError, match=", ".join(keys)):
        imported(folder)
    for key in keys:
        assert list(imported(folder / key)) == [key]


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_index_of_torch_files_is_refused(tmp_path: Path, variant: str) -> None:
    """The error says that the index is one of torch.save files."""
    (tmp_path / f"pytorch_model.bin.index{variant}.json").write_text("{}")
    with pytest.raises(holdfast.UnsupportedFormatError, match="an index of torch"):
        imported(tmp_path)


def written(path: Path, code: str, shape: list[int], nbytes: int) -> Path:
    """Return a safetensors file with a tensor ``s`` of this dtype, and a plain one."""
    header = {
        "s": {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]},
        "w": {"dtype": "U8", "shape": [2], "data_offsets": [nbytes, nbytes + 2]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes + 2))
    return path


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [("F6_E2M3", [4], 3), ("F4", [2, 3], 3), ("F128", [4], 64)],
)
def test_dtype_that_torch_lacks_is_refused(
    tmp_path: Path, code: str, shape: list[int], nbytes: int
) -> None:
    """It is not damage, and the other tensors can be imported."""
    file = written(tmp_path / "m.safetensors", code, shape, nbytes)
    with pytest.raises(holdfast.UnsupportedFormatError, match=rf"tensor 's' .* dtype '{code}'"):
        imported(file)
    assert imported(file, skip=["s"])["w"].tolist() == [0, 0]


def test_metadata_of_files_is_exported_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata of all files is kept. Of contradicting files, the first one wins, with a warning."""
    weight_map = {}
    for number, (name, rank) in enumerate([("a", "8"), ("b", "16")], 1):
        weight_map[name] = f"model-0000{number}-of-00002.safetensors"
        said = {"format": "pt", "ss_network_dim": rank, name: "layout\n"}
        save_file({name: torch.ones(2)}, tmp_path / weight_map[name], metadata=said)
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


@pytest.mark.parametrize("cut", [0, 4, 50, -1, None])
def test_file_of_another_length_is_damage(tmp_path: Path, cut: int | None) -> None:
    """A file that is shorter or longer than its header says is damage."""
    file = tmp_path / PLAIN
    save_file({"w": torch.ones(100)}, file)
    data = file.read_bytes()
    file.write_bytes(data + b"\0" if cut is None else data[:cut])
    with pytest.raises(holdfast.DamagedError, match="contradicts its header"):
        imported(file)


def test_huge_header_takes_no_memory(tmp_path: Path) -> None:
    """A length beyond the limit is refused before any read of that size."""
    file = tmp_path / PLAIN
    with file.open("wb") as f:
        f.write((200_000_000).to_bytes(8, "little"))
        f.truncate(300_000_000)
    with pytest.raises(holdfast.DamagedError, match="a header of"):
        imported(file)


def test_command(tmp_path: Path) -> None:
    """The command says what it made, or why it failed."""
    save_file({"w": torch.ones(256), "v": torch.ones(1)}, tmp_path / PLAIN)
    dest = tmp_path / "out"
    names = ["--rename", "*=model.*", "--skip", "v"]
    asked = ["import", str(tmp_path), str(dest), *names, "--step", "3"]
    out = run(*asked).stdout
    assert out.startswith(f"imported: file://{dest}: 1 tensor of 1 file, 1.00 KiB, 0.")
    assert "a checkpoint already exists" in run(*asked, status=2).stderr
    found = run_json(*asked, "--overwrite")
    assert (found["files"], found["tensors"], found["nbytes"]) == ([PLAIN], 1, 1024)
    assert [(c.step, c.tensors) for c in holdfast.list_checkpoints(dest)] == [(3, 1)]


IMAGE_NBYTES = 40_000
"""The model has seven images of this size."""


def model_of(number: int) -> dict[str, torch.Tensor]:
    """Return a model of eleven tensors of 20 kB, a small one, and one larger than an image."""
    tensors = {f"l{i}": torch.full((5000,), float(number * 100 + i)) for i in range(11)}
    return tensors | {"one": torch.tensor(float(number)), "big": torch.full((20_000,), 7.0)}


def as_safetensors(folder: Path, number: int) -> Path:
    """Save a model as one file in a folder; return the folder."""
    save_file(model_of(number), folder / "model.safetensors")
    return folder


def as_dcp(folder: Path, number: int) -> Path:
    """Save a model and a value with torch's distributed checkpoint; return the folder."""
    dcp.save(model_of(number) | {"step": number}, checkpoint_id=folder, no_dist=True)
    return folder


Make = Callable[[Path, int], Path]


class Destination:
    """Storage in memory with hooks that a test sets."""

    def __init__(self, serve: Serve) -> None:
        self.storage = MemoryDriver()
        self.before: Hook | None = None
        self.operations: list[tuple[str, str]] = []
        self.uri = serve(self._driver)

    def _driver(self, location: str) -> HookedDriver:
        before = self.before

        async def hook(operation: str, key: str) -> None:
            self.operations.append((operation, key))
            if before is not None:
                await before(operation, key)

        return HookedDriver(self.storage, before=hook)

    def imported(self, source: Path, **options: object) -> ImportReport:
        """Import in small images."""
        self.operations.clear()
        return holdfast.import_(source, self.uri, image_nbytes=IMAGE_NBYTES, **options)  # type: ignore[arg-type]

    def stopped(self, source: Path, images: int, **options: object) -> None:
        """Start an import that dies after ``images`` complete images."""
        self.before = dying_after(images)
        with pytest.raises(holdfast.StorageDownError):
            self.imported(source, **options)
        self.before = None

    def images(self) -> dict[str, bytes]:
        """Return the existing images by key."""
        found = engine.run(contents(self.storage))
        return {key: data for key, data in found.items() if key.endswith(".safetensors")}

    def written(self) -> int:
        """Return the number of multipart objects that the last import began to write."""
        return sum(operation == "create" for operation, _ in self.operations)

    def check(self, expected: object) -> None:
        """Check that the checkpoint is complete and as expected, without any other files."""
        with holdfast.open(self.uri) as c:
            assert c.verify().ok
            attempt = c.attempt
        assert difference(expected, holdfast.load(self.uri)) is None
        assert {key.split("/")[1] for key in self.images() if "/" in key} <= {attempt}


@pytest.fixture
def destination(serve: Serve) -> Destination:
    """Return an empty destination."""
    return Destination(serve)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [as_safetensors, as_dcp])
def test_an_import_goes_on_where_it_stopped(
    tmp_path: Path, destination: Destination, make: Make
) -> None:
    """A second import keeps the attempt and its complete images, and writes the others."""
    source = make(tmp_path, 1)
    destination.stopped(source, 3)
    there = destination.images()
    assert len(there) == 3
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(destination.uri)
    report = destination.imported(source, step=5)
    assert report.reused_nbytes == sum(map(len, there.values()))
    found = destination.images()
    assert destination.written() == len(found) - 1 - 3 > 0  # one is the manifest
    assert there.items() <= found.items()
    expected: dict[str, object] = dict(model_of(1))
    if make is as_dcp:
        expected["step"] = 1
    destination.check(expected)
    assert not any(
        key.endswith("attempt.json") for key in engine.run(contents(destination.storage))
    )


@pytest.mark.parametrize("hidden", [False, True])
def test_a_changed_source_is_imported_anew(
    tmp_path: Path, destination: Destination, hidden: bool
) -> None:
    """A file with other contents is imported again, even if its size and time are the same."""
    source = as_safetensors(tmp_path, 1)
    file = source / "model.safetensors"
    destination.stopped(source, 3)
    before = destination.images()
    status = file.stat()
    as_safetensors(source, 2)
    if hidden:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
    assert destination.imported(source).reused_nbytes == 0
    assert not before.keys() & destination.images().keys()
    destination.check(model_of(2))


def test_another_selection_is_imported_anew(tmp_path: Path, destination: Destination) -> None:
    """Other tensors, other names or another image size need other images."""
    source = as_safetensors(tmp_path, 1)
    destination.stopped(source, 3)
    assert destination.imported(source, skip=["l3"]).reused_nbytes == 0
    destination.stopped(source, 3, overwrite=True)
    assert destination.imported(source, rename={"*": "m.*"}, overwrite=True).reused_nbytes == 0
    destination.check({f"m.{name}": tensor for name, tensor in model_of(1).items()})


def test_an_image_that_is_cut_is_written_again(tmp_path: Path, destination: Destination) -> None:
    """An image of another size does not count as written."""
    source = as_safetensors(tmp_path, 1)
    destination.stopped(source, 3)
    key, data = sorted(destination.images().items())[1]
    engine.run(destination.storage.put(key, data[:-1]))
    destination.imported(source)
    assert destination.written() == 7 - 2
    destination.check(model_of(1))


def test_a_file_that_changes_meanwhile_leaves_nothing(
    tmp_path: Path, destination: Destination
) -> None:
    """No other import can use the images."""
    source = as_safetensors(tmp_path, 1)

    async def touch(operation: str, key: str) -> None:
        if operation == "create" and key.endswith("/3.safetensors"):
            os.utime(source / "model.safetensors", ns=(1, 1))

    destination.before = touch
    with pytest.raises(holdfast.DamagedError, match="changed while it was read"):
        destination.imported(source)
    assert not destination.images()


@pytest.mark.parametrize("same", [True, False], ids=["of the same", "of another"])
def test_of_two_imports_at_once_one_arrives(
    tmp_path: Path, destination: Destination, same: bool
) -> None:
    """The second import takes over complete images; the first then fails and stops writing."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    source = as_safetensors(tmp_path / "1", 1)
    other = source if same else as_safetensors(tmp_path / "2", 2)
    halted, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def halt(operation: str, key: str) -> None:
        if operation == "commit" and key.endswith("/3.safetensors"):
            halted.set()
            await asyncio.to_thread(go_on.wait, 60)

    def first() -> None:
        try:
            holdfast.import_(source, destination.uri, image_nbytes=IMAGE_NBYTES)
        except holdfast.HoldfastError as error:
            failed.append(error)

    destination.before = halt
    thread = threading.Thread(target=first)
    thread.start()
    assert halted.wait(60)
    destination.before = None
    there = destination.images()
    report = destination.imported(other)
    assert report.reused_nbytes == (sum(map(len, there.values())) if same else 0)
    go_on.set()
    thread.join(60)
    assert [type(error) for error in failed] == [holdfast.SupersededError]
    destination.check(model_of(1 if same else 2))
