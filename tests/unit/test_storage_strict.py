"""How much of a state and of a checkpoint must fit each other, and what a load says of the rest."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from torch import nn

import holdfast


def net() -> nn.Module:
    """Two layers: four tensors."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Wrapped(nn.Module):
    """A module around another, which is in its names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner


@pytest.fixture
def run() -> tuple[str, nn.Module]:
    """A checkpoint of a model, its optimizer and a step; and the model."""
    model, uri = net(), fresh_uri()
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    holdfast.save(uri, {"model": model, "optim": optim, "step": 7})
    return uri, model


def of_names(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged, but for the line that every load has."""
    return [record for record in caplog.records if not record.name.endswith(".telemetry")]


def loaded(uri: str, into: Any, strict: Any) -> holdfast.LoadReport:
    """Load; return the report."""
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into=into, strict=strict, on_report=reports.append)
    return reports[0]


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether all their tensors are equal."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def refused(uri: str, into: Any, strict: Any = True, **options: Any) -> str:
    """The text of the MismatchError."""
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into=into, strict=strict, **options)
    return str(caught.value)


def test_a_model_alone_is_loaded_with_strict_state(run: tuple[str, nn.Module]) -> None:
    """What else the checkpoint has is left, and listed in the report."""
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


def test_not_strict_says_what_it_left(
    run: tuple[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Names missing from the checkpoint are a warning; unused names of it a line at INFO."""
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
    """Whatever the mode."""
    uri, _ = run
    with caplog.at_level(logging.INFO, logger="holdfast"):
        for strict in (True, "state", False):
            other = net()
            optim = torch.optim.Adam(other.parameters())
            report = loaded(uri, {"model": other, "optim": optim, "step": 0}, strict)
            assert (report.missing, report.unexpected) == ((), ())
    assert of_names(caplog) == []


@pytest.mark.parametrize("strict", [True, "state", False])
def test_a_state_of_which_nothing_is_stored_is_an_error(
    run: tuple[str, nn.Module], strict: Any
) -> None:
    """A misspelled name loads nothing, and no mode takes that for a load."""
    text = refused(run[0], {"modell": net()}, strict)
    assert "the checkpoint has nothing of the state" in text
    assert "he stored names have 'model.' where those of the state have 'modell.'" in text
    assert "strict=" not in text
    if strict is not True:  # a filter has probably removed everything
        assert "the checkpoint has nothing of the state" in refused(run[0], {"m": {}}, strict)


def test_an_unknown_mode_is_refused(run: tuple[str, nn.Module]) -> None:
    """Before anything is done."""
    with pytest.raises(holdfast.UsageError, match="strict='states'"):
        holdfast.load(run[0], into={"model": net()}, strict="states")  # type: ignore[call-overload]


def test_lists_in_the_report_are_bounded() -> None:
    """A hundred names of each, and how many there are."""
    uri = fresh_uri()
    holdfast.save(uri, {"both": 1, "old": {f"{i}": i for i in range(250)}})
    report = loaded(uri, {"both": 0, "new": {f"x{i}": torch.zeros(1) for i in range(150)}}, False)
    assert (len(report.missing), report.missing_count) == (100, 150)
    assert (len(report.unexpected), report.unexpected_count) == (100, 250)


def test_advice_that_is_followed_works() -> None:
    """An error names the options that help, and no others."""
    uri = fresh_uri()
    holdfast.save(uri, {"w": torch.ones(2), "x": 1})
    into = {"w": torch.zeros(2, dtype=torch.float64), "new": 1}
    text = refused(uri, into)
    assert "cast=True" in text
    assert "strict=False" in text
    assert "strict" not in refused(uri, into, strict=False)
    holdfast.load(uri, into=into, strict=False, cast=True)
    assert into["w"].tolist() == [1.0, 1.0]
    text = refused(uri, {"w": torch.zeros(3), "x": 0})  # neither option helps with a shape
    assert "differ in 1 place:" in text
    assert "strict" not in text
    assert "cast" not in text
    assert "names of the state" not in text


@pytest.mark.parametrize("strict", [True, "state", False])
def test_words_that_wrappers_put_into_stored_names_are_said(strict: Any) -> None:
    """One line shows how the names differ, with an example, and how to get at them."""
    uri, model = fresh_uri(), net()
    prefix = "_fsdp_wrapped_module."
    holdfast.save(
        uri, {"model": {prefix + name: tensor for name, tensor in model.state_dict().items()}}
    )
    text = refused(uri, {"model": net()}, strict)
    assert f"The stored names have '{prefix}' after 'model.'" in text
    assert f"'model.{prefix}0.weight' in the checkpoint is 'model.0.weight' in the state" in text


def test_a_state_that_is_nested_as_is_advised_fits() -> None:
    """An average of a wrapped model is loaded into a plain one by naming the wrapper's attribute."""
    uri, model = fresh_uri(), net()
    holdfast.save(uri, {"ema": Wrapped(model)})
    other = net()
    text = refused(uri, {"ema": other})
    assert "A state that is nested likewise has those names: {'ema': {'net': …}}" in text
    holdfast.load(uri, into={"ema": {"net": other}})
    assert same(model, other)
