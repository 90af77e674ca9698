"""Importing folders of torch's distributed checkpoint (DCP): what DCP loads, bit for bit, and nothing
that a pickle asks for."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bits import difference, fresh_uri, random_bits
from support.dcp_tasks import in_order
from support.given import Serve
from support.importing import imported
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.torch_pickle import StoredTensor
from holdfast.storage.operations.conversion.archive_reader import WholeArchive
from holdfast.storage.pipeline.file_chunks import Stretch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def saved(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """A folder that DCP has written."""
    dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def trained() -> dict[str, Any]:
    """A model and its optimizer, and values of all kinds."""
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


def test_a_state_comes_back_as_it_was(tmp_path: Path, rng: np.random.Generator) -> None:
    """Dicts, lists and values are where they were; tensors of every dtype, without elements, and
    scalars."""
    state = trained() | {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    found = imported(saved(state, tmp_path))
    state["optim"]["state"] = {str(k): v for k, v in state["optim"]["state"].items()}  # as DCP does
    assert difference(in_order(state), in_order(found)) is None


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_items_in_several_files(tmp_path: Path, options: dict[str, Any]) -> None:
    """However DCP has dealt them out."""
    state = {"model": torch.nn.Linear(300, 300).state_dict(), "step": 3}
    assert (
        difference(in_order(state), in_order(imported(saved(state, tmp_path, **options)))) is None
    )


def test_large_tensors_in_a_small_budget(tmp_path: Path, rng: np.random.Generator) -> None:
    """Cut by chunks anywhere; progress counts what is written."""
    state = {"a": random_bits(rng, torch.int16, (9_000_001,)), "b": torch.ones(3)}
    uri = fresh_uri()
    heard: list[tuple[int, int]] = []
    holdfast.import_(
        saved(state, tmp_path), uri, budget_nbytes=1 << 20, progress=lambda *n: heard.append(n)
    )
    assert difference(state, holdfast.load(uri)) is None
    assert heard[-1][0] == heard[-1][1] > 18_000_000


def test_a_model_and_its_optimizer_are_loaded_as_objects(tmp_path: Path) -> None:
    """From what DCP's own functions make of them."""
    model = torch.nn.Linear(30, 50)
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(30)).sum().backward()
    optim.step()
    model_state, optim_state = dcp.state_dict.get_state_dict(model, optim)
    saved({"model": model_state, "optim": optim_state}, tmp_path)
    uri = fresh_uri()
    holdfast.import_(tmp_path, uri)
    other = torch.nn.Linear(30, 50)
    other_optim = torch.optim.AdamW(other.parameters())
    holdfast.load(uri, into={"model": other, "optim": other_optim})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
    assert difference(optim.state_dict(), other_optim.state_dict()) is None


def test_names_are_chosen_skipped_and_changed(tmp_path: Path) -> None:
    """Values as well as tensors; a list of which items are left out is one no more."""
    saved(trained(), tmp_path)
    found = imported(tmp_path, only=["model.*", "step"], skip=["*.bias"], rename={"model.*": "*"})
    assert sorted(found) == ["0.weight", "1.weight", "step"]
    found = imported(tmp_path, only=["list.*"], skip=["list.0.*"])
    assert difference({"list.1.t": torch.ones(3), "list.1.a": 2}, found) is None
    with pytest.raises(holdfast.UsageError, match="no tensor has a name like 'x'"):
        imported(tmp_path, only=["x"])


def test_what_is_left_out_is_not_read(tmp_path: Path, serve: Serve) -> None:
    """Of an optimizer's files, say."""
    saved({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path, single_file_per_rank=False)
    keys: set[str] = set()

    class Noting(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            keys.add(key)
            await super().read(key, start, into)

    assert (
        difference({"a": torch.ones(3)}, imported(serve(lambda _: Noting(tmp_path)), only=["a"]))
        is None
    )
    assert len([key for key in keys if key.endswith(".distcp")]) == 1


def test_small_items_are_read_together(tmp_path: Path, serve: Serve) -> None:
    """Not each by itself, of which there may be tens of thousands."""
    state = {f"layers.{number}": torch.full((100,), float(number)) for number in range(300)}
    saved(state, tmp_path)
    keys: list[str] = []

    class Noting(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            keys.append(key)
            await super().read(key, start, into)

    made = imported(serve(lambda _: Noting(tmp_path)))
    assert difference(in_order(state), in_order(made)) is None
    assert len([key for key in keys if key.endswith(".distcp")]) < 5 + 4  # samples


def test_items_that_are_alike_have_elements_of_their_own(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Also where DCP's checksums differ, and their names and values do."""
    state = {f"t{number}": random_bits(rng, torch.float32, (3, 50)) for number in range(20)}
    assert difference(in_order(state), in_order(imported(saved(state, tmp_path)))) is None


@pytest.mark.parametrize(("records", "may_be_others"), [(0, True), (100, False)])
def test_a_form_that_is_kept_is_small(records: int, may_be_others: bool) -> None:
    """However large an item is that somebody else has written, of which there may be thousands."""
    written = io.BytesIO()
    torch.save(torch.ones(5), written)
    with zipfile.ZipFile(written, "a") as archive:
        for number in range(records):
            archive.writestr(f"archive/{number}", b"")
    content = memoryview(written.getvalue())
    whole = WholeArchive("memory://x", Stretch("f", 0, len(content)), content)
    tensor = whole.value({})
    assert isinstance(tensor, StoredTensor)
    form, found = whole.form("t", tensor)
    assert (found, form.is_of(content)) == (may_be_others, True)
    assert (
        torch.frombuffer(bytearray(content[form.begin :][:20]), dtype=torch.float32).tolist()
        == [1.0] * 5
    )


def test_one_of_many_items_that_are_alike_is_damaged(tmp_path: Path) -> None:
    """It is refused, whichever byte says where its elements are, or what they are."""
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
        (np.ones(3), "numpy"),
        (torch.float16, "holds torch.float16"),
    ],
)
def test_values_that_are_objects_are_refused_by_name_or_skipped(
    tmp_path: Path, value: object, message: str
) -> None:
    """The error says how to leave them out."""
    saved({"odd": {"one": value}, "w": torch.ones(3)}, tmp_path)
    with pytest.raises(holdfast.UnsupportedFormatError, match=message) as caught:
        imported(tmp_path)
    assert "--skip 'odd.one'" in str(caught.value)
    assert difference({"w": torch.ones(3)}, imported(tmp_path, skip=["odd.*"])) is None


class Canary:
    """Pickled as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def metadata_of(folder: Path) -> Metadata:
    """What DCP reads."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def no_list(metadata: Metadata) -> None:
    """The parts of a tensor are none."""
    metadata.state_dict_metadata["w"].chunks = 7  # type: ignore[union-attr]


def box_outside(metadata: Metadata) -> None:
    """A part is larger than its tensor."""
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([7, 5])  # type: ignore[union-attr]


def no_place(metadata: Metadata) -> None:
    """No item is anywhere."""
    metadata.storage_data.clear()


def beyond_all_measure(metadata: Metadata) -> None:
    """A tensor of 2**80 elements."""
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40, 1 << 40])  # type: ignore[union-attr]


def item_of_no_kind(metadata: Metadata) -> None:
    """Neither a tensor nor a value."""
    metadata.state_dict_metadata["w"] = 1  # type: ignore[assignment]


def through_an_extension(metadata: Metadata) -> None:
    """Compressed, say."""
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def no_number(metadata: Metadata) -> None:
    """Before the beginning of a file."""
    next(iter(metadata.storage_data.values())).offset = -1


def sparse(metadata: Metadata) -> None:
    """Of a layout in which a part is no box of elements."""
    properties_of(metadata).layout = torch.sparse_coo


def no_gradient(metadata: Metadata) -> None:
    """Of which it is not known whether it requires a gradient."""
    properties_of(metadata).requires_grad = 7  # type: ignore[assignment]


def unpinned(metadata: Metadata) -> None:
    """Of which it is not known whether it is pinned."""
    properties_of(metadata).pin_memory = None  # type: ignore[assignment]


def properties_of(metadata: Metadata) -> TensorProperties:
    """Those of the tensor."""
    return metadata.state_dict_metadata["w"].properties  # type: ignore[union-attr]


def of_more_fields(metadata: Metadata) -> None:
    """As a later version might have them."""
    metadata.state_dict_metadata["w"].scale = 7  # type: ignore[union-attr]


def of_a_wider_head(metadata: Metadata) -> None:
    """The same of the whole."""
    metadata.zipped = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sparse, "'w' has the layout 'torch.sparse_coo'"),
        (no_gradient, "'w' has unknown properties"),
        (unpinned, "'w' has unknown properties"),
        (of_more_fields, "has the field 'scale', which is not known"),
        (of_a_wider_head, "has the field 'zipped', which is not known"),
        (no_list, "no list of parts"),
        (box_outside, "lies outside it"),
        (no_place, "does not locate"),
        (beyond_all_measure, "larger than any tensor"),
        (item_of_no_kind, "has a int in the place"),
        (through_an_extension, "extension"),
        (no_number, "is invalid"),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[Metadata], None], message: str
) -> None:
    """Before any file is read."""
    saved({"w": torch.ones(3, 5)}, tmp_path)
    metadata = metadata_of(tmp_path)
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        imported(tmp_path)


def test_the_plans_that_megatron_keeps_in_the_metadata_change_nothing(tmp_path: Path) -> None:
    """They repeat what the other fields say."""
    saved({"w": torch.ones(3, 5)}, tmp_path)
    metadata = metadata_of(tmp_path)
    metadata.all_local_plans = [SavePlan([])]  # type: ignore[attr-defined]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(imported(tmp_path)["w"], torch.ones(3, 5))


@pytest.mark.parametrize(
    "file", ["../secret", "/etc/passwd", "sub/x", "..\\x", "..", ".", "", "x\0", 7, None]
)
def test_metadata_that_leads_elsewhere_is_refused_before_anything_is_read(
    tmp_path: Path, serve: Serve, file: object
) -> None:
    """Files lie in the folder itself."""
    folder = saved({"w": torch.ones(3)}, tmp_path / "dcp")
    metadata = metadata_of(folder)
    next(iter(metadata.storage_data.values())).relative_path = file
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    keys: set[str] = set()

    class Noting(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            keys.add(key)
            await super().read(key, start, into)

    with pytest.raises(holdfast.UnsupportedFormatError, match="not a file in its folder"):
        imported(serve(lambda _: Noting(folder)))
    assert keys <= {".metadata"}


@pytest.mark.parametrize("where", ["storage_data", "planner_data", "version"])
def test_metadata_that_asks_for_anything_is_refused(tmp_path: Path, where: str) -> None:
    """By the name of what it asks for; nothing runs, and nothing is made."""
    trace = tmp_path / "trace"
    folder = saved({"w": torch.ones(3)}, tmp_path / "dcp")
    metadata = metadata_of(folder)
    setattr(metadata, where, {"x": Canary(trace)})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    uri = fresh_uri()
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"posix\.system"):
        holdfast.import_(folder, uri)
    assert not trace.exists()
    assert not MemoryDriver(uri.removeprefix("memory://")).objects
    metadata_of(folder)
    assert trace.exists()  # the trace would be seen


def test_a_value_that_asks_for_anything_is_refused(tmp_path: Path) -> None:
    """DCP unpickles it; the import does not."""
    trace = tmp_path / "trace"
    folder = saved({"w": torch.ones(3), "bad": Canary(trace)}, tmp_path / "dcp")
    assert not trace.exists()
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"posix\.system"):
        imported(folder)
    assert not trace.exists()


def laughs() -> bytes:
    """Lists of lists of lists, each twice as large as the one before."""
    doubled = b"".join(
        b"]q" + bytes([i + 1]) + b"(" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e"
        for i in range(200)
    )
    return b"\x80\x02]q\x00" + doubled + b"."


@pytest.mark.parametrize("data", [b"", b"\0", b"\x80\x04}.", b"\x80\x04N.", laughs()])
def test_metadata_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    """Whatever is in it."""
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(holdfast.UnsupportedFormatError, match="cannot be imported"):
        imported(tmp_path)


def test_paths_that_contradict_each_other_are_not_followed(tmp_path: Path) -> None:
    """Names are keys, then; nothing is lost."""
    saved({"a": 1, "b": {"c": torch.ones(2)}, "l": [torch.ones(1), torch.ones(2)]}, tmp_path)
    metadata = metadata_of(tmp_path)
    metadata.planner_data = {
        "a": ("a",),
        "b.c": ("b", "c", "d"),
        "l.0": ("l", 0),
        "l.1": ("l", "1"),
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = {"a": 1, "b.c": torch.ones(2), "l.0": torch.ones(1), "l.1": torch.ones(2)}
    assert difference(in_order(expected), in_order(imported(tmp_path))) is None


@pytest.mark.parametrize("numel", [300, 300_000])
def test_files_that_were_cut_or_exchanged_are_damage(tmp_path: Path, numel: int) -> None:
    """A file that is too short, is none of DCP's, or has another tensor; one that is gone. A large item
    is looked at before anything is written, a small one when it is read."""
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


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150
)
@given(st.data())
def test_any_damage_of_the_metadata_ends_well(tmp_path: Path, data: st.DataObject) -> None:
    """An error of ours, or a checkpoint that is whole."""
    if not (tmp_path / "good").exists():
        saved({"w": torch.ones(3, 5), "v": [1, {"a": 2}]}, tmp_path)
        (tmp_path / ".metadata").rename(tmp_path / "good")
    good = bytearray((tmp_path / "good").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / ".metadata").write_bytes(good)
    try:
        imported(tmp_path)
    except holdfast.HoldfastError:
        return


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)
@given(st.data())
def test_any_damage_of_an_item_ends_well(tmp_path: Path, data: st.DataObject) -> None:
    """An error of ours, or a checkpoint that is whole: elements have no checksum."""
    if not (tmp_path / "good").exists():
        saved({"w": torch.ones(3, 5)}, tmp_path)
        (file,) = tmp_path.glob("*.distcp")
        (tmp_path / "good").write_bytes(file.read_bytes())
    (file,) = tmp_path.glob("*.distcp")
    damaged = bytearray((tmp_path / "good").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(damaged)
    try:
        imported(tmp_path)
    except holdfast.HoldfastError:
        return


@pytest.mark.parametrize("numel", [3, 100_000])
def test_a_view_with_a_bit_set_is_refused_by_name(tmp_path: Path, numel: int) -> None:
    """In a small item and in a large one: its values are not the stored elements."""
    saved({"z": torch.ones(numel, dtype=torch.complex64).conj()}, tmp_path)
    with pytest.raises(holdfast.UnsupportedFormatError, match=r"tensor 'z' .* conjugate bit"):
        imported(tmp_path)


def test_types_of_small_values_are_kept(tmp_path: Path) -> None:
    """Sizes and ordered dicts in a value of the folder."""
    value = ({"size": torch.Size([2, 3])}, OrderedDict(b=1, a=2))
    saved({"v": value}, tmp_path)
    (sizes, ordered) = imported(tmp_path)["v"]
    assert type(sizes["size"]) is torch.Size
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]
