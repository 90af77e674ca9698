"""Common parts of the trainer integrations: values, saves, and finding and deleting checkpoints."""

from __future__ import annotations

import copy
import io
import os
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference, flip, fresh_uri, image_in
from support.importing import built_by_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    WriteItem,
)

import holdfast
from holdfast.errors import (
    DamagedError,
    MismatchError,
    ReplacedError,
    StateError,
)
from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.storage.integrations.doors import Door, RunFolder
from holdfast.storage.integrations.newest import is_stock, newest_checkpoint, stock_steps
from holdfast.storage.integrations.value_conversion import from_stored, to_stored
from holdfast.storage.operations.maintenance.prune import remove

STATE: dict[str, Any] = {
    "args": Namespace(lr=0.1, nested=[Namespace(path=Path("a/b"))]),
    "simple": SimpleNamespace(a={1, 2}),
    "frozen": frozenset({"x"}),
    "tuple": (Path("c"), 1),
    "empty": {},
    3: None,
}


def test_values_round_trip(tmp_path: Path) -> None:
    """Namespaces, paths and sets come back from a checkpoint, at any depth."""
    holdfast.save(tmp_path / "c", to_stored(STATE))
    assert from_stored(holdfast.load(tmp_path / "c")) == STATE
    assert to_stored(PurePosixPath("a")) == to_stored(Path("a"))


def test_storable_values_are_not_copied() -> None:
    """Containers keep their types, and tensors stay the same objects."""
    state = OrderedDict(w=torch.ones(2), of=OrderedDict(a=[1, 2]))
    assert to_stored(state) is state
    assert from_stored(state) is state


def test_object_with_state_is_refused() -> None:
    """An object with a state is refused by path, since it would load as a dict."""
    with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[1\] is a Linear, and would'):
        to_stored({"a": [0, nn.Linear(1, 1)]})


@pytest.mark.parametrize(
    "value", [{"holdfast.type": "os.system", "value": "true"}, {"holdfast.type": "set"}]
)
def test_forged_type_is_damage(value: object) -> None:
    """A checkpoint that names a type outside the supported few is damaged."""
    with pytest.raises(holdfast.DamagedError):
        from_stored({"a": value})


def test_container_in_itself_is_refused() -> None:
    """A save refuses a container that contains itself."""
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(holdfast.StateError):
        holdfast.save("memory://", to_stored(state))


def saved(folder: Path, *steps: int) -> Path:
    """Save a checkpoint for each of these steps; return the folder."""
    for step in steps:
        holdfast.save(folder / f"step-{step}", {"w": torch.ones(2)}, step=step)
    return folder


def test_newest_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is the intact one with the highest step; None without any."""
    assert newest_checkpoint(tmp_path / "nothing") is None
    holdfast.save(tmp_path / "weights", {"w": torch.ones(2)})
    assert newest_checkpoint(tmp_path) is None
    saved(tmp_path, 2, 10, 9)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-10")
    for image in (tmp_path / "step-10").rglob("data/*/*.safetensors"):
        image.unlink()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-9")
    with_options = f"file://{tmp_path}?threads=2"
    assert newest_checkpoint(with_options) == f"file://{tmp_path}/step-9?threads=2"


def test_checkpoint_saved_last_into_a_folder_counts(tmp_path: Path) -> None:
    """If a trainer and Holdfast have saved into the same folder, the later checkpoint is loaded."""
    step_2 = saved(tmp_path, 2) / "step-2"
    for number, marker in ((2, "other"), (3, "marker"), ("x", "marker")):
        (tmp_path / f"step-{number}").mkdir(exist_ok=True)
        (tmp_path / f"step-{number}" / marker).touch()
    assert stock_steps(tmp_path, "step-", "marker") == [3]
    assert stock_steps(tmp_path / "nothing", "step-", "marker") == []
    assert stock_steps("memory://run", "step-", "marker") == []
    os.utime(step_2 / "manifest.safetensors", (1, 1))
    (step_2 / "marker").touch()
    assert is_stock(step_2, "marker")
    os.utime(step_2 / "marker", (0, 0))
    assert not is_stock(step_2, "marker")


@pytest.mark.parametrize(
    ("count", "options", "kept"),
    [
        (2, {}, [9, 10]),
        (2, {"also": (None,)}, [9, 10]),
        (2, {"also": (2,)}, [2, 10]),
        (1, {"also": (2,)}, [2, 10]),
        (0, {}, [10]),
        (1, {"saving": 9}, [9, 10]),
        (9, {}, [2, 8, 9, 10]),
    ],
)
def test_retention(count: int, options: dict[str, Any], kept: list[int]) -> None:
    """A run keeps its newest checkpoints, at least one, and the named ones."""
    uri = fresh_uri()
    for name, step in (("step-2", 2), ("step-10", 10), ("step-9", 9), ("step-8", 8), ("x", 1)):
        holdfast.save(f"{uri}/{name}", {"n": step}, step=step)
    run = RunFolder(Door(), uri, "step-")
    run.retain(count, **options)
    assert run.steps() == kept
    assert holdfast.load(f"{uri}/x") == {"n": 1}


def test_retention_counts_whole_checkpoints(tmp_path: Path) -> None:
    """A damaged checkpoint never takes the place of a whole one."""
    for image in (saved(tmp_path, 1, 2, 3) / "step-3").rglob("data/*/*.safetensors"):
        image.unlink()
    RunFolder(Door(), tmp_path, "step-").retain(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_retention_deletes_abandoned_checkpoints_first(tmp_path: Path) -> None:
    """This includes checkpoints of later steps than the one being saved."""
    door = Door()
    run = RunFolder(door, saved(tmp_path, 2, 4, 6, 8), "step-")
    run.resumed(run.uri(4), 4)
    door.save(run.uri(5), {"w": torch.ones(2)}, step=5)
    run.retain(1, saving=5)
    assert {path.name for path in tmp_path.iterdir()} == {"step-4", "step-5", "lineage.json"}


@pytest.mark.parametrize("lazy", [None, False, True])
def test_checkpoint_is_removed_after_saves(tmp_path: Path, lazy: bool | None) -> None:
    """A door deletes a checkpoint once its saves in flight have succeeded."""
    door = Door()
    saved(tmp_path, 1)
    door.save(tmp_path / "step-2", {"w": torch.ones(2)}, step=2, lazy=lazy)
    door.remove(tmp_path / "step-1")
    assert (tmp_path / "step-1").exists() is (lazy is not None)
    door.wait()
    assert not (tmp_path / "step-1").exists()
    (tmp_path / "file").touch()

    def replace() -> None:
        door.save(tmp_path / "file" / "step-3", {"w": torch.ones(2)}, lazy=lazy)
        door.remove(tmp_path / "step-2")
        door.wait()

    with pytest.raises(holdfast.StorageError):
        replace()
    door.wait()
    assert door.load(tmp_path / "step-2")["w"].tolist() == [1, 1]


def test_remove_deletes_the_whole_checkpoint(tmp_path: Path) -> None:
    """A removal deletes the checkpoint and its folder, unless other files are there."""
    for name in ("a b=1", "kept", "shared"):
        holdfast.save(tmp_path / name, {"w": torch.ones(2)})
    (tmp_path / "shared" / "notes.txt").write_text("mine")
    assert remove(tmp_path / "a b=1")
    assert remove(f"file://{tmp_path}/shared")
    assert not remove(tmp_path / "a b=1")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*")) == ["kept", "shared"]
    assert [c.path for c in holdfast.list_checkpoints(tmp_path)] == ["kept"]
    assert (tmp_path / "shared" / "notes.txt").read_text() == "mine"


def test_remove_at_the_root_of_a_storage() -> None:
    """A checkpoint at the root of a storage, without a folder above, can be removed."""
    holdfast.save("memory://removed", {"w": torch.ones(2)})
    assert remove("memory://removed")
    assert holdfast.list_checkpoints("memory://removed") == []


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    model = torch.nn.Linear(5, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optim.step()
    return model, optim


def full_state() -> dict[str, Any]:
    """Return all kinds of tensors and values, in containers that DCP and Holdfast name differently."""
    model, optim = trained()
    t = torch.arange(12.0).reshape(3, 4)
    return {
        "model": dict(model.state_dict()),
        "optim": optim.state_dict(),
        "plain": [1, 2, (3,)],
        "mixed": [t, {"a": 1}, t + 1],
        "tuple": (t + 2, 5, {"x": None}),
        "array": np.arange(3),
        "none": None,
        "text": "x",
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "turned": (t + 4).T,
        "half": t.bfloat16(),
        "nested": [[1], [2.5, True]],
        "no_items": [],
        "bytes": b"\x00\x01",
        "dtype": torch.float16,
    }


def emptied(value: Any) -> Any:
    """Return the same tensors and containers with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [emptied(item) for item in value]
    return "nothing yet"


def cause_of(call: Callable[[], object]) -> BaseException:
    """Return the error that a call of DCP fails with."""
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    return error


def test_partial_load(tmp_path: Path) -> None:
    """A name that is not in the checkpoint is an error, unless DCP allows it."""
    holdfast.save(tmp_path / "c", {"a": torch.ones(2), "unused": 1})
    into = {"a": torch.zeros(2), "b": torch.zeros(2)}
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=reader))
    assert "Missing key in checkpoint state_dict: b" in str(error)
    dcp.load(into, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert difference({"a": torch.ones(2), "b": torch.zeros(2)}, into) is None


class RenamingPlanner(DefaultLoadPlanner):
    """Loads ``old.x`` as ``x``."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        names = self.metadata.state_dict_metadata
        renamed = {name.removeprefix("old."): each for name, each in names.items()}
        self.metadata = Metadata(renamed, self.metadata.planner_data)
        plan = super().create_local_plan()
        for number, item in enumerate(plan.items):
            index = replace(item.storage_index, fqn=f"old.{item.storage_index.fqn}")
            plan.items[number] = replace(item, storage_index=index)
        return plan


def test_planner_may_rename(tmp_path: Path) -> None:
    """The plan's storage index names the stored item."""
    holdfast.save(tmp_path / "c", {"old": {"w": torch.arange(6.0), "lr": 0.5}})
    into = {"w": torch.zeros(6), "lr": 0.0}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"), planner=RenamingPlanner())
    assert difference({"w": torch.arange(6.0), "lr": 0.5}, into) is None


def test_another_dtype_is_refused_unless_cast(tmp_path: Path) -> None:
    """DCP's own reader would cast 1e20 to infinity without a word."""
    holdfast.save(tmp_path / "c", {"w": torch.tensor([0.5, 1e20])})
    into = {"w": torch.zeros(2, dtype=torch.float16)}
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=reader))
    assert isinstance(error, MismatchError)
    assert "w: dtype float32 in the checkpoint, float16 in the state" in str(error)
    assert into["w"].tolist() == [0, 0]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c", cast=True))
    assert into["w"].tolist() == [0.5, float("inf")]


def test_flipped_byte_is_an_error(tmp_path: Path) -> None:
    """Damage raises an error in DCP's load."""
    holdfast.save(tmp_path / "c", {"w": torch.zeros(1000)})
    image = image_in(tmp_path / "c")
    flip(image, image.read_bytes().index(b"}") + 3000)
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load({"w": torch.zeros(1000)}, storage_reader=reader))
    assert isinstance(error, DamagedError)


def test_replaced_checkpoint_is_never_mixed(tmp_path: Path) -> None:
    """A replacement is noticed between metadata and data, and between two ranks."""
    holdfast.save(tmp_path / "c", {"w": torch.zeros(10)})
    reader = HoldfastReader(tmp_path / "c")
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(10)}, reader.read_metadata(), True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    holdfast.save(tmp_path / "c", {"w": torch.ones(10)})
    with pytest.raises(ReplacedError, match="while it was being read"):
        reader.read_data(plan, planner)
    other = HoldfastReader(tmp_path / "c")
    with pytest.raises(ReplacedError, match="while ranks began"):
        reader.prepare_global_plan([plan, other.prepare_local_plan(LoadPlan([]))])


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    """The error names the place; the storage recognises URIs."""
    reader = HoldfastReader("memory://nowhere")
    error = cause_of(
        lambda: dcp.load(
            {"w": torch.zeros(1)}, storage_reader=reader, checkpoint_id=str(tmp_path / "gone")
        )
    )
    assert "nothing is committed here" in str(error)
    assert "gone" in str(error)
    assert HoldfastReader.validate_checkpoint_id("s3://bucket/run")
    assert not HoldfastReader.validate_checkpoint_id("s3:/bucket")


def as_dcp_builds(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with text keys of an optimizer's parameters, and without strides."""
    expected = copy.deepcopy(state)
    expected["optim"]["state"] = {
        str(key): item for key, item in expected["optim"]["state"].items()
    }
    expected["turned"] = expected["turned"].contiguous()
    return expected


def test_checkpoint_id_of_the_call_takes_precedence(tmp_path: Path) -> None:
    """One writer serves many saves, and one reader many loads."""
    writer = HoldfastWriter("memory://nowhere", compression="lz4")
    reader = HoldfastReader("memory://nowhere")
    for step in range(3):
        state = {"w": torch.full((5000,), step), "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(tmp_path / f"{step}"))
        into = {"w": torch.zeros(5000, dtype=torch.int64), "step": -1}
        dcp.load(into, storage_reader=reader, checkpoint_id=str(tmp_path / f"{step}"))
        assert difference(state, into) is None
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [0, 1, 2]
    assert writer.checkpoint_id == reader.checkpoint_id == str(tmp_path / "2")
    with holdfast.open(tmp_path / "2") as c:
        assert c.compression == "lz4"


class Settings:
    """An object that only pickle could store."""

    depth = 3


def test_opaque_values_need_consent_on_both_sides(tmp_path: Path) -> None:
    """Opaque values are saved, as bytes, and unpickled by DCP only if allowed."""
    state = {"hp": {"deep": [1, Settings()]}, "w": torch.ones(3)}
    error = cause_of(lambda: dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c")))
    assert isinstance(error, StateError)
    assert 'state["hp"]["deep"][1] is a' in str(error)
    assert "allow_opaque=True" in str(error)
    assert not (tmp_path / "c").exists()
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c", allow_opaque=True))
    kept = holdfast.load(tmp_path / "c")["hp"]["deep"]
    assert list(kept) == ["holdfast.opaque"]
    assert kept["holdfast.opaque"].dtype == torch.uint8
    into = {"hp": {"deep": None}, "w": torch.zeros(3)}
    refusing = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=refusing))
    assert isinstance(error, StateError)
    assert "'hp.deep' is stored as opaque bytes" in str(error)
    dcp.load({"w": into["w"]}, storage_reader=refusing)  # the rest can be had
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c", allow_opaque=True))
    assert into["hp"]["deep"][1].depth == 3


class HalvingPlanner(DefaultSavePlanner):
    """Stores tensors in half precision, and serializes values in its own way if asked."""

    secretive = False

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object.half()
        if self.secretive:
            return io.BytesIO(repr(object).encode())
        return super().transform_object(write_item, object)


def test_planner_may_transform(tmp_path: Path) -> None:
    """Transformed tensors are stored; unchanged values are stored plain, others need consent."""
    state = {"w": torch.ones(3), "lr": 0.5}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c"), planner=HalvingPlanner())
    stored = holdfast.load(tmp_path / "c")
    assert difference({"w": torch.ones(3).half(), "lr": 0.5}, stored) is None
    planner = HalvingPlanner()
    planner.secretive = True
    writer = HoldfastWriter(tmp_path / "d")
    error = cause_of(lambda: dcp.save(state, storage_writer=writer, planner=planner))
    assert 'state["lr"] is available only as serialized by the planner' in str(error)
    writer = HoldfastWriter(tmp_path / "d", allow_opaque=True)
    dcp.save(state, storage_writer=writer, planner=planner)
    opaque = holdfast.load(tmp_path / "d")["lr"]["holdfast.opaque"]
    assert opaque.numpy().tobytes() == b"0.5"


@pytest.mark.parametrize("by_dcp", [False, True])
def test_either_loads_what_either_saves(tmp_path: Path, by_dcp: bool) -> None:
    """DCP fills or builds what either has saved; Holdfast loads and verifies the same."""
    state = full_state() | {"step": 7}
    if by_dcp:
        metadata = dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c"))
        assert metadata.storage_meta.checkpoint_id == tmp_path / "c"
        assert difference(as_dcp_builds(state), holdfast.load(tmp_path / "c")) is None
    else:
        holdfast.save(tmp_path / "c", state)
    into = emptied(state)
    weight = into["model"]["weight"]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference(state, into) is None
    assert into["model"]["weight"] is weight
    assert difference(as_dcp_builds(state), built_by_dcp(HoldfastReader(tmp_path / "c"))) is None
    with holdfast.open(tmp_path / "c") as c:
        assert c.step == 7
        assert c.verify().ok


def test_tied_tensors(tmp_path: Path) -> None:
    """A lone rank stores tied tensors once; stored values that differ cannot fill one tensor."""
    t = torch.arange(1000.0)
    dcp.save({"a": t, "b": t}, storage_writer=HoldfastWriter(tmp_path / "c"))
    with holdfast.open(tmp_path / "c") as c:
        assert c.nbytes == t.nbytes
    one = t * 0
    dcp.load({"a": one, "b": one}, storage_reader=HoldfastReader(tmp_path / "c"))
    assert torch.equal(one, t)
    holdfast.save(tmp_path / "d", {"a": t, "b": t + 1})
    reader = HoldfastReader(tmp_path / "d")
    error = cause_of(lambda: dcp.load({"a": one, "b": one}, storage_reader=reader))
    assert isinstance(error, MismatchError)


def test_names_without_paths_are_keys(tmp_path: Path) -> None:
    """A planner that does not flatten records no paths, and its names may have dots."""
    state = {"a.b": torch.arange(3.0), "c": {"d": 1, "e": (torch.ones(2),)}}
    dcp.save(
        state,
        storage_writer=HoldfastWriter(tmp_path / "c"),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    assert difference(state, holdfast.load(tmp_path / "c")) is None
