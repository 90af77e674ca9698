"""Test loading into a state: matching, replacement, strictness, and errors."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, saved
from torch import nn

import holdfast


@pytest.fixture
def uri() -> str:
    """Save a checkpoint with all kinds of entries; return its URI."""
    uri = fresh_uri()
    state = {
        "w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3), "half": torch.ones(2, dtype=torch.float16), "extra": torch.ones(1),
        "lr": 0.5, "name": "run", "list": [1, torch.tensor(2), 3], "more": {"x": 7},
    }  # fmt: skip
    holdfast.save(uri, state)
    return uri


def target() -> dict[str, Any]:
    """Return a state that fits that checkpoint."""
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
    """A tensor does not fit a stored value, and a value does not fit a stored tensor."""
    uri = saved({"a": torch.ones(1), "b": 1, "c": {"d": 1}})
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"a": 1, "b": torch.ones(1), "c": 5})
    assert len(caught.value.differences) == 6


@pytest.mark.parametrize("key", [1, 1.0, True, "1"], ids=repr)
def test_keys_of_another_type_are_other_keys(key: Any) -> None:
    """1, 1.0, True and "1" are four keys, for values and for tensors."""
    uri = saved({"v": {key: 5}, "t": {key: torch.tensor(5)}})
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
    state = {"t": (1, (2, torch.tensor(3)), [4]), "only": (torch.tensor(5),)}
    uri = saved(state)
    inner, listed, only = torch.tensor(0), [0], (torch.tensor(0),)
    into = {"t": (0, (0, inner), listed), "only": only}
    holdfast.load(uri, into=into)
    assert difference(state, into) is None
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
    """A load refuses a tensor with elements that share memory."""
    uri = saved({"x": torch.arange(6.0).reshape(2, 3)})
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
    uri = saved({"x": np.arange(3.0)})
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
    uri = saved({"x": torch.zeros(8, dtype=torch.uint8).view(stored), "y": torch.ones(2)})
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
    uri = saved({"x": torch.ones(2, dtype=torch.float8_e8m0fnu), "y": torch.ones(2)})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(holdfast.UnsupportedFormatError, match="float8_e8m0fnu"):
        holdfast.load(uri)
    with holdfast.open(uri) as c:
        assert c.tensors["x"].dtype == "float8_e8m0fnu"
        assert c.read("y").tolist() == [1.0, 1.0]
    into = {"y": torch.zeros(2)}
    holdfast.load(uri, into=into, strict=False)
    assert into["y"].tolist() == [1.0, 1.0]


def net() -> nn.Module:
    """Return two layers with four tensors."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Wrapped(nn.Module):
    """A module around another one, which adds a prefix to its names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner


@pytest.fixture
def run() -> tuple[str, nn.Module]:
    """Save a model, its optimizer and a step; return the URI and the model."""
    model, uri = net(), fresh_uri()
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    holdfast.save(uri, {"model": model, "optim": optim, "step": 7})
    return uri, model


def of_names(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log records, except the line that every load writes."""
    return [record for record in caplog.records if not record.name.endswith(".telemetry")]


def loaded(uri: str, into: Any, strict: Any) -> holdfast.LoadReport:
    """Load; return the report."""
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, strict=strict, on_report=reports.append)
    return reports[0]


def same(a: nn.Module, b: nn.Module) -> bool:
    """Return whether all their tensors are equal."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def refused(uri: str, into: Any, strict: Any = True, **options: Any) -> str:
    """Load, and return the text of the MismatchError."""
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into=into, strict=strict, **options)
    return str(caught.value)


def test_a_model_alone_is_loaded_with_strict_state(run: tuple[str, nn.Module]) -> None:
    """The other entries of the checkpoint are ignored, and listed in the report."""
    uri, model = run
    other = net()
    report = loaded(uri, {"model": other}, "state")
    assert same(model, other)
    assert (report.missing, report.missing_count) == ((), 0)
    assert "step" in report.unexpected
    assert "optim.state.0.weight.exp_avg" in report.unexpected
    assert report.unexpected_count == len(report.unexpected) > 8


def test_strict_state_wants_every_name_of_the_state(run: tuple[str, nn.Module]) -> None:
    """A layer that is not stored is an error, and nothing is filled."""
    uri, _ = run
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"model": model}, strict="state")
    assert [text.partition(":")[0] for text in caught.value.differences] == [
        'state["model"]["2.weight"]',
        'state["model"]["2.bias"]',
    ]
    assert torch.equal(before, model[0].weight)


def test_strict_checkpoint_wants_a_place_for_every_stored_name(run: tuple[str, nn.Module]) -> None:
    """If a stored name has no place, nothing is filled."""
    uri, _ = run
    other = net()
    before = [tensor.detach().clone() for tensor in other.parameters()]
    text = refused(uri, {"model": other, "step": 0, "new": 1}, "checkpoint")
    assert "tensor 'optim.state.0.weight.exp_avg' of the checkpoint" in text
    assert "state[" not in text
    assert "strict=False loads" in text
    assert all(map(torch.equal, other.parameters(), before))
    text = refused(uri, {"model": other, "step": 0}, "checkpoint")
    assert 'strict="state" loads' in text


def test_strict_checkpoint_takes_more_names_in_the_state(
    run: tuple[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters, for example, are added to a stored model, or stored alone. They stay unchanged."""
    uri, model = run
    other, new = net(), nn.Linear(2, 2)
    kept = new.weight.detach().clone()
    into = {
        "model": other,
        "new": new,
        "optim": torch.optim.Adam(other.parameters()),
        "other": torch.optim.Adam(new.parameters()),
        "step": 0,
    }
    assert 'strict="checkpoint" or strict=False loads' in refused(uri, into)
    report = loaded(uri, into, "checkpoint")
    assert same(model, other)
    assert into["step"] == 7
    assert torch.equal(new.weight, kept)
    assert (set(report.missing), report.unexpected) == ({"new.weight", "new.bias", "other"}, ())
    assert "3 names of the state are not in" in caplog.text


@pytest.mark.parametrize(
    ("typo", "said"),
    [
        ({"model": "modle"}, "'model.' where those of the state have 'modle.'"),
        ({"optim": "optmi"}, "Did you mean 'optim' instead of 'optmi'?"),
        ({"step": "stpe"}, "Did you mean 'step' instead of 'stpe'?"),
        ({"model": "modle", "step": "stpe"}, "Did you mean 'step' instead of 'stpe'?"),
    ],
    ids=str,
)
@pytest.mark.parametrize("strict", [True, "state"])
def test_a_typo_gets_a_short_error(
    run: tuple[str, nn.Module], typo: dict[str, str], said: str, strict: Any
) -> None:
    """It shows a few names of each kind, counts the others, and suggests a correction."""
    uri, _ = run
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    holdfast.save(uri, {"model": model, "optim": torch.optim.Adam(model.parameters()), "step": 1})
    state = {"model": model, "optim": torch.optim.Adam(model.parameters()), "step": 0}
    into = {typo.get(key, key): value for key, value in state.items()}
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into=into, strict=strict)
    text = str(caught.value)
    assert said in text
    assert len(text.splitlines()) <= 14
    shown = sum(difference in text for difference in caught.value.differences)
    more = [int(line.split()[1]) for line in text.splitlines() if " more that " in line]
    assert shown + sum(more) == len(caught.value.differences)


def test_a_misspelt_name_below_others_is_asked_about() -> None:
    """The suggestion is made in its own place, also within a part. It ignores numbers and
    dissimilar names."""
    uri = saved({"model": {"layers": [{"weight": torch.ones(1), "bias": torch.ones(1)}]}, "lr": 1})
    into = {"layers": [{"wieght": torch.ones(1)}, {"bias": torch.ones(1)}], "head": torch.ones(1)}
    text = refused(uri, {"model": into, "lr": 0})
    assert "Did you mean 'model.layers.0.weight' instead of 'model.layers.0.wieght'?" in text
    assert text.count("Did you mean") == 1
    assert "Did you mean" not in refused(uri, {"model": {"layers": []}, "lr": 0, "optim": 1})
    assert "Did you mean 'lr' instead of 'lrs'?" in refused(uri, 1.0, only="lrs")


def test_not_strict_says_what_it_left(
    run: tuple[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Names missing from the checkpoint give a warning; its unused names give a line at INFO."""
    uri, model = run
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with caplog.at_level(logging.INFO, logger="holdfast"):
        report = loaded(uri, {"model": other, "step": 0, "new": 1}, False)
    assert torch.equal(other[1].weight, model[1].weight)
    assert report.missing == ("model.2.weight", "model.2.bias", "new")
    assert report.missing_count == 3
    said = {record.levelname: record.getMessage() for record in of_names(caplog)}
    assert "3 names of the state are not in" in said["WARNING"]
    assert "model.2.weight, model.2.bias, new" in said["WARNING"]
    assert "not in the state and not loaded" in said["INFO"]


def test_a_load_that_leaves_nothing_says_nothing(
    run: tuple[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """This holds in every mode."""
    uri, _ = run
    with caplog.at_level(logging.INFO, logger="holdfast"):
        for strict in (True, "state", "checkpoint", False):
            other = net()
            optim = torch.optim.Adam(other.parameters())
            report = loaded(uri, {"model": other, "optim": optim, "step": 0}, strict)
            assert (report.missing, report.unexpected) == ((), ())
    assert of_names(caplog) == []


@pytest.mark.parametrize("strict", [True, "state", "checkpoint", False])
def test_a_state_of_which_nothing_is_stored_is_an_error(
    run: tuple[str, nn.Module], strict: Any
) -> None:
    """A misspelled name loads nothing, which is an error in every mode."""
    text = refused(run[0], {"modell": net()}, strict)
    assert "the checkpoint has nothing of the state" in text
    assert "he stored names have 'model.' where those of the state have 'modell.'" in text
    assert "strict=" not in text
    if strict is not True:  # a filter has probably removed everything
        assert "the checkpoint has nothing of the state" in refused(run[0], {"m": {}}, strict)


def test_an_unknown_mode_is_refused(run: tuple[str, nn.Module]) -> None:
    """The error comes before any work."""
    with pytest.raises(holdfast.UsageError, match="strict='states'"):
        holdfast.load(run[0], into={"model": net()}, strict="states")  # type: ignore[call-overload]


def test_lists_in_the_report_are_bounded() -> None:
    """Each list has at most a hundred names, and the report has their number."""
    uri = saved({"both": 1, "old": {f"{i}": i for i in range(250)}})
    report = loaded(uri, {"both": 0, "new": {f"x{i}": torch.zeros(1) for i in range(150)}}, False)
    assert (len(report.missing), report.missing_count) == (100, 150)
    assert (len(report.unexpected), report.unexpected_count) == (100, 250)


def test_advice_that_is_followed_works() -> None:
    """An error names only the options that help."""
    uri = saved({"w": torch.ones(2), "x": 1})
    into = {"w": torch.zeros(2, dtype=torch.float64), "new": 1}
    text = refused(uri, into)
    assert "cast=True" in text
    assert "strict=False" in text
    assert "strict" not in refused(uri, into, strict=False)
    holdfast.load(uri, into=into, strict=False, cast=True)
    assert into["w"].tolist() == [1.0, 1.0]
    text = refused(uri, {"w": torch.zeros(3), "x": 0})  # neither option helps against a shape
    assert "differ in 1 place:" in text
    assert "strict" not in text
    assert "cast" not in text
    assert "names of the state" not in text


@pytest.mark.parametrize("strict", [True, "state", "checkpoint", False])
def test_words_that_wrappers_put_into_stored_names_are_said(strict: Any) -> None:
    """One line shows how the names differ, with an example, and how to reach them."""
    uri, model = fresh_uri(), net()
    prefix = "_fsdp_wrapped_module."
    holdfast.save(
        uri, {"model": {prefix + name: tensor for name, tensor in model.state_dict().items()}}
    )
    text = refused(uri, {"model": net()}, strict)
    assert f"The stored names have '{prefix}' after 'model.'" in text
    assert f"'model.{prefix}0.weight' in the checkpoint is 'model.0.weight' in the state" in text


def test_a_state_that_is_nested_as_is_advised_fits() -> None:
    """An average of a wrapped model loads into a plain one if its wrapper's attribute is named."""
    uri, model = fresh_uri(), net()
    holdfast.save(uri, {"ema": Wrapped(model)})
    other = net()
    text = refused(uri, {"ema": other})
    assert "A state that is nested likewise has those names: {'ema': {'net': …}}" in text
    holdfast.load(uri, into={"ema": {"net": other}})
    assert same(model, other)
