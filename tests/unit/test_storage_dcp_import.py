"""Imports of torch's distributed checkpoint (DCP). They give what DCP loads, bit for bit, and run
nothing that a pickle names."""

from __future__ import annotations

import argparse
import io
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import difference, fresh_uri, random_bits
from support.given import Serve
from support.importing import LAUGHS, Canary, imported, noted, objects_at
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def saved(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """Return a folder that DCP has written."""
    dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def trained() -> dict[str, Any]:
    """Return a model and its optimizer, and values of all kinds."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(30)).sum().backward()
    optim.step()
    return {
        "model": model.state_dict(),
        "optim": optim.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 7,
        "values": {"none": None, "text": "é", "bytes": b"\xff", "pair": (1, [2.5, True])},
        "list": [{"a": 1, "t": torch.ones(2)}, {"a": 2, "t": torch.ones(3)}],
    }


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_state_is_imported(
    tmp_path: Path, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    """Containers, values and tensors of every dtype come back, from any number of files."""
    state = trained() | {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    state["large"] = random_bits(rng, torch.int16, (300_001,))
    found = imported(saved(state, tmp_path, **options))
    state["optim"]["state"] = {str(k): v for k, v in state["optim"]["state"].items()}  # as in DCP
    assert difference(state, found) is None


def test_names_are_chosen_skipped_and_changed(tmp_path: Path) -> None:
    """Patterns select, skip and rename items; an incomplete list becomes separate items."""
    saved(trained(), tmp_path)
    with pytest.raises(holdfast.UsageError, match="would both be named 'w'"):
        imported(tmp_path, rename={"*.weight": "w"})
    found = imported(tmp_path, only=["model.*", "step"], skip=["*.bias"], rename={"model.*": "*"})
    assert sorted(found) == ["0.weight", "1.weight", "step"]
    found = imported(tmp_path, only=["list.*"], skip=["list.0.*"])
    assert difference({"list.1.t": torch.ones(3), "list.1.a": 2}, found) is None
    with pytest.raises(holdfast.UsageError, match="no tensor has a name like 'x'"):
        imported(tmp_path, only=["x"])


def test_unselected_items_are_not_read(tmp_path: Path, serve: Serve) -> None:
    """Files of items that are left out, such as an optimizer's, are not read."""
    saved({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path, single_file_per_rank=False)
    uri, keys = noted(serve, tmp_path)
    assert difference({"a": torch.ones(3)}, imported(uri, only=["a"])) is None
    assert len({key for key in keys if key.endswith(".distcp")}) == 1


def test_small_items_are_read_together(
    tmp_path: Path, serve: Serve, rng: np.random.Generator
) -> None:
    """A folder may have tens of thousands of small items, so they share requests."""
    state = {f"l.{number}": random_bits(rng, torch.float32, (3, 50)) for number in range(300)}
    saved(state, tmp_path)
    uri, keys = noted(serve, tmp_path)
    assert difference(state, imported(uri)) is None
    assert len([key for key in keys if key.endswith(".distcp")]) < 5 + 4 + 3  # samples, stats


def test_damaged_item_among_equal_ones(tmp_path: Path) -> None:
    """An item in another form than its neighbours is refused, or read by its own bytes."""
    folder = saved({f"t{number}": torch.ones(8) for number in range(4)}, tmp_path / "f")
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    for sign in (b"PK\x01\x02", b"FloatStorage", b"PK\x05\x06"):
        damaged = bytearray(content)
        damaged[content.rindex(sign) + 2] ^= 0x40
        file.write_bytes(damaged)
        with pytest.raises(holdfast.HoldfastError) as caught:
            imported(folder)
        assert isinstance(caught.value, holdfast.DamagedError | holdfast.UnsupportedFormatError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), "names argparse.Namespace"),
        ((torch.ones(1), 2), "contains a tensor at 0"),
        (torch.float16, "holds torch.float16"),
    ],
)
def test_objects_are_refused_or_skipped(tmp_path: Path, value: object, message: str) -> None:
    """The error says how to leave an object out."""
    saved({"odd": {"one": value}, "w": torch.ones(3)}, tmp_path)
    with pytest.raises(holdfast.UnsupportedFormatError, match=message) as caught:
        imported(tmp_path)
    assert "--skip 'odd.one'" in str(caught.value)
    assert difference({"w": torch.ones(3)}, imported(tmp_path, skip=["odd.*"])) is None


def metadata_of(folder: Path) -> Metadata:
    """Return the metadata that DCP reads."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def rewritten(folder: Path, **changes: Any) -> Path:
    """Return a folder with other metadata: attributes by dotted path from the tensor (``w_``), its
    place (``at_``), or the whole."""
    metadata = metadata_of(folder)
    (place,) = metadata.storage_data.values()
    for name, value in changes.items():
        owner: Any = metadata
        if name.startswith("at_"):
            owner = place
        elif name.startswith("w_"):
            owner = metadata.state_dict_metadata["w"]
        *path, last = name.removeprefix("at_").removeprefix("w_").split("__")
        for step in path:
            owner = getattr(owner, step)
        setattr(owner, last, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


OUTSIDE = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([7, 5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_properties__layout": torch.sparse_coo}, "'w' has the layout 'torch.sparse_coo'"),
        ({"w_properties__requires_grad": 7}, "'w' has unknown properties"),
        ({"w_properties__pin_memory": None}, "'w' has unknown properties"),
        ({"w_scale": 7}, "has the field 'scale', which is not known"),
        ({"zipped": True}, "has the field 'zipped', which is not known"),
        ({"w_chunks": 7}, "no list of parts"),
        ({"w_chunks": [OUTSIDE]}, "lies outside it"),
        ({"storage_data": {}}, "does not locate"),
        ({"w_size": torch.Size([1 << 40, 1 << 40])}, "larger than any tensor"),
        ({"state_dict_metadata": {"w": 1}}, "has a int in the place"),
        ({"at_transform_descriptors": ["zstd"]}, "extension"),
        ({"at_offset": -1}, "invalid shape"),
    ],
)
def test_impossible_metadata_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Metadata of another layout, a later version, or nonsense is refused before a file is read."""
    folder = rewritten(saved({"w": torch.ones(3, 5)}, tmp_path), **changes)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        imported(folder)


def test_plans_in_the_metadata_change_nothing(tmp_path: Path) -> None:
    """Megatron stores plans there, which repeat the other fields."""
    folder = rewritten(saved({"w": torch.ones(3, 5)}, tmp_path), all_local_plans=[SavePlan([])])
    assert torch.equal(imported(folder)["w"], torch.ones(3, 5))


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "..\\x", "..", ".", "", "x\0", None])
def test_metadata_that_leads_elsewhere_is_refused(
    tmp_path: Path, serve: Serve, file: object
) -> None:
    """A file outside of the folder is refused before any file is read."""
    folder = rewritten(saved({"w": torch.ones(3)}, tmp_path / "dcp"), at_relative_path=file)
    uri, keys = noted(serve, folder)
    with pytest.raises(holdfast.UnsupportedFormatError, match="not a file in its folder"):
        imported(uri)
    assert set(keys) <= {".metadata"}


@pytest.mark.parametrize("where", ["storage_data", "version", "a value"])
def test_nothing_that_a_pickle_names_is_run(tmp_path: Path, where: str) -> None:
    """DCP unpickles metadata and values. The import refuses them, and makes nothing."""
    trace = tmp_path / "trace"
    if where == "a value":
        folder = saved({"w": torch.ones(3), "bad": Canary(trace)}, tmp_path / "dcp")
    else:
        folder = saved({"w": torch.ones(3)}, tmp_path / "dcp")
        rewritten(folder, **{where: {"x": Canary(trace)}})
    uri = fresh_uri()
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"posix\.system"):
        holdfast.import_(folder, uri)
    assert not trace.exists()
    assert not objects_at(uri)
    if where != "a value":
        metadata_of(folder)
        assert trace.exists()  # proves that a trace would be seen


@pytest.mark.parametrize("data", [b"", b"\x80\x04}.", LAUGHS + b"."])
def test_malformed_metadata_is_refused(tmp_path: Path, data: bytes) -> None:
    """Any contents of the file give an error of ours."""
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(holdfast.UnsupportedFormatError, match="cannot be imported"):
        imported(tmp_path)


def test_contradictory_paths_are_not_followed(tmp_path: Path) -> None:
    """Names become keys then, and nothing is lost."""
    saved({"a": 1, "b": {"c": torch.ones(2)}, "l": [torch.ones(1), torch.ones(2)]}, tmp_path)
    paths = {"a": ("a",), "b.c": ("b", "c", "d"), "l.0": ("l", 0), "l.1": ("l", "1")}
    metadata = metadata_of(tmp_path)
    metadata.planner_data = paths
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = {"a": 1, "b.c": torch.ones(2), "l.0": torch.ones(1), "l.1": torch.ones(2)}
    assert difference(expected, imported(tmp_path)) is None


@pytest.mark.parametrize("numel", [300, 300_000])
def test_cut_or_exchanged_files_are_damage(tmp_path: Path, numel: int) -> None:
    """A file that is cut, empty, missing or another tensor's is an error, and nothing is made."""
    saved({"w": torch.ones(numel)}, tmp_path / "a")
    saved({"w": torch.ones(numel - 1)}, tmp_path / "b")
    (file,) = (tmp_path / "a").glob("*.distcp")
    whole = file.read_bytes()
    other = next((tmp_path / "b").glob("*.distcp")).read_bytes()
    for data in (whole[:-1], bytes(len(whole)), other + bytes(len(whole) - len(other)), b""):
        file.write_bytes(data)
        with pytest.raises((holdfast.DamagedError, holdfast.UnsupportedFormatError)):
            holdfast.import_(tmp_path / "a", tmp_path / "made")
        with pytest.raises(holdfast.NotACheckpointError):
            holdfast.open(tmp_path / "made")
    file.unlink()
    with pytest.raises(holdfast.NotFoundError):
        imported(tmp_path / "a")


@pytest.mark.parametrize("numel", [3, 100_000])
def test_conjugate_view_is_refused(tmp_path: Path, numel: int) -> None:
    """The values of such a view differ from the stored elements, in small items and large ones."""
    saved({"z": torch.ones(numel, dtype=torch.complex64).conj()}, tmp_path)
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"tensor 'z' .* conjugate bit"):
        imported(tmp_path)


def test_types_of_small_values_are_kept(tmp_path: Path) -> None:
    """Sizes and ordered dicts within a value keep their types."""
    value = ({"size": torch.Size([2, 3])}, OrderedDict(b=1, a=2))
    saved({"v": value}, tmp_path)
    (sizes, ordered) = imported(tmp_path)["v"]
    assert type(sizes["size"]) is torch.Size
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]


WEIGHT = "decoder.layers.weight"
OBJECT = "decoder.layers._extra_state/shard_0.1_1.2"
GROUP = {"lr": 0.5, "betas": (0.9, 0.95), "wd_mult": 1.0, "step": 3.0}


def optimizer(**changed: Any) -> dict[str, Any]:
    """Return the state of a distributed optimizer without its tensors."""
    return {
        "optimizer": {"param_groups": [GROUP]},
        "grad_scaler": {"scale": 4.0},
        "param_state_sharding_type": "fully_reshardable",
    } | changed


def megatron_folder(
    folder: Path, common: object, *, is_item: bool = False, **items: object
) -> Path:
    """Return a folder as Megatron lays it out: items by their keys, in no dicts.

    ``is_item``: ``common`` is an item, too, as written by Megatron 0.19 and later.
    """
    if is_item:
        items["common_state/shard_0_1"] = [common]
    state = {WEIGHT: torch.arange(6.0).view(2, 3), OBJECT: [None], **items}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    if not is_item:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


@pytest.mark.parametrize("is_item", [False, True], ids=["common.pt", "item"])
def test_common_state_is_imported(tmp_path: Path, is_item: bool) -> None:
    """Values and tensors keep their paths. An optimizer and objects go where a job loads them."""
    scheduler = {"steps": [1, 2]} | ({} if is_item else {"none": {}})  # torch drops it from an item
    common = {
        "iteration": 7,
        "optimizer": optimizer(),
        "scheduler": scheduler,
        "scale": torch.tensor([2.0, 3.0]),
    }
    expected = {
        WEIGHT: torch.arange(6.0).view(2, 3),
        OBJECT: {"data": None},
        "iteration": 7,
        "scheduler": scheduler,
        "scale": torch.tensor([2.0, 3.0]),
        "optim": {"common": {"groups": [GROUP], "step": 3, "scaler": {"scale": 4.0}}},
    }
    folder = megatron_folder(tmp_path, common, is_item=is_item)
    assert difference(expected, imported(folder)) is None


def test_a_common_item_that_is_no_list_is_refused(tmp_path: Path) -> None:
    """The error says what is wrong with it."""
    folder = megatron_folder(tmp_path, {}, **{"common_state/shard_0_1": {"iteration": 7}})
    with pytest.raises(holdfast.UnsupportedFormatError, match="not a list of one item"):
        imported(folder)


def test_chain_of_optimizers(tmp_path: Path) -> None:
    """The groups of chained optimizers are imported as one list."""
    experts = optimizer(optimizer={"param_groups": [GROUP | {"is_expert_parallel": True}]})
    folder = megatron_folder(tmp_path, {"optimizer": {0: optimizer(), 1: experts}})
    common = imported(folder)["optim"]["common"]
    assert [group.get("is_expert_parallel") for group in common["groups"]] == [None, True]
    assert common["step"] == 3


@pytest.mark.parametrize("step", [math.inf, math.nan, 2.5, None])
def test_a_step_that_is_no_whole_number_is_ignored(tmp_path: Path, step: float | None) -> None:
    """Only the other groups' step counts, and the group itself is unchanged."""
    groups = [GROUP, GROUP | {"step": step}]
    common = {"optimizer": optimizer(optimizer={"param_groups": groups})}
    found = imported(megatron_folder(tmp_path, common))["optim"]["common"]
    assert found["step"] == 3
    assert difference(groups, found["groups"]) is None


def cyclic() -> dict[str, Any]:
    """Return a state that contains itself."""
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    return state


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": optimizer(param_state_sharding_type="dp_reshardable")},
        {"optimizer": {0: optimizer(), 1: {"lr": 1.0}}},
        {"optimizer": optimizer(), "optim": 1},
        {"optimizer": optimizer(optimizer=[1])},
        {"optimizer": 5},
        {"optimizer": {}},
    ],
)
def test_other_optimizers_are_unchanged(tmp_path: Path, other: dict[str, Any]) -> None:
    """State that does not follow the names of parameters keeps its path."""
    found = imported(megatron_folder(tmp_path, other))
    assert difference(other, {name: found[name] for name in other}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), "object of argparse.Namespace"),
        ([Canary(Path("trace"))], r"posix\.system"),
        (torch.float16, "torch.float16"),
        ([torch.ones(1)], "a tensor at 0"),
    ],
)
def test_common_objects_are_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, message: str
) -> None:
    """The error says how to leave an object out; Megatron unpickles the file, the import does not."""
    monkeypatch.chdir(tmp_path)
    folder = megatron_folder(tmp_path, {"iteration": 7, "odd": {"one": value}})
    with pytest.raises(holdfast.UnsupportedFormatError, match=message) as caught:
        imported(folder)
    assert "--skip 'odd.one'" in str(caught.value)
    assert "common.pt" in str(caught.value)
    assert imported(folder, skip=["odd.*"])["iteration"] == 7
    assert not (tmp_path / "trace").exists()


def test_pickled_items_are_refused_or_skipped(tmp_path: Path) -> None:
    """Older versions of Transformer Engine write such items."""
    extra = f"{OBJECT}0"
    folder = megatron_folder(tmp_path, {"iteration": 7}, **{extra: [io.BytesIO(b"x")]})
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"_io\.BytesIO") as caught:
        imported(folder)
    assert f"--skip '{extra}'" in str(caught.value)
    assert OBJECT in imported(folder, skip=[extra])


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ([1], "not a dict of names"),
        ({"odd": {argparse.ArgumentError(None, "x"): 1}}, r"argparse\.ArgumentError"),
        (cyclic(), "contains itself"),
        ({"a.b": 1, "a": {"b": 2}}, "have the same dotted path"),
        ({WEIGHT: 1}, "is in the common state and elsewhere in the folder"),
    ],
)
def test_impossible_common_state_is_refused(tmp_path: Path, common: object, message: str) -> None:
    """Cycles, colliding names and anything but a dict of names are errors."""
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        imported(megatron_folder(tmp_path, common))


SHAPES = {"a.w": (3, 5), "a.b": (7,), "scalar": ()}


def weights() -> dict[str, torch.Tensor]:
    """Return weights with different elements everywhere."""
    found = {}
    first = 0.0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        found[name] = torch.arange(first, first + numel).view(shape)
        first += numel
    return found


def partitions(stage: int, world: int, flat: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return each rank's partition of one group."""
    if stage == 3:
        shares = [
            tensor.view(-1).split(math.ceil(tensor.numel() / world)) for tensor in flat.values()
        ]
        padded = [[*share, *[share[0].new_zeros(0)] * world] for share in shares]
        width = [math.ceil(tensor.numel() / world) for tensor in flat.values()]
        return [
            torch.cat(
                [
                    torch.cat([p[rank], torch.zeros(w - len(p[rank]))])
                    for p, w in zip(padded, width, strict=True)
                ]
            )
            for rank in range(world)
        ]
    whole = torch.cat([tensor.reshape(-1) for tensor in flat.values()])
    return list(whole.split(math.ceil(len(whole) / world)))


def zero_folder(folder: Path, stage: int, world: int, **changed: Any) -> Path:
    """Write a folder in DeepSpeed's layout, without its classes."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    parts = partitions(stage, world, weights())
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    optimizer = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    for rank, part in enumerate(parts):
        state = {
            "zero_stage": stage,
            "partition_count": world,
            key: [part],
            optimizer: {"state": {0: {"exp_avg": part + 100, "step": torch.tensor(7.0)}}},
        }
        torch.save(
            {"optimizer_state_dict": state | changed},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        info = {
            "module": {"mask": torch.arange(3), "a.w": torch.zeros(3, 5)},
            "buffer_names": ["mask"],
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())
            ],
            "shared_params": {"tied": "a.b"},
        }
        torch.save(info, step / f"{prefix}mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 3), (3, 2), (3, 5)])
def test_parameters_are_put_together(tmp_path: Path, stage: int, world: int) -> None:
    """This holds for any number of ranks, and for tied parameters, buffers and moments."""
    uri = fresh_uri()
    holdfast.import_(zero_folder(tmp_path, stage, world), uri)
    model = weights() | {"tied": weights()["a.b"], "mask": torch.arange(3)}
    moments = {
        name: {"exp_avg": tensor + 100, "step": torch.tensor(7.0)}
        for name, tensor in weights().items()
    }
    found = holdfast.load(uri)
    for name, tensor in model.items():
        assert difference(tensor, found["model"][name]) is None, name
    for name, of_name in moments.items():
        assert difference(of_name["exp_avg"], found["optim"]["state"][name]["exp_avg"]) is None, (
            name
        )
        assert found["optim"]["state"][name]["step"] == 7
    assert sorted(found["model"]) == sorted(model)


def test_the_folder_of_a_step_and_the_model_alone(tmp_path: Path) -> None:
    """The same commands import them as other models."""
    uri = fresh_uri()
    folder = zero_folder(tmp_path, 2, 2) / "global_step7"
    holdfast.import_(folder, uri, only=["model.*"], rename={"model.*": "*"})
    assert sorted(holdfast.load(uri)) == ["a.b", "a.w", "mask", "scalar", "tied"]


def test_what_is_not_plain_zero_is_refused(tmp_path: Path) -> None:
    """Missing ranks, other layouts and a tag that leads elsewhere are refused by name."""
    folder = zero_folder(tmp_path / "missing", 2, 3)
    (folder / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(holdfast.UnsupportedFormatError, match="2 files of stage 2 and 3 ranks"):
        holdfast.import_(folder, fresh_uri())
    folder = zero_folder(tmp_path / "parallel", 2, 1)
    (folder / "global_step7" / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(holdfast.UnsupportedFormatError, match="mp_rank_01_model_states"):
        holdfast.import_(folder, fresh_uri())
    folder = zero_folder(tmp_path / "short", 2, 1, single_partition_of_fp32_groups=[torch.ones(20)])
    with pytest.raises(
        holdfast.UnsupportedFormatError, match=r"elements of 'model\.a\.b' are missing"
    ):
        holdfast.import_(folder, fresh_uri())
    (folder / "latest").write_text("../missing/global_step7")
    with pytest.raises(holdfast.DamagedError, match="not a folder next to it"):
        holdfast.import_(folder, fresh_uri())
    (folder / "latest").write_text("global_step8")
    with pytest.raises(holdfast.NotFoundError, match="no ZeRO checkpoint"):
        holdfast.import_(folder, fresh_uri())
