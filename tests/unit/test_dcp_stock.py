"""HoldfastReader over folders that DCP's own writer has saved, and the ids in DCP's metadata."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference, fresh_uri
from support.copies import run
from support.drivers import storage_at
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.errors import (
    ExistsError,
    NotACheckpointError,
    ReplacedError,
    StateError,
)
from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Color(Enum):
    """A value that needs pickle."""

    RED = 1


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


def state_of(number: int) -> dict[str, Any]:
    """Return a state of tensors, among them an empty one and a large one, and of values."""
    return {
        "model": {"w": torch.arange(700_000.0) + number, "none": torch.zeros(0)},
        "optim": {"state": [{"step": number}], "betas": (0.1 * number, torch.ones(2) * number)},
        "text": f"at {number}",
    }


def saved(folder: Path, **items: Any) -> Path:
    """Save a state with DCP's own writer."""
    dcp.save({**state_of(5), **items}, storage_writer=FileSystemWriter(folder))
    return folder


def cause_of(call: Callable[[], object]) -> BaseException:
    """Return the error that a call of DCP fails with."""
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    return error


@pytest.mark.parametrize("scheme", ["path", "file", "memory"])
def test_a_job_switches_by_one_line(scheme: str, tmp_path: Path) -> None:
    """The stock checkpoint loads from any storage, and the next save, even there, is ours."""
    folder = saved(tmp_path / "c")
    uri = {"path": str(folder), "file": f"file://{folder}?threads=2", "memory": fresh_uri()}[scheme]
    if scheme == "memory":
        for path in folder.iterdir():
            run(storage_at(uri).put(path.name, path.read_bytes()))
    into = state_of(0)
    dcp.load(into, storage_reader=HoldfastReader(uri))
    assert difference(state_of(5), into) is None
    dcp.save(state_of(6), storage_writer=HoldfastWriter(uri))
    dcp.load(into, storage_reader=HoldfastReader(uri))
    assert difference(state_of(6), into) is None
    assert difference(state_of(6), holdfast.load(uri)) is None


@pytest.mark.parametrize("collectives", [True, False])
def test_an_exclusive_save_also_spares_a_stock_checkpoint(
    collectives: bool, tmp_path: Path
) -> None:
    """Otherwise the new one would hide it."""
    dcp.save(state_of(5), storage_writer=FileSystemWriter(tmp_path), use_collectives=collectives)
    before = sorted(tmp_path.iterdir())
    writer = HoldfastWriter(tmp_path, overwrite=False)
    assert isinstance(cause_of(lambda: dcp.save(state_of(6), storage_writer=writer)), ExistsError)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("where", ["a value", "metadata"])
def test_pickle_is_opt_in(where: str, tmp_path: Path) -> None:
    """Nothing runs that a folder names, unless its reader trusts it."""
    trace = tmp_path / "trace"
    folder = saved(tmp_path / "c", bad=Canary(trace) if where == "a value" else 1)
    if where == "metadata":
        metadata = FileSystemReader(folder).read_metadata()
        metadata.planner_data = {"x": Canary(trace)}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    into = {**state_of(0), "bad": None}
    error = cause_of(lambda: dcp.load(into, storage_reader=HoldfastReader(folder)))
    assert "allow_opaque=True" in str(error)
    assert where == "metadata" or (isinstance(error, StateError) and "'bad'" in str(error))
    assert not trace.exists()
    dcp.load(into, storage_reader=HoldfastReader(folder, allow_opaque=True))
    assert trace.exists()
    assert difference(state_of(5)["model"], into["model"]) is None


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """DCP's own reader would follow it."""
    folder = saved(tmp_path / "c")
    metadata = FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = f"../c/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    dcp.load(state_of(0), storage_reader=FileSystemReader(folder))
    error = cause_of(lambda: dcp.load(state_of(0), storage_reader=HoldfastReader(folder)))
    assert "not a file in its folder" in str(error)


def test_objects_are_loaded_if_trusted(tmp_path: Path) -> None:
    """They load as with DCP's own reader."""
    folder = saved(tmp_path, color=Color.RED)
    into = {**state_of(0), "color": None}
    dcp.load(into, storage_reader=HoldfastReader(folder, allow_opaque=True))
    assert into["color"] is Color.RED


def test_a_checkpoint_of_ours_is_never_read_as_that_of_one_rank(tmp_path: Path) -> None:
    """After any error DCP asks for the metadata of one rank, which may be older."""
    dcp.save(state_of(5), storage_writer=FileSystemWriter(tmp_path), use_collectives=False)
    HoldfastReader(tmp_path).read_metadata(rank=0)
    dcp.save(state_of(6), storage_writer=HoldfastWriter(tmp_path))
    with pytest.raises(ReplacedError, match="Load again"):
        HoldfastReader(tmp_path).read_metadata(rank=0)


def test_a_folder_without_any_checkpoint(tmp_path: Path) -> None:
    """The error is ours."""
    for rank in ({}, {"rank": 0}):
        with pytest.raises(NotACheckpointError):
            HoldfastReader(tmp_path).read_metadata(**rank)


def test_ids_of_saves_and_loads(tmp_path: Path) -> None:
    """They change with each save and load, and readers report the id that the writer returned."""
    uri = f"file://{tmp_path}/c?threads=2"
    writer = HoldfastWriter(uri)
    before = writer.storage_meta()
    assert (before.checkpoint_id, before.load_id) == (uri, None)
    writer.reset()
    assert writer.storage_meta().save_id != before.save_id
    metadata = dcp.save(state_of(1), storage_writer=writer)
    assert metadata.storage_meta == writer.storage_meta()
    reader = HoldfastReader(uri)
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert metadata.storage_meta is not None
    assert (found.checkpoint_id, found.save_id) == (uri, metadata.storage_meta.save_id)
    assert found.load_id == reader.load_id
    reader.reset(tmp_path / "c")
    again = reader.read_metadata().storage_meta
    assert again is not None
    assert again.checkpoint_id == tmp_path / "c"
    assert again.load_id != found.load_id
