"""Corrupted bytes and contradictory boxes are errors that name the place, and never values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, flip, fresh_uri, image_in, saved
from support.drivers import storage_at
from support.forgery import Alter, Columns, Head, forge
from support.ranks import Replaced, load_as_ranks, save_cut, save_flats

import holdfast
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkpoint with several chunks: tensors x (40 MB) and y."""
    path = tmp_path_factory.mktemp("large") / "c"
    holdfast.save(
        path, {"x": torch.arange(10 << 20, dtype=torch.float32), "y": torch.arange(100_000)}
    )
    return path


@contextlib.contextmanager
def flipped(path: Path, *positions: int) -> Iterator[None]:
    """Flip bits at these positions of the image; restore it afterwards."""
    image = image_in(path)
    whole = image.read_bytes()
    for position in positions:
        flip(image, position)
    yield
    image.write_bytes(whole)


@pytest.mark.nightly(8)
@pytest.mark.parametrize(
    "position",
    [4096, 4096 + (16 << 20) - 4097, (16 << 20) + 70_000, (32 << 20) + 5, 4096 + (40 << 20) - 1],
)
def test_a_slice_is_verified_on_its_own(position: int, large: Path) -> None:
    """Only slices that touch the damaged block fail."""
    index = (position - 4096) // 4
    block = position // 65536 * 65536
    with flipped(large, position), holdfast.open(large) as c:
        with pytest.raises(holdfast.DamagedError, match="'x'"):
            c.read("x", index)
        for other in (block - 1, block + 65536):
            if 4096 <= other < 4096 + (40 << 20):
                assert c.read("x", (other - 4096) // 4).item() == (other - 4096) // 4
        report = c.verify()
        assert [(d.start, d.stop, d.tensors[0]) for d in report.damages] == [
            (block, block + 65536, "x")
        ]
        with pytest.raises(holdfast.DamagedError, match="'x'"):
            holdfast.load(large)


def test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data(large: Path) -> None:
    """Loads succeed, reads of slices are refused, and verify names the damaged checksums."""
    with flipped(large, -300), holdfast.open(large) as c:
        assert torch.equal(holdfast.load(large)["x"], torch.arange(10 << 20, dtype=torch.float32))
        with pytest.raises(holdfast.DamagedError, match="checksums"):
            c.read("x", slice(10_400_000, 10_400_001))
        assert ["checksums" in d.what for d in c.verify().damages] == [True]


def test_verify_reports_every_damage_and_progress(large: Path) -> None:
    """Verify reports all damage, and counts bytes."""
    seen: list[tuple[int, int]] = []
    positions = (5, 70_000, 70_001, (20 << 20) + 3, 33 << 20)
    with holdfast.open(large) as c:
        with flipped(large, *positions):
            report = c.verify(lambda done, total: seen.append((done, total)))
        assert c.verify().ok
    assert [d.start for d in report.damages] == [0, 65536, 20 << 20, 33 << 20]
    assert report.files == 1
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert report.nbytes > 40 << 20


def in_two_shards() -> str:
    """Save a tensor of 4 x 3, of which two ranks store two rows each."""
    uri = fresh_uri()
    boxes = {"w": [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]}
    save_cut(storage_at(uri), {"w": np.arange(12.0).reshape(4, 3)}, boxes)
    return uri


def moved(row: int, by: int) -> Alter:
    """Move the box of one shard along the first dimension."""

    def alter(columns: Columns, head: Head) -> None:
        columns["shard.offsets"] = columns["shard.offsets"].astype(np.int64)
        columns["shard.offsets"][row, 0] += by
        columns["shard.offsets"] = columns["shard.offsets"].astype(np.uint64)

    return alter


def test_a_box_that_sticks_out_of_its_tensor_is_damage() -> None:
    """Though the shards have as many elements as the tensor: the manifest is not opened."""
    uri = in_two_shards()
    forge(uri, moved(1, 1))
    with pytest.raises(holdfast.DamagedError, match="contradicts itself: boxes"):
        holdfast.open(uri)


def test_shards_of_a_wanted_tensor_that_overlap_are_damage() -> None:
    """Overlapping shards with the right number of elements would leave a row unfilled."""
    uri = in_two_shards()
    forge(uri, moved(1, -1))
    into = {"w": torch.full((4, 3), -1.0, dtype=torch.float64)}
    for load in (lambda: holdfast.load(uri, into=into), lambda: holdfast.load(uri)):
        with pytest.raises(holdfast.DamagedError, match="shards of a tensor overlap"):
            load()
    assert (into["w"] == -1).all()
    with holdfast.open(uri) as checkpoint, pytest.raises(holdfast.DamagedError, match="overlap"):
        checkpoint.read("w")


def test_a_shard_that_begins_within_an_element_is_damage() -> None:
    """Nothing else is wrong with it: its bytes lie in the image, and belong to no other shard."""
    uri = saved({"w": torch.arange(4.0), "x": torch.arange(4)})

    def shifted(columns: Columns, head: Head) -> None:
        # The shorter element comes last. It has one dimension: half as long, it leaves room to
        # move.
        row = int(np.argmax(columns["shard.start"]))
        columns["shard.start"] = columns["shard.start"].astype(np.uint64)
        columns["shard.start"][row] += 1
        columns["shard.lengths"][row, 0] = 3
        tensor_of = np.repeat(np.arange(len(columns["tensor.shards"])), columns["tensor.shards"])
        columns["tensor.shape"][tensor_of[row], 0] = 3

    forge(uri, shifted)
    with pytest.raises(holdfast.DamagedError, match="contradicts itself: alignment of shards"):
        holdfast.open(uri)


def replicated(state: dict[str, torch.Tensor]) -> FlatState:
    """Return a state of DTensors, each of which two ranks hold whole."""
    flat = flatten(state)
    flat.layouts = list(flat.layouts)
    for row, shape in enumerate(flat.shapes):
        origin = (0,) * len(shape)
        piece = Piece(Box(origin, shape), 0, shape)
        flat.layouts[row] = MeshLayout(shape, (piece,), shape, (0, 1), 2)
    flat.layout_id = None
    return flat


def test_what_is_tied_on_one_rank_and_stored_by_another_is_no_alias() -> None:
    """A tensor tied on one rank only is stored by the rank that has it separately."""
    uri = fresh_uri()
    a = torch.arange(3.0)
    p = torch.full((1,), 7.0)
    flats = [
        replicated({"a": a, "p": p, "q": p}),
        replicated({"a": a, "p": p.clone(), "q": p.clone()}),
    ]
    save_flats(storage_at(uri), flats)
    assert difference({"a": a, "p": p, "q": p}, holdfast.load(uri)) is None
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(checkpoint.read("q"), p)
        assert checkpoint.verify().ok


N = 8 << 20


def run_of(folder: Path, *states: dict[str, Any]) -> None:
    """Save checkpoints of a run, and damage the last one in the middle of ``a``."""
    with holdfast.Checkpointer(folder, grace_s=None) as checkpoints:
        for step, state in enumerate(states, 1):
            checkpoints.save(step, state)
            checkpoints.wait()
    image = next((folder / f"step-{len(states):08d}").glob("data/*/0.safetensors"))
    with holdfast.open(folder / f"step-{len(states):08d}") as checkpoint:
        assert next(iter(checkpoint.tensors)) == "a"
    with image.open("r+b") as file:
        file.seek(30 << 20)
        file.write(b"\xff" * 64)


def full(value: float, *names: str) -> dict[str, Any]:
    """Return a state of large tensors."""
    return {name: torch.full((N if name == "a" else 1 << 20,), value) for name in names}


@pytest.mark.parametrize("strict", ["state", False])
def test_an_older_checkpoint_that_lacks_what_was_touched_is_refused(
    strict: Any, tmp_path: Path
) -> None:
    """No state may mix two steps after a failed load."""
    run_of(tmp_path, full(1.0, "a"), full(2.0, "a", "b"))
    into = full(0.0, "a", "b")
    with (
        holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints,
        pytest.raises(holdfast.MismatchError) as caught,
    ):
        checkpoints.resume(into, strict=strict)
    text = str(caught.value)
    assert "'b'" in text
    if strict is False:
        assert "'b' still has values of a failed load" in text
        assert "create it again" in text
    assert set(into["a"].unique().tolist()) <= {0.0, 2.0}


def test_an_older_checkpoint_that_has_all_that_was_touched_is_loaded_whole(tmp_path: Path) -> None:
    """Other parts of the state stay unchanged, because no checkpoint touched them."""
    run_of(tmp_path, full(1.0, "a", "b", "d"), full(2.0, "a", "b"))
    into = full(0.0, "a", "b", "c", "d")
    with holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints:
        assert checkpoints.resume(into, strict=False) == 1
    assert {name: t.unique().tolist() for name, t in into.items()} == {
        "a": [1.0],
        "b": [1.0],
        "c": [0.0],
        "d": [1.0],
    }


class Averages:
    """An object that keeps entries missing from a loaded state."""

    def __init__(self, *names: str) -> None:
        self.of = {name: torch.zeros(1 << 20) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.of)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of |= state


def test_what_an_object_was_given_in_place_counts(tmp_path: Path) -> None:
    """Its tensors are filled before the object receives them."""
    old, new = Averages("x"), Averages("x", "y")
    new.of["y"].fill_(2.0)
    run_of(tmp_path, full(1.0, "a") | {"ema": old}, full(2.0, "a") | {"ema": new})
    with (
        holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints,
        pytest.raises(holdfast.MismatchError) as caught,
    ):
        checkpoints.resume(full(0.0, "a") | {"ema": Averages("x", "y")}, strict=False)
    assert "ema.y" in str(caught.value)


@pytest.mark.parametrize(("new", "fits"), [(full(2.0, "a", "b"), True), (full(2.0, "b"), False)])
def test_a_checkpoint_that_is_replaced_by_one_with_less_is_refused(new: Any, fits: bool) -> None:
    """The load restarts with the new checkpoint, which must have all names that it began to fill."""
    driver = Replaced(full(1.0, "a", "b"), new, last=2)
    into = full(0.0, "a", "b")
    if fits:
        load_as_ranks(driver, [into], strict=False)
        assert into["a"].unique().tolist() == into["b"].unique().tolist() == [2.0]
        return
    with pytest.raises(holdfast.MismatchError, match="'a' still has values of a failed load"):
        load_as_ranks(driver, [into], strict=False)
