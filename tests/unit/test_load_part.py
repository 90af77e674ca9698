"""Test loads of a part of a checkpoint: by ``only``, and by ``Checkpoint.read_tree``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import MismatchError, UsageError
from holdfast.storage.format.part import Only


def network() -> nn.Sequential:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.fixture
def saved() -> dict[str, Any]:
    """The state that is saved, as objects."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    pair = (1, torch.arange(3))
    return {"model": model, "optim": [optimizer, {"lr": 0.1}], "pair": pair, "step": 3}


@pytest.fixture
def uri(tmp_path: Path, saved: dict[str, Any]) -> str:
    """The checkpoint of ``saved``."""
    holdfast.save(tmp_path / "c", saved)
    return str(tmp_path / "c")


def test_part_is_built(uri: str, saved: dict[str, Any]) -> None:
    """A part is a container, a value in a list, a tuple or a single tensor."""
    weights = saved["model"].state_dict()
    built = holdfast.load(uri, only="model")
    assert built.keys() == weights.keys()
    assert all(torch.equal(built[name], t) for name, t in weights.items())
    assert torch.equal(holdfast.load(uri, only="model.0.weight"), weights["0.weight"])
    assert holdfast.load(uri, only=("optim", 1)) == {"lr": 0.1}
    assert holdfast.load(uri, only="step") == 3
    first, second = holdfast.load(uri, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.read_tree("optim.1") == {"lr": 0.1}
        assert checkpoint.read_tree("pair")[1].tolist() == [0, 1, 2]
        assert checkpoint.read_tree().keys() == saved.keys()
        with pytest.raises(UsageError, match="no 'modell'"):
            checkpoint.read_tree("modell")


def test_only_the_part_is_read(tmp_path: Path) -> None:
    """The bytes of other parts are not read."""
    state = {"small": torch.rand(1000), "large": torch.rand(5_000_000)}
    holdfast.save(tmp_path / "c", state)
    reports: list[holdfast.LoadReport] = []
    small = holdfast.load(tmp_path / "c", only="small", on_report=reports.append)
    assert torch.equal(small, state["small"])
    assert reports[0].bytes_wanted == 4000
    assert reports[0].bytes_read < 1_200_000


@pytest.mark.parametrize("only", ["model", ("model",)])
def test_object_is_filled_with_a_part(uri: str, saved: dict[str, Any], only: Only) -> None:
    """Names outside the part are no difference. A tuple is replaced, since it cannot be filled."""
    model = network()
    assert holdfast.load(uri, into=model, only=only) is model
    assert all(map(torch.equal, model.parameters(), saved["model"].parameters()))
    into = (0, torch.zeros(3, dtype=torch.int64))
    first, second = holdfast.load(uri, into=into, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])


def test_names_within_the_part_are_strict(uri: str, saved: dict[str, Any]) -> None:
    """Differences within the part count."""
    with pytest.raises(MismatchError) as caught:
        holdfast.load(uri, into=nn.Linear(2, 3, bias=False), only="model.0")
    assert [text.split("'")[1] for text in caught.value.differences] == ["model.0.bias"]
    with pytest.raises(MismatchError, match=r"model\.2"):
        holdfast.load(uri, into={"0.weight": torch.zeros(3, 2), "2": torch.ones(1)}, only="model")
    layer = nn.Linear(2, 3, bias=False)
    holdfast.load(uri, into=layer, only="model.0", strict="state")
    assert torch.equal(layer.weight, saved["model"][0].weight)


def test_part_does_not_include_names_with_the_same_prefix(tmp_path: Path) -> None:
    """``modeling`` is not part of ``model``."""
    holdfast.save(tmp_path / "c", {"model": {"w": torch.ones(3)}, "modeling": torch.ones(2)})
    into = {"w": torch.zeros(3)}
    holdfast.load(tmp_path / "c", into=into, only="model")
    assert into["w"].sum() == 3


def test_missing_part_is_named(uri: str) -> None:
    """The error lists the parts of the checkpoint."""
    with pytest.raises(UsageError, match=r"no 'modell'.*'model', 'optim', 'pair'"):
        holdfast.load(uri, only="modell")
    with pytest.raises(MismatchError, match="nothing of the state"):
        holdfast.load(uri, into=network(), only="modell")


@pytest.mark.parametrize("only", ["", "model.", (), ("",)])
def test_empty_name_is_refused(uri: str, only: Only) -> None:
    """An empty name is refused before anything is read."""
    with pytest.raises(UsageError, match="only="):
        holdfast.load(uri, only=only)
