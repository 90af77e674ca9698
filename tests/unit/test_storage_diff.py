"""Test ``holdfast.diff`` and ``holdfast diff``: what differs, and what is read to find out."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri, from_bytes, random_bits, raw, saved
from support.commands import printed
from support.copies import flipped, images
from support.drivers import storage_at
from support.ranks import save_as_ranks, save_cut

import holdfast
from holdfast.planner.box import Box
from holdfast.storage.state.gaps import gap_between

DTYPES = [torch.bool, torch.int8, torch.uint64, torch.float8_e5m2, torch.bfloat16, torch.complex64]


def whats(report: holdfast.DiffReport) -> list[tuple[str, str]]:
    """Which tensors differ, and in what."""
    return [(t.name, t.what) for t in report.tensors]


def test_a_copy_is_equal_and_not_read() -> None:
    """Tensors with equal digests are equal, and are not read."""
    state = {"w": torch.randn(100, 100), "tied": torch.ones(3), "step": 3}
    a = saved(state)
    b = fresh_uri()
    holdfast.copy(a, b)
    flipped(storage_at(b), images(storage_at(b))[0], 5000)
    report = holdfast.diff(a, b)
    assert report.equal
    assert (report.equal_tensors, report.equal_by_digest, report.read_nbytes) == (2, 2, 0)


def test_every_kind_of_difference_is_named() -> None:
    """Diff names tensors of one side only and differences in shape, dtype and values."""
    same = torch.randn(1000)
    a = saved(
        {"same": same, "a": same, "v": torch.arange(4), "s": torch.ones(3, 2), "t": torch.ones(2)}
    )
    b = saved(
        {
            "same": same,
            "b": same,
            "v": torch.tensor([0, 1, 5, 0]),
            "s": torch.ones(2, 3),
            "t": torch.ones(2, dtype=torch.float64),
        }
    )
    report = holdfast.diff(a, b)
    assert not report.equal
    assert sorted(whats(report)) == [
        ("a", "only in a"), ("b", "only in b"), ("s", "shape"), ("t", "dtype"), ("v", "values")
    ]  # fmt: skip
    values = report.tensors[-1]
    assert (values.name, values.differing, values.max_abs) == ("v", 2, 3)
    assert report.equal_tensors == 1


def test_tensors_of_different_layouts_are_compared_by_their_values() -> None:
    """Tensors cut in rows, cut in columns and whole are compared by their elements."""
    array = np.arange(24.0).reshape(4, 6)
    by_rows = fresh_uri()
    save_cut(storage_at(by_rows), {"w": array}, {"w": [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]})
    by_columns = fresh_uri()
    columns = [Box((0, at), (4, 2)) for at in (0, 2, 4)]
    save_cut(storage_at(by_columns), {"w": array}, {"w": columns})
    for uri in (by_columns, saved({"w": torch.from_numpy(array)})):
        report = holdfast.diff(by_rows, uri)
        assert report.equal, report
        assert (report.equal_tensors, report.equal_by_digest) == (1, 0)
        assert report.read_nbytes == array.nbytes
    array[3, 5] += 0.5
    report = holdfast.diff(by_rows, saved({"w": torch.from_numpy(array)}))
    assert [(t.differing, t.max_abs) for t in report.tensors] == [(1, 0.5)]


def test_a_small_budget_is_enough(rng: np.random.Generator) -> None:
    """Diff compares a large tensor in windows, and reports it once."""
    big = random_bits(rng, torch.int16, (50_001,))
    wide = random_bits(rng, torch.complex128, (4_099,))
    other = big.clone()
    other[::7] ^= 1
    a = saved({"big": big, "wide": wide})
    report = holdfast.diff(a, saved({"big": other, "wide": wide}), budget_nbytes=1 << 16)
    assert [(t.name, t.differing, t.max_abs) for t in report.tensors] == [("big", 7143, 1)]
    assert report.equal_tensors == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_decide_in_every_dtype(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Equal bits are equal, NaNs too; other bits differ, with a distance if there is one."""
    tensor = random_bits(rng, dtype, (257,))
    a = saved({"x": tensor, "y": 1})
    assert holdfast.diff(a, saved({"y": 1, "x": tensor})).equal
    other = from_bytes(raw(tensor), dtype, (257,))  # a clone of a bool has other bits
    other[13] = 0
    other[14] = 1
    tensor[13] = 1
    tensor[14] = 1
    (found,) = holdfast.diff(saved({"x": tensor}), saved({"x": other})).tensors
    assert (found.differing, found.max_abs) == (1, 1)


def test_distances_that_float64_does_not_have() -> None:
    """Integers are subtracted exactly; NaN on one side gives NaN."""
    cases: list[tuple[str, list[Any], list[Any], float]] = [
        ("int64", [2**53], [2**53 + 1], 1),
        ("int64", [-(2**63)], [2**63 - 1], 2**64 - 1),
        ("int8", [-128], [127], 255),
        ("uint64", [0], [2**64 - 1], 2**64 - 1),
        ("float32", [0.0], [-0.0], 0),
        ("float32", [math.inf], [-math.inf], math.inf),
    ]
    for dtype, ours, theirs, expected in cases:
        a = np.array(ours, dtype)
        gap = gap_between(
            a.view(np.uint8), np.array(theirs, dtype).view(np.uint8), dtype, a.itemsize
        )
        assert (gap.differing, gap.max_abs) == (1, expected), dtype
    quiet, loud = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.uint8).reshape(2, 4)
    assert gap_between(quiet, loud, "float32", 4).max_abs == 0
    one = np.ones(1, np.float32).view(np.uint8)
    lone = gap_between(quiet, one, "float32", 4) + gap_between(one, one, "float32", 4)
    assert lone.differing == 1
    assert lone.max_abs is not None
    assert math.isnan(lone.max_abs)


def test_small_values_are_compared() -> None:
    """Diff compares values and containers by type too."""
    a = saved({"x": 1, "t": (1, 2), "o": OrderedDict(a=1), "e": {}, "same": "é", "only": None})
    b = saved({"x": 1.0, "t": [1, 2], "o": {"a": 1}, "same": "é"})
    report = holdfast.diff(a, b)
    assert {v.path: (v.a and v.a[0][1], v.b and v.b[0][1]) for v in report.values} == {
        'state["x"]': (1, 1.0),
        'type(state["t"])': ("tuple", "list"),
        'type(state["o"])': ("OrderedDict", None),
        'type(state["e"])': ("dict", None),
        'state["only"]': (None, None),
    }
    assert not report.tensors


def test_the_number_of_ranks_is_no_difference_and_their_own_tensors_are_compared() -> None:
    """Per-rank tensors are compared by rank."""
    one = fresh_uri()
    save_as_ranks(storage_at(one), [{"n": 1, "w": torch.ones(3)}])
    two = fresh_uri()
    save_as_ranks(storage_at(two), [{"n": 1, "w": torch.ones(3)}] * 2)
    assert holdfast.diff(one, two).equal
    own = fresh_uri()
    save_as_ranks(storage_at(own), [{"n": 1, "w": torch.ones(3)}, {"n": 2, "w": torch.zeros(3)}])
    report = holdfast.diff(one, own)
    assert [(t.name, t.rank, t.what, t.max_abs) for t in report.tensors] == [("w", 1, "values", 1)]
    assert [v.path for v in report.values] == ['state["n"]']


def test_tied_tensors_are_equal_to_separate_ones() -> None:
    """Diff ignores whether equal tensors share their storage."""
    tensor = torch.randn(10)
    a = saved({"a": tensor, "b": tensor})
    assert holdfast.diff(a, saved({"a": tensor, "b": tensor.clone()})).equal
    report = holdfast.diff(a, saved({"a": tensor, "b": tensor + 1}))
    assert whats(report) == [("b", "values")]


def test_damage_is_an_error_and_no_difference() -> None:
    """Diff raises DamagedError for damage in what it has to read."""
    a, b = (saved({"w": torch.full((10_000,), value)}) for value in (0.0, 1.0))
    flipped(storage_at(b), images(storage_at(b))[0], 5000)
    with pytest.raises(holdfast.DamagedError, match="not what was written"):
        holdfast.diff(a, b)


def test_the_command_says_whether_they_are_equal() -> None:
    """The command exits with 0 if equal, with 1 and a line per difference if not, with 2 on errors."""
    state = {"m": {"w": torch.zeros(2, 2), "b": torch.zeros(2)}, "step": 1}
    a = saved(state)
    assert printed("diff", a, a, status=0) == "equal: 2 tensors; 0 B of each side read\n"
    state["m"]["w"] = torch.tensor([[0, 0.25], [0, 0]])
    b = saved({**state, "step": 2, "new": torch.ones(1, dtype=torch.int8)})
    assert printed("diff", a, b, status=1).splitlines() == [
        'value  state["step"]  1 | 2',
        "only in b  new  int8 [1]",
        "values  m.w  float32 [2×2]  1 of 4 elements, by up to 0.25",
        "different: 2 tensors and 1 value; 1 tensor equal; 24 B of each side read",
    ]
    printed("diff", a, "memory://nothing-at-all", status=2)


def test_the_command_speaks_json() -> None:
    """The command prints one JSON document without NaN constants."""
    a = saved({"w": torch.zeros(2), "n": 1})
    b = saved({"w": torch.tensor([0.0, math.nan])})

    def refuse(constant: str) -> Callable[[], None]:
        raise AssertionError(constant)

    found = json.loads(printed("diff", a, b, "--json", status=1), parse_constant=refuse)
    kind = {"dtype": "float32", "shape": [2]}
    assert found.pop("seconds") > 0
    assert found == {
        "a": a, "b": b, "equal": False, "equal_tensors": 0, "equal_by_digest": 0, "read_nbytes": 8,
        "tensors": [
            {"name": "w", "rank": None, "what": "values", "a": kind, "b": kind,
             "differing": 1, "max_abs": "nan"}
        ],
        "values": [{"path": 'state["n"]', "a": [{"ranks": [0], "value": 1}], "b": None}],
    }  # fmt: skip
