"""Test loading into a state: matching, replacement, and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri

import holdfast


@pytest.fixture
def uri() -> str:
    """A checkpoint of a little of everything."""
    uri = fresh_uri()
    state = {
        "w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3), "half": torch.ones(2, dtype=torch.float16), "extra": torch.ones(1),
        "lr": 0.5, "name": "run", "list": [1, torch.tensor(2), 3], "more": {"x": 7},
    }  # fmt: skip
    holdfast.save(uri, state)
    return uri


def target() -> dict[str, Any]:
    """A state that fits that checkpoint."""
    return {
        "w": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.int64), "half": torch.zeros(2, dtype=torch.float16),
        "extra": torch.zeros(1), "lr": 0.0, "name": "", "list": [0, torch.tensor(0), 0], "more": {"x": 0},
    }  # fmt: skip


def test_what_fits_is_loaded(uri: str) -> None:
    """A load fills tensors and replaces values; containers and tensors stay the same objects."""
    into = target()
    objects = [into, into["w"], into["list"], into["list"][1], into["more"]]
    loaded = holdfast.load(uri, into=into)
    found = [loaded, loaded["w"], loaded["list"], loaded["list"][1], loaded["more"]]
    assert [id(it) for it in found] == [id(it) for it in objects]
    assert difference(holdfast.load(uri), into) is None


def test_every_difference_is_listed_at_once(uri: str) -> None:
    """One error lists all differences, and the load fills nothing."""
    into = target()
    del into["extra"], into["name"], into["more"]
    into |= {
        "w": torch.zeros(4, 3),
        "b": torch.zeros(3, dtype=torch.int32),
        "new": torch.zeros(1),
        "value": 1,
        "list": [0, torch.tensor(0), 0, 5],
    }
    before = copy.deepcopy(into)
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into=into)
    assert sorted(caught.value.differences) == sorted(
        [
            'state["w"]: shape [3, 4] in the checkpoint, [4, 3] in the state',
            'state["b"]: dtype int64 in the checkpoint, int32 in the state (cast=True converts)',
            "state[\"new\"]: no tensor 'new' in the checkpoint",
            'state["value"]: no such value in the checkpoint',
            'state["list"][3]: no such value in the checkpoint',
            "tensor 'extra' of the checkpoint: the state has no place for it",
            'value state["name"] of the checkpoint: the state has no place for it',
            'value state["more"]["x"] of the checkpoint: the state has no place for it',
        ]
    )
    assert difference(before, into) is None


def test_not_strict_loads_what_both_have(uri: str) -> None:
    """A load that is not strict leaves entries alone that only one side has."""
    into = {
        "w": torch.zeros(3, 4),
        "new": torch.full((2,), 9.0),
        "lr": 0.0,
        "value": 1,
        "list": [0],
        "deep": {"t": torch.zeros(1)},
    }
    holdfast.load(uri, into=into, strict=False)
    expected = {
        "w": torch.arange(12.0).reshape(3, 4),
        "new": torch.full((2,), 9.0),
        "lr": 0.5,
        "value": 1,
        "list": [1],
    }
    assert difference(expected | {"deep": {"t": torch.zeros(1)}}, into) is None


def test_not_strict_still_wants_shapes_and_dtypes_to_fit(uri: str) -> None:
    """A tensor of another shape or dtype is an error in every mode."""
    into = {
        "w": torch.zeros(3, 4),
        "b": torch.zeros(4, dtype=torch.int64),
        "half": torch.zeros(2),
        "nowhere": 1,
    }
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into=into, strict=False)
    assert len(caught.value.differences) == 2
    assert torch.equal(into["w"], torch.zeros(3, 4))


def test_a_type_that_differs_is_a_difference() -> None:
    """A tensor where the checkpoint has a value, and the other way round, do not fit."""
    uri = fresh_uri()
    holdfast.save(uri, {"a": torch.ones(1), "b": 1, "c": {"d": 1}})
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"a": 1, "b": torch.ones(1), "c": 5})
    assert len(caught.value.differences) == 6


@pytest.mark.parametrize("key", [1, 1.0, True, "1"], ids=repr)
def test_keys_of_another_type_are_other_keys(key: Any) -> None:
    """1, 1.0, True and "1" are four keys, for values and for tensors."""
    uri = fresh_uri()
    holdfast.save(uri, {"v": {key: 5}, "t": {key: torch.tensor(5)}})
    for other in (1, 1.0, True, "1"):
        into = {"v": {other: 0}, "t": {other: torch.tensor(0)}}
        if type(other) is type(key):
            holdfast.load(uri, into=into)
            assert difference({"v": {key: 5}, "t": {key: torch.tensor(5)}}, into) is None
        else:
            with pytest.raises(holdfast.MismatchError):
                holdfast.load(uri, into=into)


def test_tuples_are_made_anew_and_put_in_their_place() -> None:
    """A load replaces a tuple in its container by a new one with the same tensors."""
    uri = fresh_uri()
    holdfast.save(uri, {"t": (1, (2, torch.tensor(3)), [4]), "only": (torch.tensor(5),)})
    inner, listed, only = torch.tensor(0), [0], (torch.tensor(0),)
    into = {"t": (0, (0, inner), listed), "only": only}
    holdfast.load(uri, into=into)
    assert (
        difference({"t": (1, (2, torch.tensor(3)), [4]), "only": (torch.tensor(5),)}, into) is None
    )
    assert into["t"][1][1] is inner
    assert into["t"][2] is listed
    assert into["only"] is only


def test_a_mapping_that_cannot_be_assigned_to_is_refused_before_anything_is_read(uri: str) -> None:
    """A read-only mapping in the state is refused before the load fills any tensor."""
    from types import MappingProxyType

    into = {"w": torch.zeros(3, 4), "more": MappingProxyType({"x": 0})}
    with pytest.raises(holdfast.UsageError):
        holdfast.load(uri, into=into, strict=False)
    assert torch.equal(into["w"], torch.zeros(3, 4))


def test_expanded_targets_are_refused() -> None:
    """A load refuses a tensor some of whose elements share memory."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.arange(6.0).reshape(2, 3)})
    for target in (torch.zeros(3).expand(2, 3), torch.zeros(4).as_strided((2, 3), (1, 1))):
        with pytest.raises(holdfast.MismatchError, match="share memory"):
            holdfast.load(uri, into={"x": target})
    fine = torch.zeros(1, 3).expand(1, 3)
    holdfast.save(uri, {"x": torch.arange(3.0).reshape(1, 3)})
    holdfast.load(uri, into={"x": fine})
    assert fine.tolist() == [[0.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    "array",
    [np.broadcast_to(np.float64(0), (3,)), np.zeros(3)[::-1], np.frombuffer(bytes(24), np.float64)],
)
def test_arrays_that_cannot_be_filled_are_refused(array: np.ndarray) -> None:
    """A load refuses read-only arrays and arrays with negative strides."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": np.arange(3.0)})
    with pytest.raises(holdfast.UsageError, match=r'state\["x"\]'):
        holdfast.load(uri, into={"x": array})
    assert array.tolist() == [0, 0, 0]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.uint16),
]


@pytest.mark.nightly(3)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_cast_converts_as_torch_does_and_refuses_what_loses_a_kind(stored: torch.dtype) -> None:
    """``cast=True`` converts like ``Tensor.copy_``; without it, dtypes must be equal."""
    source, uri = torch.tensor([0, 1, 1, 0]).to(stored).reshape(2, 2), fresh_uri()
    holdfast.save(uri, {"x": source, "y": source.t()})
    for wanted in DTYPES:
        into = {"x": torch.zeros(2, 2, dtype=wanted), "y": torch.zeros(2, 2, dtype=wanted).t()}
        if stored != wanted:
            with pytest.raises(holdfast.MismatchError):
                holdfast.load(uri, into=into)
        if torch.can_cast(stored, wanted):
            holdfast.load(uri, into=into, cast=True)
            assert difference({"x": source.to(wanted), "y": source.t().to(wanted)}, into) is None
            continue
        with pytest.raises(holdfast.MismatchError) as caught:
            holdfast.load(uri, into=into, cast=True)
        assert len(caught.value.differences) == 2
        assert torch.equal(into["x"], torch.zeros(2, 2, dtype=wanted))


@pytest.mark.parametrize("stored", [torch.float4_e2m1fn_x2, torch.float32])
def test_cast_refuses_what_torch_cannot_convert(stored: torch.dtype) -> None:
    """A cast that torch cannot do is refused by path before anything is filled.

    ``torch.can_cast`` claims that the cast is safe.
    """
    wanted = {torch.float32: torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2: torch.float32}[stored]
    assert torch.can_cast(stored, wanted)
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.zeros(8, dtype=torch.uint8).view(stored), "y": torch.ones(2)})
    into = {"x": torch.empty(8 // stored.itemsize, dtype=wanted), "y": torch.zeros(2)}
    with pytest.raises(holdfast.MismatchError, match=r'"x"\]: dtype \w+ in the check') as caught:
        holdfast.load(uri, into=into, cast=True)
    assert "cast=True" not in str(caught.value)
    assert into["y"].tolist() == [0.0, 0.0]


def test_a_path_that_does_not_exist_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Reading a missing path raises a FileNotFoundError of ours, and creates nothing."""
    for call in (holdfast.load, holdfast.open, lambda uri: holdfast.load(uri, into={})):
        with pytest.raises(holdfast.NotACheckpointError) as caught:
            call(tmp_path / "nothing" / "here")
        assert isinstance(caught.value, FileNotFoundError)
        assert "nothing/here" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_dtypes_of_another_torch_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype that this torch lacks raises an error; other tensors can still be read."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.ones(2, dtype=torch.float8_e8m0fnu), "y": torch.ones(2)})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(holdfast.UnsupportedFormatError, match="float8_e8m0fnu"):
        holdfast.load(uri)
    with holdfast.open(uri) as c:
        assert c.tensors["x"].dtype == "float8_e8m0fnu"
        assert c.read("y").tolist() == [1.0, 1.0]
    into = {"y": torch.zeros(2)}
    holdfast.load(uri, into=into, strict=False)
    assert into["y"].tolist() == [1.0, 1.0]
