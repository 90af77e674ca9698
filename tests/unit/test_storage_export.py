"""``holdfast.export`` and ``holdfast export``: models of Hugging Face's, bit for bit, and never torn."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.bits import difference, fresh_uri, random_bits
from support.copies import flipped, images
from support.drivers import HookedDriver
from support.given import Serve
from support.ranks import save_as_ranks, save_cut

import holdfast
from holdfast.cli import app
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.box import Box
from holdfast.storage.operations.reading.selection import chosen, renamed, rules_of

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
INDEX = "model.safetensors.index.json"


def saved(state: Any) -> str:
    """A new checkpoint of ``state``."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    return uri


def store(uri: str) -> MemoryDriver:
    """The storage of a checkpoint."""
    return MemoryDriver(uri.removeprefix("memory://"))


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader of such folders finds, by way of the index if there is one."""
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
    """Of every dtype, of any shape, in one file or many."""
    model = {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    model |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "odd": torch.ones(3).bool()}
    report = holdfast.export(saved({"m": model}), tmp_path, file_nbytes=file_nbytes)
    assert difference({f"m.{k}": v for k, v in model.items()}, model_in(tmp_path)) is None
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == sorted([*report.files, *([INDEX] if len(report.files) > 1 else [])])
    assert report.nbytes == sum((tmp_path / name).stat().st_size for name in report.files)
    if file_nbytes == 20_000:
        assert all((tmp_path / name).stat().st_size < 20_000 + 8192 for name in report.files)


def test_tensors_larger_than_the_windows_are_merged(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Whole again, from columns that ranks have stored; also where they are converted meanwhile."""
    array = rng.random((6, 1_500_001))
    uri = fresh_uri()
    columns = [(0, 500_000), (500_000, 500_000), (1_000_000, 500_001)]
    boxes = {
        "w": [Box((0, at), (6, width)) for at, width in columns],
        "x": [Box((at,), (width,)) for at, width in columns],
    }
    save_cut(store(uri), {"w": array, "x": array[0]}, boxes)
    holdfast.export(uri, tmp_path / "same", budget_nbytes=1 << 20)
    expected = {"w": torch.from_numpy(array), "x": torch.from_numpy(array[0])}
    assert difference(expected, model_in(tmp_path / "same")) is None
    holdfast.export(uri, tmp_path / "bf16", dtype="bf16")
    expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert difference(expected, model_in(tmp_path / "bf16")) is None


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_whole_chunks_are_read_where_they_are_written_from(
    tmp_path: Path, rng: np.random.Generator, scheme: str
) -> None:
    """From a storage that reads into given memory, and from one that hands over its own. Damage of
    such a chunk is found, and leaves no model."""
    model = {f"w{i}": random_bits(rng, torch.int32, (1 << 20, 3)) for i in range(4)}
    uri = saved(model)
    if scheme == "file":
        holdfast.copy(uri, tmp_path / "c")
        uri = str(tmp_path / "c")
    holdfast.export(uri, tmp_path / "out")
    assert difference(model, model_in(tmp_path / "out")) is None
    if scheme == "file":
        (image,) = (tmp_path / "c" / "data").rglob("*.safetensors")
        with image.open("r+b") as file:
            file.seek(20 << 20)
            file.write(b"damaged!")
        with pytest.raises(holdfast.DamagedError, match="are not what was written"):
            holdfast.export(uri, tmp_path / "none")
        assert not list((tmp_path / "none").rglob("*.safetensors"))


def test_names_are_chosen_and_changed(tmp_path: Path) -> None:
    """By patterns of whole names; the first rule that matches applies."""
    state = {"model": {"a._orig_mod.w": torch.ones(1), "b": torch.zeros(1)}, "step": 1}
    uri = saved(state)
    rules = {"model.*._orig_mod.*": "*.*", "model.*": "x.*"}
    holdfast.export(uri, tmp_path, only=["model.*"], rename=rules)
    assert list(model_in(tmp_path)) == ["a.w", "x.b"]


@pytest.mark.parametrize(
    ("only", "rename", "message"),
    [
        ((), {}, r"and these are not tensors: 'step', 'optim\.lr'"),
        (("*lr", "model.*"), {}, "no tensor has a name like '\\*lr'"),
        (("*l*",), {}, r"these are not tensors: 'optim\.lr'"),
        (("modle.*",), {}, "no tensor has a name like 'modle"),
        (("model.*",), {"optim.*": "*"}, "no tensor has a name like 'optim"),
        (("model.*",), {"model.*": "x"}, "'model.a' and 'model.b' would both be named 'x'"),
        (("model.*",), {"model.a": "model.b"}, "would both be named 'model.b'"),
        (("own",), {}, "'own' differs from rank to rank"),
        (("complex",), {}, "'complex' is of dtype complex128"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, only: Sequence[str], rename: dict[str, str], message: str
) -> None:
    """Before anything is written."""
    uri = fresh_uri()
    state = {
        "step": 1,
        "model": {"a": torch.ones(1), "b": torch.ones(2)},
        "optim": {"lr": 0.1},
        "complex": torch.ones(1, dtype=torch.complex128),
    }
    save_as_ranks(store(uri), [{**state, "own": torch.full((2,), float(rank))} for rank in (0, 1)])
    with pytest.raises(holdfast.UsageError, match=message):
        holdfast.export(uri, tmp_path / "x", only=only, rename=rename)
    assert not (tmp_path / "x").exists()


def test_a_reserved_name_is_refused_and_may_be_changed(tmp_path: Path) -> None:
    """A file with a tensor named __metadata__ would be opened by no reader."""
    uri = saved({"__metadata__": torch.ones(2), "w": torch.zeros(2)})
    with pytest.raises(holdfast.UsageError, match=r"named '__metadata__'.* rename="):
        holdfast.export(uri, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    holdfast.export(uri, tmp_path / "x", rename={"__metadata__": "meta"})
    assert model_in(tmp_path / "x")["meta"].tolist() == [1.0, 1.0]
    (image,) = images(store(uri))
    (tmp_path / "image").write_bytes(store(uri).objects[image][0])
    assert load_file(tmp_path / "image")["__metadata__#2"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_a_dtype_that_is_not_converted_is_refused_by_name(tmp_path: Path, form: Any) -> None:
    """Before anything is written; scales are converted."""
    one = torch.full((3,), 127, dtype=torch.uint8)
    uri = saved({"s": one.view(torch.float8_e8m0fnu), "q": one.view(torch.float4_e2m1fn_x2)})
    with pytest.raises(holdfast.UsageError, match=r"'q' is of dtype float4_e2m1fn_x2.* bfloat16"):
        holdfast.export(uri, tmp_path / "x", dtype="bf16", format=form)
    assert not (tmp_path / "x").exists()
    holdfast.export(uri, tmp_path / "y", dtype="bf16", only=["s"])
    assert model_in(tmp_path / "y")["s"].tolist() == [1.0, 1.0, 1.0]


def test_two_values_of_no_dimension_are_refused(tmp_path: Path) -> None:
    """safetensors counts values of four bits, and they would need a dimension."""
    uri = saved({"q": torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    with pytest.raises(holdfast.UsageError, match="tensor 'q' is two values"):
        holdfast.export(uri, tmp_path)


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """Under the first name that is chosen; the report and the metadata say which names are left
    out."""
    tensor = torch.randn(5)
    uri = saved({"embed": tensor, "head": tensor, "other": tensor[:2].clone()})
    report = holdfast.export(uri, tmp_path / "a")
    assert report.tied == {"head": "embed"}
    assert sorted(model_in(tmp_path / "a")) == ["embed", "other"]
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", "head": "embed"}
    holdfast.export(uri, tmp_path / "c", rename={"head": "format"})
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    report = holdfast.export(uri, tmp_path / "b", only=["head"])
    assert difference({"head": tensor}, model_in(tmp_path / "b")) is None
    assert report.tied == {}


def test_only_floats_are_converted_and_none_becomes_infinite(tmp_path: Path) -> None:
    """What is infinite stays so; what would become so is an error that names the tensor, and leaves
    no file."""
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
    with pytest.raises(holdfast.UsageError, match="cannot be converted to 'int8'"):
        holdfast.export(uri, tmp_path / "b", dtype="int8")


def test_damage_is_not_exported(tmp_path: Path) -> None:
    """The error names the tensor; what was written before is removed."""
    uri = saved({"a": torch.ones(1000), "b": torch.ones(200_000)})
    flipped(store(uri), images(store(uri))[0], 800_000)
    with pytest.raises(holdfast.DamagedError, match="'b'"):
        holdfast.export(uri, tmp_path, file_nbytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Unless an earlier export is to be replaced: of which nothing is left then. A checkpoint is
    never touched."""
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


def test_the_index_is_written_last_and_goes_first(serve: Serve) -> None:
    """Whenever a process ends, a reader that follows an index finds all of one model."""
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


def test_any_storage_will_do() -> None:
    """The destination is a URI as any other."""
    uri = saved({"x": torch.ones(3)})
    dest = fresh_uri()
    report = holdfast.export(uri, dest)
    assert report.files == ("model.safetensors",)
    assert report.uri == dest


@pytest.mark.parametrize("text", ["", "a", "=b", "a=", "a=*", "*=**"])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    """A rule is OLD=NEW; NEW has no star that OLD has not."""
    with pytest.raises(holdfast.UsageError):
        rules_of([text])


def test_patterns_match_whole_names() -> None:
    """A star is any text, also none and with dots; all else is what it is."""
    names = ["a.b", "a", "xa.b", "a+b"]
    assert chosen(names, ["a.*"]) == ["a.b"]
    assert chosen(names, ["*a*"]) == names
    assert chosen(names, ["a+b", "a"]) == ["a", "a+b"]
    assert renamed(["l.0.q.w", "n"], {"l.*.q.*": "h.*.q_proj.*"}) == {
        "l.0.q.w": "h.0.q_proj.w",
        "n": "n",
    }


def test_two_names_may_be_exchanged() -> None:
    """A clash is one among new names only."""
    assert renamed(["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}


def run(*arguments: str, status: int) -> str:
    """What a command prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = app.run(arguments)
    assert ended == status, out.getvalue() + err.getvalue()
    return out.getvalue() + err.getvalue()


def test_the_command_exports(tmp_path: Path) -> None:
    """It says what it wrote, and what is tied; or why it did not."""
    tensor = torch.randn(100)
    uri = saved({"model": {"w": tensor, "v": tensor}, "step": 1})
    chosen = ["export", uri, str(tmp_path), "--only", "model.*", "--rename", "model.*=*"]
    out = run(*chosen, "--shard", "1KiB", "--dtype", "bf16", status=0)
    lines = out.splitlines()
    assert lines[0] == "v is tied to w, whose bytes are written once"
    assert lines[1].startswith(f"exported: file://{tmp_path}: 1 tensor in 1 file, 4.20 KiB, 0.")
    assert difference({"w": tensor.bfloat16()}, model_in(tmp_path)) is None
    assert "the folder already has a model or a checkpoint" in run(*chosen, status=2)
    found = json.loads(run(*chosen, "--overwrite", "--json", status=0))
    assert (found["files"], found["tensors"], found["tied"]) == (
        ["model.safetensors"],
        1,
        {"v": "w"},
    )
    with pytest.raises(SystemExit):
        run(*chosen, "--shard", "much", status=2)
