"""An opened checkpoint: what is in it, slices of it, and listings of many."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri
from support.given import Serve

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.local.driver import LocalDriver

SLICES = [
    slice(None),
    slice(-2, None),
    slice(None, None, 2),
    slice(4, 0, -2),
    slice(3, 1),
    slice(0, 99),
]
INDICES: list[Any] = [
    (), None, 0, -1, slice(1, 2), *((s,) for s in SLICES), *itertools.product(SLICES, [0, -3, slice(1, 3), slice(None, None, -3)]),
    (0, 0, 0), (slice(None), 1, slice(2, 5)), (-1, slice(None, None, -2), -1), (slice(2, 2), 1), (slice(0, 5), slice(2), slice(1, None, 3)),
]  # fmt: skip


@pytest.fixture(scope="module")
def stored() -> tuple[str, torch.Tensor]:
    """A checkpoint of one tensor of shape (5, 4, 7)."""
    uri, tensor = fresh_uri(), torch.arange(140).reshape(5, 4, 7)
    holdfast.save(uri, {"x": tensor})
    return uri, tensor


def test_an_index_means_what_it_means_to_numpy(stored: tuple[str, torch.Tensor]) -> None:
    """Integers and slices with any step select what they do in numpy."""
    uri, tensor = stored
    with holdfast.open(uri) as c:
        for index in INDICES:
            read, expected = c.read("x", index), tensor.numpy()[() if index is None else index]
            assert read.shape == expected.shape
            assert read.tolist() == expected.tolist()


def test_an_index_that_does_not_fit_is_refused(stored: tuple[str, torch.Tensor]) -> None:
    """A read refuses an index out of range, and any other than integers and slices."""
    with holdfast.open(stored[0]) as c:
        for index in (5, -6, (0, 4), (0, 0, 0, 0), 1.0, (None,), True, ..., [0], np.ones(5, bool)):
            with pytest.raises(holdfast.UsageError):
                c.read("x", index)


def test_a_small_slice_reads_little(tmp_path: Path, serve: Serve) -> None:
    """A slice of 64 KiB reads no more than that, a block at each end, and checksums."""
    holdfast.save(tmp_path, {"x": torch.zeros(8 << 20)})
    asked: list[int] = []

    class Counting(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            asked.append(len(into))
            await super().read(key, start, into)

    with holdfast.open(serve(lambda path: Counting(tmp_path))) as c:
        asked.clear()
        c.read("x", slice(1_000_000, 1_016_384))
    assert 64 << 10 <= sum(asked) <= (64 << 10) * 3 + (8 << 10)


def test_tensors_are_described() -> None:
    """Name, shape, dtype, bytes, shards and alias are listed in the order of the state."""
    shared = torch.ones(2, 3, dtype=torch.bfloat16)
    uri = fresh_uri()
    holdfast.save(
        uri,
        {"m": {"w": shared, "again": shared}, "empty": torch.zeros(0, 4), "s": torch.tensor(1)},
        step=12,
    )
    with holdfast.open(uri) as c:
        described = [
            (i.name, i.shape, i.dtype, i.nbytes, i.shards, i.ranks, i.owners, i.alias_of)
            for i in c.tensors.values()
        ]
        assert described == [
            ("m.w", (2, 3), "bfloat16", 12, 1, (0,), (), "m.again"),
            ("m.again", (2, 3), "bfloat16", 12, 1, (0,), (), None),
            ("empty", (0, 4), "float32", 0, 0, (), (), None),
            ("s", (), "int64", 8, 1, (0,), (), None),
        ]
        assert (c.step, c.world, c.nbytes) == (12, 1, 20)
        assert torch.equal(c.read("m.w"), shared)
        assert "step 12" in repr(c)


def test_values_are_listed_by_path() -> None:
    """Values are listed under their paths in Python syntax."""
    uri = fresh_uri()
    holdfast.save(
        uri, {"optim": {"lr": 0.5, "betas": (0.9, None)}, 3: {None: "x"}, "t": torch.ones(1)}
    )
    with holdfast.open(uri) as c:
        assert dict(c.values()) == {
            'state["optim"]["lr"]': 0.5, 'state["optim"]["betas"][0]': 0.9, 'state["optim"]["betas"][1]': None, "state[3][None]": "x",
        }  # fmt: skip


def test_the_step_is_taken_from_the_state_unless_given() -> None:
    """``state["step"]`` if it is an int."""
    for state, step, expected in (
        ({"step": 5}, None, 5),
        ({"step": 5}, 6, 6),
        ({"step": 5.0}, None, None),
        ({}, None, None),
        ([5], None, None),
    ):
        uri = fresh_uri()
        holdfast.save(uri, state, step=step)
        with holdfast.open(uri) as c:
            assert c.step == expected


def test_a_checkpoint_replaced_after_it_was_opened_says_so() -> None:
    """A read from a replaced checkpoint raises ReplacedError, not DamagedError."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.ones(3)})
    with holdfast.open(uri) as c:
        holdfast.save(uri, {"x": torch.zeros(3)})
        with pytest.raises(holdfast.ReplacedError):
            c.read("x")


def test_an_image_is_a_safetensors_file(tmp_path: Path) -> None:
    """A safetensors reader opens an image, and finds the tensors under their names."""
    from safetensors.numpy import load_file

    state = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": {"c": torch.tensor([1, 2], dtype=torch.uint8)},
        "h": torch.ones(3, dtype=torch.float16),
    }
    report = holdfast.save(tmp_path, state)
    found = load_file(tmp_path / "data" / report.attempt / "0.safetensors")
    assert set(found) == {"a", "b.c", "h", "__holdfast_blocks__"}
    assert found["a"].tolist() == state["a"].tolist()
    assert found["b.c"].tolist() == [1, 2]
    assert load_file(tmp_path / "manifest.safetensors")["tensor.name"].tobytes() == b"ab.ch"
