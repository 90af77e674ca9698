"""Exporting folders of torch's distributed checkpoint (DCP): DCP loads the same bits, and never half
a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference, fresh_uri, random_bits
from support.copies import flipped, images
from support.dcp_tasks import in_order
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.cli import app
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.conversion import dcp_export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def saved(state: Any) -> str:
    """A new checkpoint of ``state``."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    return uri


def loaded(folder: Path) -> dict[str, Any]:
    """All that DCP finds in a folder."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, FileSystemReader(folder), planner=planner, no_dist=True)
    return state


def test_dcp_reads_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of every dtype and any shape; lists, tuples and values are where they were."""
    state = {
        "model": {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES},
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
    found = loaded(tmp_path / "new")
    assert difference(in_order(state), in_order(found)) is None
    assert (report.files, report.tensors) == (("holdfast-0.distcp",), len(DTYPES) + 5)
    assert report.nbytes == (tmp_path / "new" / "holdfast-0.distcp").stat().st_size


def test_large_tensors_are_several_items_in_several_files(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by rows; DCP loads a slice of them into a tensor that is there."""
    monkeypatch.setattr(dcp_export, "ITEM_NBYTES", 1000)
    state = {
        "a": random_bits(rng, torch.float32, (77, 13)),
        "b": random_bits(rng, torch.int16, (5, 999)),
    }
    report = holdfast.export(saved(state), tmp_path, format="dcp", file_nbytes=3000)
    sizes = [(tmp_path / file).stat().st_size for file in report.files]
    assert len(sizes) > 1
    assert max(sizes) <= 3000
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert difference(state, into) is None
    chunks = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["a"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(19, 13)] * 4 + [(1, 13)]


def test_names_are_chosen_and_changed_and_tensors_converted(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in other exports; items begin anywhere in a file, and are cut by windows anywhere."""
    monkeypatch.setattr(dcp_export, "ITEM_NBYTES", 1 << 20)
    model = {
        "w": torch.from_numpy(rng.standard_normal((3_000_001, 3), np.float32)),
        "n": torch.ones(3).long(),
    }
    uri = saved({"model": model, "optim": {"lr": 1}, "step": 3})
    names = ["model.*", "step"]
    holdfast.export(uri, tmp_path, format="dcp", only=names, rename={"model.*": "*"}, dtype="bf16")
    expected = {"w": model["w"].bfloat16(), "n": model["n"], "step": 3}
    assert difference(in_order(expected), in_order(loaded(tmp_path))) is None


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """All names are there."""
    tensor = torch.randn(500, 3)
    report = holdfast.export(saved({"a": tensor, "b": tensor}), tmp_path, format="dcp")
    assert difference({"a": tensor, "b": tensor}, loaded(tmp_path)) is None
    assert report.tied == {"b": "a"}
    assert report.nbytes < 2 * 6000


def test_a_model_and_its_optimizer_go_there_and_back(tmp_path: Path) -> None:
    """DCP's own functions load them, and an import makes the same checkpoint again."""
    model = torch.nn.Linear(30, 50)
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(30)).sum().backward()
    optim.step()
    uri = saved({"model": model, "optim": optim})
    holdfast.export(uri, tmp_path, format="dcp")
    other = torch.nn.Linear(30, 50)
    other_optim = torch.optim.AdamW(other.parameters())
    model_state, optim_state = dcp.state_dict.get_state_dict(other, other_optim)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    dcp.state_dict.set_state_dict(
        other, other_optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
    assert difference(optim.state_dict()["state"], other_optim.state_dict()["state"]) is None
    back = fresh_uri()
    holdfast.import_(tmp_path, back)
    assert holdfast.diff(uri, back).equal


def test_any_storage(rng: np.random.Generator) -> None:
    """The folder need not be local."""
    state = {"w": random_bits(rng, torch.float32, (51, 17)), "step": 1}
    folder = fresh_uri()
    holdfast.export(saved(state), folder, format="dcp")
    back = fresh_uri()
    holdfast.import_(folder, back)
    assert difference(in_order(state), in_order(holdfast.load(back))) is None


def test_a_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    """Of its files none is left; other files stay, and those that DCP has written itself."""
    uri = saved({"w": torch.ones(300), "v": torch.ones(300)})
    (tmp_path / "notes.txt").write_text("mine")
    holdfast.export(uri, tmp_path, format="dcp", file_nbytes=1)
    with pytest.raises(holdfast.ExistsError, match="already has a model"):
        holdfast.export(uri, tmp_path, format="dcp")
    holdfast.export(uri, tmp_path, format="dcp", only=["w"], overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".metadata",
        "holdfast-0.distcp",
        "notes.txt",
    ]
    theirs = tmp_path / "theirs"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=theirs, no_dist=True)
    with pytest.raises(holdfast.ExistsError, match="already has a model"):
        holdfast.export(uri, theirs, format="dcp", overwrite=True)


def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    """Neither files nor .metadata."""
    uri = saved({"w": torch.ones(100_000), "step": 1})
    storage = MemoryDriver(uri.removeprefix("memory://"))
    flipped(storage, images(storage)[0], 100_000)
    with pytest.raises(holdfast.DamagedError):
        holdfast.export(uri, tmp_path, format="dcp")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_by_name(tmp_path: Path) -> None:
    """Before anything is written."""
    uri = saved({"w": torch.ones(1, dtype=torch.uint8).view(torch.bits8), "v": 1})
    with pytest.raises(holdfast.UsageError, match="'w' is of dtype bits8"):
        holdfast.export(uri, tmp_path, format="dcp")
    with pytest.raises(holdfast.UsageError, match="no tensor has a name like 'x'"):
        holdfast.export(uri, tmp_path, format="dcp", only=["x"])
    assert list(tmp_path.iterdir()) == []


def test_the_commands_go_there_and_back(tmp_path: Path) -> None:
    """With values; --skip leaves some out."""
    uri = saved({"w": torch.ones(256), "step": 3, "lr": 0.5})
    assert app.run(["export", uri, str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    back = fresh_uri()
    assert app.run(["import", str(tmp_path / "dcp"), back, "--skip", "lr"]) == 0
    assert (
        difference(in_order({"w": torch.ones(256), "step": 3}), in_order(holdfast.load(back)))
        is None
    )
