"""The door into torch's distributed checkpoint (DCP), in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference
from support.dcp_tasks import caching_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.errors import (
    CoverageError,
    DamagedError,
    MismatchError,
    NotACheckpointError,
    ReplacedError,
    StateError,
)
from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model = torch.nn.Linear(5, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optim.step()
    return model, optim


def full_state() -> dict[str, Any]:
    """Tensors of all sorts and values of all kinds, as deep as DCP and Holdfast differ in how they
    name them."""
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
    """The same tensors and containers, with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [emptied(item) for item in value]
    return "nothing yet"


def built(uri: Path, keys: set[str] | None = None, **options: Any) -> dict[str, Any]:
    """A state that DCP makes from the checkpoint alone."""
    made: dict[str, Any] = {}
    _load_state_dict(
        made,
        HoldfastReader(uri, **options),
        no_dist=True,
        planner=_EmptyStateDictLoadPlanner(keys=keys),
    )
    return made


def cause_of(call: Callable[[], object]) -> BaseException:
    """What a call of DCP fails of."""
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    return error


def test_dcp_loads_what_holdfast_has_saved(tmp_path: Path) -> None:
    """Into a state: tensors in place, and values, of every kind and in every container."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    into = emptied(state)
    weight = into["model"]["weight"]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference(state, into) is None
    assert into["model"]["weight"] is weight


def test_dcp_builds_the_whole_state(tmp_path: Path) -> None:
    """Without a state to load into, by the names and paths in the metadata; DCP's keys are text."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    made = built(tmp_path / "c")
    assert difference(as_dcp_builds(state), made) is None


def test_a_part_of_the_state_is_loaded_by_its_keys(tmp_path: Path) -> None:
    """A prefix, and a single name."""
    state = full_state()
    holdfast.save(tmp_path / "c", state)
    made = built(tmp_path / "c", {"model", "text"})
    assert difference({"text": "x", "model": state["model"]}, made) is None


def test_a_partial_load_leaves_what_is_not_stored(tmp_path: Path) -> None:
    """DCP's own rule: a name that is not in the checkpoint is an error, unless it is allowed."""
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
            index = type(item.storage_index)(
                f"old.{item.storage_index.fqn}", item.storage_index.offset
            )
            plan.items[number] = type(item)(
                item.type,
                item.dest_index,
                item.dest_offsets,
                index,
                item.storage_offsets,
                item.lengths,
            )
        return plan


def test_a_planner_may_rename(tmp_path: Path) -> None:
    """What is read is what the plan's storage index names."""
    holdfast.save(tmp_path / "c", {"old": {"w": torch.arange(6.0), "lr": 0.5}})
    into = {"w": torch.zeros(6), "lr": 0.0}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"), planner=RenamingPlanner())
    assert difference({"w": torch.arange(6.0), "lr": 0.5}, into) is None


def test_tensors_that_are_not_contiguous_are_filled_in_place(tmp_path: Path) -> None:
    """A transposed tensor, and a part of a larger one."""
    t = torch.arange(12.0).reshape(3, 4)
    holdfast.save(tmp_path / "c", {"t": t, "u": t + 1})
    whole = torch.zeros(3, 8)
    into = {"t": torch.zeros(4, 3).T, "u": whole[:, 2:6]}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference({"t": t, "u": t + 1}, {k: v.contiguous() for k, v in into.items()}) is None
    assert whole.sum() == (t + 1).sum()


def test_another_dtype_is_refused_unless_cast(tmp_path: Path) -> None:
    """DCP's own reader casts without a word; 1e20 would become infinity."""
    holdfast.save(tmp_path / "c", {"w": torch.tensor([0.5, 1e20])})
    into = {"w": torch.zeros(2, dtype=torch.float16)}
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load(into, storage_reader=reader))
    assert isinstance(error, MismatchError)
    assert "w: dtype float32 in the checkpoint, float16 in the state" in str(error)
    assert into["w"].tolist() == [0, 0]
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c", cast=True))
    assert into["w"].tolist() == [0.5, float("inf")]


def test_a_flipped_byte_is_an_error_for_dcp_too(tmp_path: Path) -> None:
    """And not a wrong value."""
    holdfast.save(tmp_path / "c", {"w": torch.zeros(1000)})
    (image,) = tmp_path.glob("c/data/*/0.safetensors")
    data = bytearray(image.read_bytes())
    data[data.index(b"}") + 3000] ^= 1
    image.write_bytes(data)
    reader = HoldfastReader(tmp_path / "c")
    error = cause_of(lambda: dcp.load({"w": torch.zeros(1000)}, storage_reader=reader))
    assert isinstance(error, DamagedError)


def test_a_checkpoint_that_is_replaced_meanwhile_is_never_mixed(tmp_path: Path) -> None:
    """Between metadata and data, and between two ranks."""
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


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """The message says where nothing was found."""
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


def test_tied_tensors_that_are_stored_apart_are_not_mixed(tmp_path: Path) -> None:
    """One tensor of the state under two names: their values agree, or that is an error."""
    holdfast.save(tmp_path / "c", {"a": torch.arange(4.0), "b": torch.arange(4.0) + 0})
    holdfast.save(tmp_path / "d", {"a": torch.zeros(4), "b": torch.ones(4)})
    one = torch.zeros(4)
    dcp.load({"a": one, "b": one}, storage_reader=HoldfastReader(tmp_path / "c"))
    assert one.tolist() == [0, 1, 2, 3]
    error = cause_of(
        lambda: dcp.load({"a": one, "b": one}, storage_reader=HoldfastReader(tmp_path / "d"))
    )
    assert isinstance(error, MismatchError)


def as_dcp_builds(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the keys of an optimizer's parameters as text, and without strides."""
    expected = copy.deepcopy(state)
    expected["optim"]["state"] = {
        str(key): item for key, item in expected["optim"]["state"].items()
    }
    expected["turned"] = expected["turned"].contiguous()
    return expected


def test_holdfast_reads_what_dcp_has_saved(tmp_path: Path) -> None:
    """It is a checkpoint like any other: it loads, verifies and shows; and DCP reads it again."""
    state = full_state() | {"step": 7}
    metadata = dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c"))
    assert metadata.storage_meta.checkpoint_id == f"file://{tmp_path}/c"
    assert difference(as_dcp_builds(state), holdfast.load(tmp_path / "c")) is None
    with holdfast.open(tmp_path / "c") as c:
        assert c.step == 7
        assert c.verify().ok
        assert torch.equal(c.read("model.weight", 1), state["model"]["weight"][1])
    into = emptied(state)
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference(state, into) is None


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    """By a rank without peers; and an alias is read as what it stands for."""
    t = torch.arange(1000.0)
    dcp.save({"a": t, "b": t}, storage_writer=HoldfastWriter(tmp_path / "c"))
    with holdfast.open(tmp_path / "c") as c:
        assert c.nbytes == t.nbytes
    into = {"a": t * 0, "b": t * 0}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference({"a": t, "b": t.clone()}, into) is None


def test_an_asynchronous_save_holds_what_the_state_was(tmp_path: Path) -> None:
    """In a thread: what changes after the call is not in the checkpoint."""
    state = {"w": torch.ones(1000), "lr": 0.5}
    saving = dcp.async_save(state, storage_writer=HoldfastWriter(tmp_path / "c"))
    state["w"].zero_()
    saving.result(30)
    assert difference({"w": torch.ones(1000), "lr": 0.5}, holdfast.load(tmp_path / "c")) is None


def test_the_checkpoint_id_of_the_call_counts(tmp_path: Path) -> None:
    """One writer may serve many saves, and one reader many loads."""
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


def test_a_save_replaces_the_checkpoint_before_it(tmp_path: Path) -> None:
    """Whole, and without a warning; what was there is deleted."""
    for step in range(2):
        dcp.save({"w": torch.full((9,), step)}, storage_writer=HoldfastWriter(tmp_path / "c"))
    assert holdfast.load(tmp_path / "c")["w"].tolist() == [1] * 9
    assert len(list((tmp_path / "c" / "data").iterdir())) == 1


class Settings:
    """An object that only pickle could store."""

    depth = 3


class Counter:
    """An object with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"deep": [1, Settings()]}, 'state["hp"]["deep"][1] is a'),
        ({1, 2}, 'state["hp"] is a builtins.set'),
        (io.BytesIO(b"x"), 'state["hp"] is a _io.BytesIO'),
        ((1, Counter()), 'state["hp"][1] is a'),
    ],
)
def test_a_value_that_needs_pickle_is_refused_before_anything_is_written(
    value: object, named: str, tmp_path: Path
) -> None:
    """By its path; nothing is there, not even a folder."""
    state = {"hp": value, "w": torch.ones(3)}
    error = cause_of(lambda: dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c")))
    assert isinstance(error, StateError)
    assert named in str(error)
    assert "allow_opaque=True" in str(error)
    assert not (tmp_path / "c").exists()


def test_opaque_values_reach_dcp_alone_and_only_where_both_sides_say_so(tmp_path: Path) -> None:
    """Kept as bytes: Holdfast shows them as such, and DCP unpickles them where that is allowed."""
    state = {"hp": {"deep": [1, Settings()]}, "w": torch.ones(3)}
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
    """Stores tensors in half precision, and leaves values as they are."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object.half()
        return super().transform_object(write_item, object)


class SecretivePlanner(DefaultSavePlanner):
    """Serializes values in its own way."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object
        return io.BytesIO(repr(object).encode())


def test_a_planner_may_transform_what_is_stored(tmp_path: Path) -> None:
    """What it gives for tensors is stored; a value that it does not change is stored plain, one
    that it serializes otherwise is not guessed at."""
    state = {"w": torch.ones(3), "lr": 0.5}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c"), planner=HalvingPlanner())
    stored = holdfast.load(tmp_path / "c")
    assert difference({"w": torch.ones(3).half(), "lr": 0.5}, stored) is None
    writer = HoldfastWriter(tmp_path / "d")
    error = cause_of(lambda: dcp.save(state, storage_writer=writer, planner=SecretivePlanner()))
    assert 'state["lr"] is available only as serialized by the planner' in str(error)
    writer = HoldfastWriter(tmp_path / "d", allow_opaque=True)
    dcp.save(state, storage_writer=writer, planner=SecretivePlanner())
    opaque = holdfast.load(tmp_path / "d")["lr"]["holdfast.opaque"]
    assert opaque.numpy().tobytes() == b"0.5"


def test_names_without_paths_are_keys(tmp_path: Path) -> None:
    """A planner that does not flatten notes no paths; its names may have dots."""
    state = {"a.b": torch.arange(3.0), "c": {"d": 1, "e": (torch.ones(2),)}}
    dcp.save(
        state,
        storage_writer=HoldfastWriter(tmp_path / "c"),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    assert difference(state, holdfast.load(tmp_path / "c")) is None


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    """DCP keeps cached plans in class attributes, for good."""
    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached")]
    yield
    for cache in caches:
        cache.clear()


@pytest.mark.usefixtures("_no_cached_plans")
def test_cached_plans_lead_to_attempts_of_their_own(tmp_path: Path) -> None:
    """Also where one save replaces another, and after one that has failed."""
    for step in (0, 1, 2):
        if step == 1:
            (tmp_path / "away").touch()
            bad = HoldfastWriter(tmp_path / "away" / "c")
            planner = caching_planner()
            cause_of(
                lambda: dcp.save(
                    {"w": torch.ones(5), "step": 9},
                    storage_writer=bad,  # noqa: B023 - called at once
                    planner=planner,  # noqa: B023
                )
            )
        dcp.save(
            {"w": torch.full((5,), float(step)), "step": step},
            storage_writer=HoldfastWriter(tmp_path / "c"),
            planner=caching_planner(),
        )
        assert holdfast.load(tmp_path / "c")["w"].tolist() == [step] * 5


class SplittingPlanner(DefaultSavePlanner):
    """Stores the rows of a tensor as boxes of their own."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for whole in plan.items for item in rows_of(whole)]
        self.plan = SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, torch.Tensor):
            return value
        row = index.offset[0]
        return value[row : row + 1]


def rows_of(item: WriteItem) -> list[WriteItem]:
    """The item, cut into rows."""
    data = item.tensor_data
    if data is None:
        return [item]
    rest = [0] * (len(data.size) - 1)
    return [
        WriteItem(
            MetadataIndex(item.index.fqn, [row, *rest]),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size([row, *rest]), torch.Size([1, *data.size[1:]])),
                data.properties,
                data.size,
            ),
        )
        for row in range(data.size[0])
    ]


def test_one_rank_may_store_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    """As ranks do that hold several shards of it."""
    state = {"w": torch.arange(15.0).reshape(5, 3), "n": 1, "v": torch.arange(4)}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "c"), planner=SplittingPlanner())
    assert (
        difference({"w": state["w"], "v": state["v"], "n": 1}, holdfast.load(tmp_path / "c"))
        is None
    )
    with holdfast.open(tmp_path / "c") as c:
        assert c.tensors["w"].shards == 5
    into = {"w": torch.zeros(5, 3), "n": 0, "v": torch.zeros(4, dtype=torch.int64)}
    dcp.load(into, storage_reader=HoldfastReader(tmp_path / "c"))
    assert difference(state, into) is None


class App:
    """What the tutorial of DCP wraps a model and an optimizer in."""

    def __init__(self) -> None:
        self.model, self.optim = trained()

    def state_dict(self) -> dict[str, Any]:
        model_state, optim_state = get_state_dict(self.model, self.optim)
        return {"model": model_state, "optim": optim_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def test_an_object_with_a_state_is_saved_and_loaded_as_in_the_tutorial(tmp_path: Path) -> None:
    """DCP asks it for its state, and gives it back; and so does Holdfast, of the same checkpoint."""
    saved = App()
    dcp.save({"app": saved}, storage_writer=HoldfastWriter(tmp_path / "c"))
    for load in (
        lambda app: dcp.load({"app": app}, storage_reader=HoldfastReader(tmp_path / "c")),
        lambda app: holdfast.load(tmp_path / "c", into={"app": app}),
    ):
        app = App()
        load(app)
        assert difference(dict(saved.model.state_dict()), dict(app.model.state_dict())) is None
        assert (
            difference(saved.optim.state_dict()["state"], app.optim.state_dict()["state"]) is None
        )


class HoleyPlanner(DefaultSavePlanner):
    """Forgets a part of a tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = SavePlan(
            [
                WriteItem(
                    item.index,
                    item.type,
                    tensor_data=type(item.tensor_data)(
                        type(item.tensor_data.chunk)(torch.Size([0]), torch.Size([2])),
                        item.tensor_data.properties,
                        item.tensor_data.size,
                    ),
                )
                for item in plan.items
                if item.tensor_data is not None
            ],
            planner_data=plan.planner_data,
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item)[:2]


def test_a_plan_that_leaves_something_out_is_not_committed(tmp_path: Path) -> None:
    """Every element of every tensor is stored exactly once, or the save fails; what was there
    before is untouched."""
    dcp.save({"w": torch.zeros(3)}, storage_writer=HoldfastWriter(tmp_path / "c"))
    error = cause_of(
        lambda: dcp.save(
            {"w": torch.ones(3)},
            storage_writer=HoldfastWriter(tmp_path / "c"),
            planner=HoleyPlanner(),
        )
    )
    assert isinstance(error, CoverageError)
    assert "w: [2:3] is missing" in str(error)
    assert holdfast.load(tmp_path / "c")["w"].tolist() == [0, 0, 0]
    assert len(list((tmp_path / "c" / "data").iterdir())) == 1


def test_a_folder_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    """With the storage's error, in whichever step it comes."""
    (tmp_path / "c").write_text("a file")
    error = cause_of(
        lambda: dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(tmp_path / "c"))
    )
    assert isinstance(error, OSError)
    with pytest.raises((NotACheckpointError, OSError)):
        holdfast.load(tmp_path / "c")
