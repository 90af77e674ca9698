"""``holdfast.export`` and ``holdfast export``: Hugging Face models, files of ``torch.save``, and
folders of torch's distributed checkpoint (DCP), bit for bit, and never torn."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from support.bits import difference, fresh_uri, random_bits, saved
from support.commands import run, run_json
from support.copies import flipped, images
from support.drivers import HookedDriver, storage_at
from support.given import Serve
from support.importing import built_by_dcp
from support.ranks import save_as_ranks, save_cut
from torch.distributed.checkpoint import FileSystemReader

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.box import Box
from holdfast.storage.format.part import Selection
from holdfast.storage.operations.conversion import dcp_export
from holdfast.storage.operations.conversion.export import Format
from holdfast.storage.operations.reading.selection import chosen, renamed, rules_of, without

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
TORCH_DTYPES = [*DTYPES, torch.uint32, torch.uint64, torch.complex64]
DCP_DTYPES = [*DTYPES[1:], torch.complex64]
INDEX = "model.safetensors.index.json"


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a reader of a model finds, through its index if it has one."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as f:
            found[name] = f.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


@pytest.mark.parametrize("file_nbytes", [5_000_000_000, 20_000, 1])
def test_safetensors_reads_the_same_bits(
    tmp_path: Path, rng: np.random.Generator, file_nbytes: int
) -> None:
    """Tensors of every dtype and shape are exported, in one file or many."""
    model = {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    model |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "odd": torch.ones(3).bool()}
    report = holdfast.export(saved({"m": model}), tmp_path, file_nbytes=file_nbytes)
    assert difference({f"m.{k}": v for k, v in model.items()}, model_in(tmp_path)) is None
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == sorted([*report.files, *([INDEX] if len(report.files) > 1 else [])])
    assert report.nbytes == sum((tmp_path / name).stat().st_size for name in report.files)
    if file_nbytes == 20_000:
        assert all((tmp_path / name).stat().st_size < 20_000 + 8192 for name in report.files)


def test_tensors_larger_than_a_window_are_merged(tmp_path: Path, rng: np.random.Generator) -> None:
    """Columns stored by ranks become whole tensors again, also if they are converted."""
    array = rng.random((6, 1_500_001))
    uri = fresh_uri()
    columns = [(0, 500_000), (500_000, 500_000), (1_000_000, 500_001)]
    boxes = {
        "w": [Box((0, at), (6, width)) for at, width in columns],
        "x": [Box((at,), (width,)) for at, width in columns],
    }
    save_cut(storage_at(uri), {"w": array, "x": array[0]}, boxes)
    holdfast.export(uri, tmp_path / "same", budget_nbytes=1 << 20)
    expected = {"w": torch.from_numpy(array), "x": torch.from_numpy(array[0])}
    assert difference(expected, model_in(tmp_path / "same")) is None
    holdfast.export(uri, tmp_path / "bf16", dtype="bf16")
    expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert difference(expected, model_in(tmp_path / "bf16")) is None


def test_whole_chunks_are_read_in_place(tmp_path: Path, rng: np.random.Generator) -> None:
    """Chunks are read into the memory from which they are written. Damage leaves no model."""
    model = {f"w{i}": random_bits(rng, torch.int32, (1 << 20, 3)) for i in range(4)}
    uri = tmp_path / "c"
    holdfast.save(uri, model)
    holdfast.export(uri, tmp_path / "out")
    assert difference(model, model_in(tmp_path / "out")) is None
    (image,) = (uri / "data").rglob("*.safetensors")
    with image.open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"damaged!")
    with pytest.raises(holdfast.DamagedError, match=r"not what was written.* 'w\d'"):
        holdfast.export(uri, tmp_path / "none", file_nbytes=1)
    assert not list((tmp_path / "none").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("only", "rename", "message"),
    [
        ((), {}, r"and these are not tensors: 'step', 'optim\.lr'"),
        (["*lr", "model.*"], {}, "no tensor has a name like '\\*lr'"),
        (("model", "optim"), {}, r"like 'model\.optim'. A tuple has the keys of one name, a list"),
        ("modle", {}, "Did you mean 'model' instead of 'modle'"),
        (("*l*",), {}, r"these are not tensors: 'optim\.lr'"),
        (("modle.*",), {}, "no tensor has a name like 'modle"),
        (("model.*",), {"optim.*": "*"}, "no tensor has a name like 'optim"),
        (("model.*",), {"model.*": "x"}, "'model.a' and 'model.b' would both be named 'x'"),
        (("model.*",), {"model.a": "model.b"}, "would both be named 'model.b'"),
        (("own",), {}, "'own' differs from rank to rank"),
        (("complex",), {}, "'complex' is of dtype complex128"),
        (("packed",), {}, "tensor 'packed' is two values"),
    ],
)
def test_unsuitable_selection_is_refused(
    tmp_path: Path, only: Selection, rename: dict[str, str], message: str
) -> None:
    """The error names the tensor, before anything is written."""
    uri = fresh_uri()
    state = {
        "step": 1,
        "model": {"a": torch.ones(1), "b": torch.ones(2)},
        "optim": {"lr": 0.1},
        "complex": torch.ones(1, dtype=torch.complex128),
        "packed": torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    save_as_ranks(
        storage_at(uri), [{**state, "own": torch.full((2,), float(rank))} for rank in (0, 1)]
    )
    with pytest.raises(holdfast.UsageError, match=message):
        holdfast.export(uri, tmp_path / "x", only=only, rename=rename)
    assert not (tmp_path / "x").exists()


def test_one_safetensors_file(tmp_path: Path) -> None:
    """It holds everything, whatever the size limit of files in a folder, and its source's metadata.
    It is replaced only on request. Its neighbours stay."""
    tensor = torch.randn(5)
    state = {"embed": tensor, "head": tensor, "other": tensor[:2].clone()}
    holdfast.export(saved(state), tmp_path / "a.safetensors", format="safetensors", file_nbytes=1)
    assert (
        difference({"embed": tensor, "other": tensor[:2]}, load_file(tmp_path / "a.safetensors"))
        is None
    )
    uri = fresh_uri()
    holdfast.import_(tmp_path / "a.safetensors", uri)
    for overwrite in (False, True):
        report = holdfast.export(
            uri, tmp_path / "b.safetensors", format="safetensors", only="other", overwrite=overwrite
        )
        assert report.files == ("b.safetensors",)
        with safe_open(tmp_path / "b.safetensors", "pt") as f:
            assert f.metadata() == {"format": "pt", "head": "embed"}
            assert [*f.keys()] == ["other"]
    with pytest.raises(holdfast.ExistsError, match="the file already exists"):
        holdfast.export(uri, tmp_path / "b.safetensors", format="safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_reserved_name_is_refused(tmp_path: Path) -> None:
    """No reader opens a file with a tensor named __metadata__, but a rename helps."""
    uri = saved({"__metadata__": torch.ones(2), "w": torch.zeros(2)})
    with pytest.raises(holdfast.UsageError, match=r"named '__metadata__'.* rename="):
        holdfast.export(uri, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    holdfast.export(uri, tmp_path / "x", rename={"__metadata__": "meta"})
    assert model_in(tmp_path / "x")["meta"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_unconvertible_dtype_is_refused(tmp_path: Path, form: Any) -> None:
    """The error names the tensor before anything is written; scales are converted."""
    one = torch.full((3,), 127, dtype=torch.uint8)
    uri = saved({"s": one.view(torch.float8_e8m0fnu), "q": one.view(torch.float4_e2m1fn_x2)})
    with pytest.raises(holdfast.UsageError, match=r"'q' is of dtype float4_e2m1fn_x2.* bfloat16"):
        holdfast.export(uri, tmp_path / "x", dtype="bf16", format=form)
    with pytest.raises(holdfast.UsageError, match="cannot be converted to 'int8'"):
        holdfast.export(uri, tmp_path / "x", dtype="int8", format=form)
    assert not (tmp_path / "x").exists()
    holdfast.export(uri, tmp_path / "y", dtype="bf16", only=["s"])
    assert model_in(tmp_path / "y")["s"].tolist() == [1.0, 1.0, 1.0]


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """The first selected name is written; report and metadata name the others."""
    tensor = torch.randn(5)
    uri = saved({"embed": tensor, "head": tensor, "other": tensor[:2].clone()})
    report = holdfast.export(uri, tmp_path / "a")
    assert report.tied == {"head": "embed"}
    assert sorted(model_in(tmp_path / "a")) == ["embed", "other"]
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", "head": "embed"}
    report = holdfast.export(uri, tmp_path / "b", only=["head"])
    assert difference({"head": tensor}, model_in(tmp_path / "b")) is None
    assert report.tied == {}


def test_only_floats_are_converted(tmp_path: Path) -> None:
    """A number that would become infinite is an error that names the tensor and leaves no file."""
    state = {
        "f": torch.tensor([1.0, math.inf, -0.0, 1e-9]),
        "i": torch.arange(3),
        "h": torch.ones(2, dtype=torch.float8_e5m2),
    }
    holdfast.export(saved(state), tmp_path / "a", dtype="fp16")
    expected = {"f": state["f"].half(), "i": state["i"], "h": torch.ones(2, dtype=torch.float16)}
    assert difference(expected, model_in(tmp_path / "a")) is None
    uri = saved({**state, "large": torch.tensor([1e20])})
    with pytest.raises(holdfast.UsageError, match="'large' has numbers that are too large"):
        holdfast.export(uri, tmp_path / "b", dtype="float16", file_nbytes=16)
    assert list((tmp_path / "b").iterdir()) == []


def test_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """With overwrite, nothing of the earlier export remains. A checkpoint is never replaced."""
    many = saved({str(i): torch.ones(2) for i in range(3)})
    one = saved({"x": torch.zeros(1)})
    holdfast.export(many, tmp_path, file_nbytes=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        holdfast.ExistsError, match="the folder already has a model or a checkpoint"
    ):
        holdfast.export(one, tmp_path)
    assert len(model_in(tmp_path)) == 3
    holdfast.export(one, tmp_path, overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    holdfast.save(tmp_path / "c", {"x": 1, "y": torch.ones(1)})
    with pytest.raises(holdfast.ExistsError):
        holdfast.export(one, tmp_path / "c", overwrite=True)
    assert holdfast.load(tmp_path / "c")["x"] == 1


def test_index_is_written_last_and_deleted_first(serve: Serve) -> None:
    """A reader that follows an index finds all files of one model at any moment."""
    many = saved({str(i): torch.full((2,), i) for i in range(3)})
    events: list[str] = []

    async def note(operation: str, key: str) -> None:
        if operation in ("create", "delete", "put"):
            events.append(f"{operation} {key}")

    dest = serve(lambda path: HookedDriver(MemoryDriver(path), before=note))
    holdfast.export(many, dest, file_nbytes=1)
    events.clear()
    holdfast.export(many, dest, file_nbytes=1, overwrite=True)
    assert events[0] == f"delete {INDEX}"
    assert events[-1] == f"put {INDEX}"
    assert len(events) == 1 + 4 + 3 + 1


@pytest.mark.parametrize("text", ["a", "=b", "a=", "*=**"])
def test_malformed_rule_is_refused(text: str) -> None:
    """A rule is OLD=NEW, and NEW has no more stars than OLD."""
    with pytest.raises(holdfast.UsageError):
        rules_of([text])


@pytest.mark.parametrize("only", ["model", ("model",), ["model"], [("model",)], ["model.*"]])
def test_a_part_has_one_name_everywhere(tmp_path: Path, only: Selection) -> None:
    """Export, import and shares select the items that a load of that part returns."""
    uri = saved({"model": {"a": {"w": torch.ones(2)}}, "modeling": torch.zeros(1)})
    part = {
        f"model.a.{name}": tensor for name, tensor in holdfast.load(uri, only="model.a").items()
    }
    with holdfast.open(uri) as checkpoint:
        assert difference(part, dict(checkpoint.read_shares(only))) is None
    forms: dict[str, Format] = {
        "hf": "hf", "m.safetensors": "safetensors", "m.pt": "torch", "dcp": "dcp",
    }  # fmt: skip
    for name, form in forms.items():
        file = tmp_path / name
        holdfast.export(uri, file, format=form, only=only)
        imported = fresh_uri()
        holdfast.import_(file, imported)
        with holdfast.open(imported) as checkpoint:
            assert checkpoint.tensors.keys() == part.keys()
    holdfast.export(uri, tmp_path / "whole")
    holdfast.import_(tmp_path / "whole", fresh_uri(), only=only)
    holdfast.import_(tmp_path / "whole", imported, skip=only, overwrite=True)
    assert holdfast.load(imported).keys() == {"modeling"}


def test_a_name_selects_everything_below_it() -> None:
    """A star stands for any text, with dots or empty; everything else is literal."""
    names = ["a.b", "a", "xa.b", "a+b", "a.0.b", "ab"]
    assert chosen(names, []) == names
    assert chosen(names, "a") == ["a.b", "a", "a.0.b"]
    assert chosen(names, ["a.*"]) == ["a.b", "a.0.b"]
    assert chosen(names, ["*a*"]) == names
    assert chosen(names, ["a+b", "xa"]) == ["xa.b", "a+b"]
    assert chosen(names, ("a", 0)) == chosen(names, [("a", 0)]) == chosen(names, "a.0") == ["a.0.b"]
    assert chosen(names, "a*b") == ["a.b", "a+b", "a.0.b", "ab"]
    assert without(names, "a") == ["xa.b", "a+b", "ab"]
    assert without(names, []) == names


def test_rules_match_whole_names() -> None:
    """Each star of the new name stands for the text that its star matched."""
    assert renamed(["l.0.q.w", "n"], {"l.*.q.*": "h.*.q_proj.*"}) == {
        "l.0.q.w": "h.0.q_proj.w",
        "n": "n",
    }
    assert renamed(["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}


def test_command(tmp_path: Path) -> None:
    """The command reports its output and tied tensors, or the reason of its failure."""
    tensor = torch.randn(100)
    uri = saved({"model": {"w": tensor, "v": tensor}, "step": 1})
    chosen = ["export", uri, str(tmp_path), "--only", "model.*", "--rename", "model.*=*"]
    out = run(*chosen, "--shard", "1KiB", "--dtype", "bf16").stdout
    lines = out.splitlines()
    assert lines[0] == "v is tied to w, whose bytes are written once"
    assert lines[1].startswith(f"exported: file://{tmp_path}: 1 tensor in 1 file, 4.20 KiB, 0.")
    assert difference({"w": tensor.bfloat16()}, model_in(tmp_path)) is None
    assert "the folder already has a model or a checkpoint" in run(*chosen, status=2).stderr
    found = run_json(*chosen, "--overwrite")
    assert (found["files"], found["tensors"], found["tied"]) == (
        ["model.safetensors"],
        1,
        {"v": "w"},
    )


# Files of torch.save


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_the_same_bits(tmp_path: Path, rng: np.random.Generator, mmap: bool) -> None:
    """Tensors of every dtype and shape, also large ones, are exported under new names."""
    model = {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in TORCH_DTYPES}
    model |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "é": torch.ones(1).bool()}
    model |= {"big": random_bits(rng, torch.int16, (9_000_001,))}
    uri = saved({"model": model, "step": 1})
    file = tmp_path / "new" / "model.pt"
    rules = {"model.*": "*"}
    report = holdfast.export(
        uri, file, format="torch", only=["model.*"], rename=rules, budget_nbytes=1 << 20
    )
    assert difference(model, torch.load(file, weights_only=True, mmap=mmap)) is None
    assert (report.files, report.nbytes) == (("model.pt",), file.stat().st_size)


def test_large_records_are_page_aligned(tmp_path: Path, rng: np.random.Generator) -> None:
    """Page-aligned records are read without a copy, in a torch file and in a DCP folder."""
    model = {f"small {i}": random_bits(rng, torch.uint8, (i * 37,)) for i in range(1, 5)}
    model |= {f"large {i}": random_bits(rng, torch.int16, (33_000 + i,)) for i in range(5)}
    uri = saved(model)
    holdfast.export(uri, tmp_path / "x.pt", format="torch")
    holdfast.export(uri, tmp_path / "x", format="dcp")
    assert difference(model, torch.load(tmp_path / "x.pt", weights_only=True)) is None
    for file in (tmp_path / "x.pt", tmp_path / "x" / "holdfast-0.distcp"):
        content = file.read_bytes()
        for name, tensor in model.items():
            begin = content.find(tensor.numpy().tobytes())
            assert begin >= 0
            assert begin % (4096 if "large" in name else 64) == 0, name


def test_torch_files_are_reproducible(tmp_path: Path) -> None:
    """Equal tensors make equal files. All tied ones are in the file, and share memory."""
    tensor = torch.randn(5, 3)
    for name in ("a.pt", "b.pt"):
        uri = saved({"a": tensor, "b": tensor})
        report = holdfast.export(uri, tmp_path / name, format="torch")
        assert report.tied == {"b": "a"}
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert difference({"a": tensor, "b": tensor}, loaded) is None
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_records_of_any_size(tmp_path: Path) -> None:
    """All sizes and offsets are written in 64 bits, which sizes above four gigabytes require."""
    state = {str(i): torch.full((i * 40,), float(i)) for i in range(1, 5)}
    holdfast.export(saved(state), tmp_path / "x.pt", format="torch")
    assert difference(state, torch.load(tmp_path / "x.pt", weights_only=True)) is None
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        sizes = [archive.getinfo(f"archive/data/{i}").file_size for i in range(4)]
    assert sizes == [160, 320, 480, 640]


def test_torch_file_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """The new file replaces the old one at once; after an error the old one is still there."""
    file = tmp_path / "x.pt"
    holdfast.export(saved({"w": torch.ones(1)}), file, format="torch")
    uri = saved({"w": torch.zeros(100_000)})
    with pytest.raises(holdfast.ExistsError, match="the file already exists"):
        holdfast.export(uri, file, format="torch")
    with pytest.raises(holdfast.UsageError, match="not a format"):
        holdfast.export(uri, file, format="onnx")  # type: ignore[arg-type]
    damaged = saved({"w": torch.zeros(100_000)})
    storage = storage_at(damaged)
    flipped(storage, images(storage)[0], 100_000)
    with pytest.raises(holdfast.DamagedError):
        holdfast.export(damaged, file, format="torch", overwrite=True)
    assert torch.load(file, weights_only=True)["w"].tolist() == [1.0]
    holdfast.export(uri, file, format="torch", overwrite=True)
    assert torch.load(file, weights_only=True)["w"].numel() == 100_000


# Folders of torch's distributed checkpoint


def test_dcp_reads_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors of every dtype and shape, lists, tuples and values come back in their places."""
    state = {
        "model": {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DCP_DTYPES},
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "optim": {
            "groups": [{"lr": 0.5, "params": [0, 1]}],
            "state": [torch.ones(2), torch.ones(3)],
        },
        "pair": (1, [2.5, True]),
        "array": np.arange(5),
        "step": 7,
    }
    report = holdfast.export(saved(state), tmp_path / "new", format="dcp")
    found = built_by_dcp(FileSystemReader(tmp_path / "new"))
    assert difference(state, found) is None
    assert (report.files, report.tensors) == (("holdfast-0.distcp",), len(DCP_DTYPES) + 5)
    assert report.nbytes == (tmp_path / "new" / "holdfast-0.distcp").stat().st_size


def test_large_tensors_become_several_items(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items consist of whole rows, and DCP loads them into one tensor."""
    monkeypatch.setattr(dcp_export, "ITEM_NBYTES", 1000)
    state = {
        "a": random_bits(rng, torch.float32, (77, 13)),
        "b": random_bits(rng, torch.int16, (5, 999)),
    }
    report = holdfast.export(saved(state), tmp_path, format="dcp", file_nbytes=3200)
    sizes = [(tmp_path / file).stat().st_size for file in report.files]
    assert len(sizes) > 1
    assert max(sizes) <= 3200
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert difference(state, into) is None
    chunks = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["a"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(19, 13)] * 4 + [(1, 13)]


def test_dcp_items_are_renamed_and_converted(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selection, names, ties and dtypes apply; only an export of ours is replaced, if asked."""
    monkeypatch.setattr(dcp_export, "ITEM_NBYTES", 1 << 20)
    model = {
        "w": torch.from_numpy(rng.standard_normal((3_000_001, 3), np.float32)),
        "n": torch.ones(3).long(),
    }
    uri = saved({"model": model | {"tied": model["w"]}, "optim": {"lr": 1}, "step": 3})
    options: dict[str, Any] = {
        "format": "dcp",
        "only": ["model.*", "step"],
        "rename": {"model.*": "*"},
        "dtype": "bf16",
    }
    (tmp_path / "notes.txt").write_text("mine")
    holdfast.export(uri, tmp_path, format="dcp", file_nbytes=1)
    with pytest.raises(holdfast.ExistsError, match="already has a model"):
        holdfast.export(uri, tmp_path, **options)
    report = holdfast.export(uri, tmp_path, **options, overwrite=True)
    expected = {"w": model["w"].bfloat16(), "n": model["n"], "step": 3}
    expected["tied"] = expected["w"]
    assert difference(expected, built_by_dcp(FileSystemReader(tmp_path))) is None
    assert report.tied == {"tied": "w"}
    assert report.nbytes < 1.1 * expected["w"].nbytes
    assert {p.name for p in tmp_path.iterdir()} == {".metadata", "holdfast-0.distcp", "notes.txt"}
    (tmp_path / "theirs.distcp").touch()
    with pytest.raises(holdfast.ExistsError, match="already has a model"):
        holdfast.export(uri, tmp_path, **options, overwrite=True)
