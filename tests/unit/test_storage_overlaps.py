"""Test tensors that share memory: their stored values must agree, and are never mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import flip, fresh_uri, image_in
from torch import nn

import holdfast


class LM(nn.Module):
    """An embedding and a head, tied or not; of two chunks each where it matters."""

    def __init__(self, tied: bool, rows: int = 9000, columns: int = 1024) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, columns)
        self.head = nn.Linear(columns, rows, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def array(values: Any) -> np.ndarray:
    """Return a tensor or an array as an array."""
    return values.resolve_neg().numpy() if isinstance(values, torch.Tensor) else values


def untied(first: float, second: float) -> tuple[str, LM]:
    """A checkpoint of two tensors, each of one value."""
    model, uri = LM(False), fresh_uri()
    with torch.no_grad():
        model.emb.weight.fill_(first)
        model.head.weight.fill_(second)
    holdfast.save(uri, {"model": model, "step": 3})
    return uri, model


def test_tied_weights_of_which_two_values_are_stored_are_refused() -> None:
    """By both names, before anything is filled, and with what can be done."""
    uri, _ = untied(1.0, 2.0)
    model = LM(True)
    before = model.emb.weight.detach().clone()
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"model": model, "step": 0})
    assert "'model.emb.weight', 'model.head.weight' share memory" in str(caught.value)
    assert 'strict="state"' in str(caught.value)
    assert torch.equal(before, model.emb.weight)


def test_values_that_agree_after_a_cast_are_loaded() -> None:
    """Values are compared as the state would hold them."""
    uri = fresh_uri()
    holdfast.save(uri, {"a": torch.ones(5), "b": torch.ones(5, dtype=torch.float16)})
    tied = torch.zeros(5, dtype=torch.float64)
    holdfast.load(uri, into={"a": tied, "b": tied}, cast=True)
    assert tied.tolist() == [1.0] * 5


LAYOUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "whole and part": lambda base: (base, base[10:30]),
    "part and whole": lambda base: (base[10:30], base),
    "overlapping slices": lambda base: (base[:40], base[20:60]),
    "a matrix and its columns": lambda base: (base.view(8, 8), base.view(8, 8)[:, 2:5]),
    "transposed": lambda base: (base.view(8, 8), base.view(8, 8).t()),
    "another dtype": lambda base: (base, base.view(torch.int32)[5:9]),
    "negated": lambda base: (base, torch._neg_view(base[3:9])),
    "numpy and torch": lambda base: (base, base.numpy()[5:50]),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_views_that_were_stored_as_they_are_come_back(
    layout: Any, rng: np.random.Generator
) -> None:
    """Views that agree when saved agree when loaded, in every mode."""
    base = torch.from_numpy(rng.random(64, np.float32))
    uri = fresh_uri()
    first, second = layout(base)
    holdfast.save(uri, {"a": first, "b": second})
    for strict in (True, "state", False):
        into = torch.zeros(64)
        first, second = layout(into)
        holdfast.load(uri, into={"a": first, "b": second}, strict=strict)
        stored = holdfast.load(uri)
        assert np.array_equal(array(first), array(stored["a"]))
        assert np.array_equal(array(second), array(stored["b"]))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_views_that_contradict_each_other_are_refused_or_the_last_one_is_whole(layout: Any) -> None:
    """Wherever they overlap, and whatever part of them does."""
    uri = fresh_uri()
    first, _ = layout(torch.full((64,), 7.0))
    _, second = layout(torch.full((64,), 9.0))
    holdfast.save(
        uri,
        {
            "a": first.clone(),
            "b": second.copy() if isinstance(second, np.ndarray) else second.clone(),
        },
    )
    into = torch.zeros(64)
    first, second = layout(into)
    with pytest.raises(holdfast.MismatchError, match="'a', 'b' share memory"):
        holdfast.load(uri, into={"a": first, "b": second})
    assert into.tolist() == [0.0] * 64
    holdfast.load(uri, into={"a": first, "b": second}, strict="state")
    assert np.array_equal(array(second), array(holdfast.load(uri)["b"]))
    covered = into[:60] if first.numel() == 40 else into
    assert set(covered.tolist()) <= {7.0, 9.0, -9.0}


@pytest.mark.parametrize("count", [3, 7])
def test_neighbours_in_one_storage_are_filled_in_place(
    count: int, rng: np.random.Generator
) -> None:
    """Disjoint slices of one storage, also interleaved ones, do not conflict."""
    uri = fresh_uri()
    stored = torch.from_numpy(rng.random((count, 6 * count)))
    for dim in (0, 1):
        holdfast.save(
            uri, {str(i): part.clone() for i, part in enumerate(stored.chunk(count, dim))}
        )
        into = torch.zeros_like(stored)
        holdfast.load(uri, into={str(i): part for i, part in enumerate(into.chunk(count, dim))})
        assert torch.equal(into, stored)


def test_one_tensor_under_many_names() -> None:
    """Of three names, the last differs, and then the middle one."""
    for values in ([4.0, 4.0, 6.0], [4.0, 6.0, 4.0]):
        uri, tied = fresh_uri(), torch.zeros(3)
        holdfast.save(
            uri, {name: torch.full((3,), value) for name, value in zip("abc", values, strict=True)}
        )
        with pytest.raises(holdfast.MismatchError, match="differ in 1 place"):
            holdfast.load(uri, into=dict.fromkeys("abc", tied))
        holdfast.load(uri, into=dict.fromkeys("abc", tied), strict=False)
        assert tied.tolist() == [values[-1]] * 3


def test_tied_weights_that_are_stored_as_one_are_read_once() -> None:
    """No second tensor is there to be compared with."""
    model, uri = LM(True, 100, 8), fresh_uri()
    holdfast.save(uri, {"model": model})
    other, reports = LM(True, 100, 8), list[holdfast.LoadReport]()
    holdfast.load(uri, into={"model": other}, on_report=reports.append)
    assert torch.equal(model.emb.weight, other.emb.weight)
    split = LM(False, 100, 8)
    holdfast.load(uri, into={"model": split})
    assert torch.equal(model.emb.weight, split.head.weight)


def test_a_dict_at_two_places_gets_values_of_one_of_them() -> None:
    """The same holds for small values: refused, or the last."""
    uri = fresh_uri()
    holdfast.save(
        uri,
        {
            "a": {"x": 1, "y": 5, "t": torch.ones(1)},
            "b": {"x": 2, "y": 5, "t": torch.full((1,), 2.0)},
        },
    )
    both = {"x": 0, "y": 0, "t": torch.zeros(1)}
    with pytest.raises(holdfast.MismatchError, match=r"'a\.x' and 'b\.x'"):
        holdfast.load(uri, into={"a": both, "b": both})
    holdfast.load(uri, into={"a": both, "b": both}, strict="state")
    assert both == {"x": 2, "y": 5, "t": torch.full((1,), 2.0)}


def test_what_is_damaged_of_shared_memory_is_said_before_anything_is_filled(tmp_path: Any) -> None:
    """It is read first."""
    uri = str(tmp_path / "c")
    holdfast.save(uri, {"a": torch.ones(40_000), "b": torch.ones(40_000), "c": torch.ones(4)})
    image = image_in(tmp_path / "c")
    flip(image, image.stat().st_size // 2)
    tied, other = torch.zeros(40_000), torch.zeros(4)
    with pytest.raises(holdfast.DamagedError):
        holdfast.load(uri, into={"a": tied, "b": tied, "c": other})
    assert (tied.unique().tolist(), other.tolist()) == ([0.0], [0.0] * 4)
