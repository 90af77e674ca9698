"""Exporting files of ``torch.save``: torch reads the same bits, with weights only, and never half a
file."""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, random_bits
from support.copies import flipped, images

import holdfast
from holdfast.cli import app
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format import torch_archive
from holdfast.storage.format.model_folder import ModelTensor

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64,
]  # fmt: skip


def saved(state: Any) -> str:
    """A new checkpoint of ``state``."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    return uri


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_the_same_bits(tmp_path: Path, rng: np.random.Generator, mmap: bool) -> None:
    """Of every dtype and any shape, large tensors among them; by the names that are asked for."""
    model = {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
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


def test_large_records_begin_with_a_page(tmp_path: Path, rng: np.random.Generator) -> None:
    """In a file of torch, and in a folder of DCP; so they are read without a copy. Bits are the
    same, where records of all sizes lie between them."""
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


def test_tied_tensors_share_their_memory(tmp_path: Path) -> None:
    """As torch would save them; all names are there."""
    tensor = torch.randn(5, 3)
    report = holdfast.export(saved({"a": tensor, "b": tensor}), tmp_path / "x.pt", format="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert difference({"a": tensor, "b": tensor}, loaded) is None
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert report.tied == {"b": "a"}


def test_there_and_back(tmp_path: Path, rng: np.random.Generator) -> None:
    """What was exported is imported to the same state; converted if that was asked for."""
    state = {str(dtype): random_bits(rng, dtype, (7, 11)) for dtype in DTYPES}
    uri = saved(state)
    holdfast.export(uri, tmp_path / "x.pt", format="torch")
    back = fresh_uri()
    holdfast.import_(tmp_path / "x.pt", back)
    assert holdfast.diff(uri, back).equal
    holdfast.export(saved({"w": torch.ones(3)}), tmp_path / "y.pt", format="torch", dtype="fp16")
    assert torch.load(tmp_path / "y.pt", weights_only=True)["w"].dtype == torch.float16


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    """There is no time and no number of chance in them; elements begin at multiples of 64."""
    for name in ("a.pt", "b.pt"):
        uri = saved({"w": torch.arange(3), "v": torch.arange(100)})
        holdfast.export(uri, tmp_path / name, format="torch")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    data = (tmp_path / "a.pt").read_bytes()
    assert data.index(torch.arange(100).numpy().tobytes()) % 64 == 0


def test_records_and_offsets_of_any_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes of four gigabytes and more are written where zip files have them; here from 300 bytes
    on, which any reader of zip files understands as well."""
    monkeypatch.setattr(torch_archive, "_FULL32_FROM", 300)
    state = {str(i): torch.full((i * 40,), float(i)) for i in range(1, 5)}
    holdfast.export(saved(state), tmp_path / "x.pt", format="torch")
    assert difference(state, torch.load(tmp_path / "x.pt", weights_only=True)) is None
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        sizes = [archive.getinfo(f"archive/data/{i}").file_size for i in range(4)]
    assert sizes == [160, 320, 480, 640]


def test_a_layout_of_terabytes() -> None:
    """Sizes are numbers until something is written."""
    tensors = [ModelTensor(str(i), "float32", 4, (1 << 38,)) for i in range(3)]
    file = torch_archive.torch_file("x.pt", tensors, {})
    assert file.nbytes > 3 << 40


def test_a_file_that_is_there_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """And at once: after an error the old one is still there."""
    file = tmp_path / "x.pt"
    holdfast.export(saved({"w": torch.ones(1)}), file, format="torch")
    uri = saved({"w": torch.zeros(100_000)})
    with pytest.raises(holdfast.ExistsError, match="the file already exists"):
        holdfast.export(uri, file, format="torch")
    damaged = saved({"w": torch.zeros(100_000)})
    storage = MemoryDriver(damaged.removeprefix("memory://"))
    flipped(storage, images(storage)[0], 100_000)
    with pytest.raises(holdfast.DamagedError):
        holdfast.export(damaged, file, format="torch", overwrite=True)
    assert torch.load(file, weights_only=True)["w"].tolist() == [1.0]
    holdfast.export(uri, file, format="torch", overwrite=True)
    assert torch.load(file, weights_only=True)["w"].numel() == 100_000


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    """By name."""
    with pytest.raises(holdfast.UsageError, match="'w' is of dtype bits8"):
        holdfast.export(
            saved({"w": torch.ones(1, dtype=torch.uint8).view(torch.bits8)}),
            tmp_path / "x",
            format="torch",
        )
    with pytest.raises(holdfast.UsageError, match="not a format"):
        holdfast.export(saved({"w": torch.ones(1)}), tmp_path / "x", format="onnx")  # type: ignore[arg-type]


def test_the_command_exports(tmp_path: Path) -> None:
    """With --format torch, to a file."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        uri = saved({"w": torch.ones(3)})
        assert app.run(["export", uri, str(tmp_path / "x.pt"), "--format", "torch"]) == 0
    assert "1 tensor in 1 file" in out.getvalue()
    assert torch.load(tmp_path / "x.pt", weights_only=True)["w"].tolist() == [1.0, 1.0, 1.0]
