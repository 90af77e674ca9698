"""Loads of a part of a checkpoint: by ``only``, and by ``Checkpoint.read_tree``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import MismatchError, UsageError
from holdfast.storage.format.part import Only


def network() -> nn.Sequential:
    """Two layers, of which the first has six weights."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.fixture
def saved() -> dict[str, object]:
    """What is saved, as objects."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optim": [optimizer, {"lr": 0.1}],
        "pair": (1, torch.arange(3)),
        "step": 3,
    }


@pytest.fixture
def uri(tmp_path: Path, saved: dict[str, object]) -> str:
    """Where it is saved."""
    holdfast.save(tmp_path / "c", saved)
    return str(tmp_path / "c")


def test_a_part_is_built(uri: str, saved: dict[str, object]) -> None:
    """A container, a value in a list, by its name or by keys; a tuple; a single tensor."""
    model = saved["model"]
    assert isinstance(model, nn.Module)
    built = holdfast.load(uri, only="model")
    assert built.keys() == model.state_dict().keys()
    assert all(torch.equal(built[name], t) for name, t in model.state_dict().items())
    assert holdfast.load(uri, only="optim.1") == {"lr": 0.1}
    assert holdfast.load(uri, only=("optim", 1)) == {"lr": 0.1}
    assert holdfast.load(uri, only="step") == 3
    first, second = holdfast.load(uri, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])
    assert torch.equal(holdfast.load(uri, only="model.0.weight"), model.state_dict()["0.weight"])


def test_an_opened_checkpoint_gives_the_same_parts(uri: str, saved: dict[str, object]) -> None:
    """And the whole state, where no part is named."""
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.read_tree("optim.1") == {"lr": 0.1}
        assert checkpoint.read_tree("pair")[1].tolist() == [0, 1, 2]
        assert checkpoint.read_tree().keys() == saved.keys()
        with pytest.raises(UsageError, match="no 'modell'"):
            checkpoint.read_tree("modell")


def test_only_the_part_is_read(tmp_path: Path) -> None:
    """Not the bytes of the rest."""
    state = {"small": torch.rand(1000), "large": torch.rand(5_000_000)}
    holdfast.save(tmp_path / "c", state)
    reports: list[holdfast.LoadReport] = []
    small = holdfast.load(tmp_path / "c", only="small", on_report=reports.append)
    assert torch.equal(small, state["small"])
    assert reports[0].bytes_wanted == 4000
    assert reports[0].bytes_read < 1_200_000


@pytest.mark.parametrize("only", ["model", ("model",)])
def test_an_object_is_filled_with_a_part(uri: str, saved: dict[str, object], only: Only) -> None:
    """The rest of the checkpoint is no difference, though names are strict."""
    model = network()
    assert holdfast.load(uri, into=model, only=only) is model
    assert isinstance(saved["model"], nn.Module)
    assert all(map(torch.equal, model.parameters(), saved["model"].parameters()))


def test_a_tuple_in_the_state_is_returned(uri: str) -> None:
    """Tuples cannot be assigned to: another takes its place."""
    into = (0, torch.zeros(3, dtype=torch.int64))
    first, second = holdfast.load(uri, into=into, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])


def test_names_of_the_part_are_strict(uri: str, saved: dict[str, object]) -> None:
    """Differences within the part count; whatever lies beside it does not."""
    with pytest.raises(MismatchError) as caught:
        holdfast.load(uri, into=nn.Linear(2, 3, bias=False), only="model.0")
    assert [text.split("'")[1] for text in caught.value.differences] == ["model.0.bias"]
    with pytest.raises(MismatchError, match=r"model\.2"):
        holdfast.load(uri, into={"0.weight": torch.zeros(3, 2), "2": torch.ones(1)}, only="model")
    layer = nn.Linear(2, 3, bias=False)
    holdfast.load(uri, into=layer, only="model.0", strict="state")
    assert isinstance(saved["model"], nn.Sequential)
    assert torch.equal(layer.weight, saved["model"][0].weight)


def test_a_name_that_begins_alike_is_another_part(tmp_path: Path) -> None:
    """``modeling`` is no part of ``model``."""
    holdfast.save(tmp_path / "c", {"model": {"w": torch.ones(3)}, "modeling": torch.ones(2)})
    into = {"w": torch.zeros(3)}
    holdfast.load(tmp_path / "c", into=into, only="model")
    assert into["w"].sum() == 3


def test_a_part_that_is_not_there_is_named(uri: str) -> None:
    """With what is there instead."""
    with pytest.raises(UsageError, match=r"no 'modell'.*'model', 'optim', 'pair'"):
        holdfast.load(uri, only="modell")
    with pytest.raises(MismatchError, match="nothing of the state"):
        holdfast.load(uri, into=network(), only="modell")


@pytest.mark.parametrize("only", ["", "model.", (), ("",)])
def test_a_name_of_nothing_is_refused(uri: str, only: Only) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match="only="):
        holdfast.load(uri, only=only)
