"""Loads from checkpoints that lack some names of memory with several names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, flip, fresh_uri, image_in, saved
from support.ranks import load_as_ranks, saved_as_ranks
from torch import nn

import holdfast
from holdfast.storage.operations.loading.start_load import load_state
from holdfast.storage.operations.options import LoadOptions


class Head(nn.Module):
    """A projection within another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)
        self.proj.weight = weight


class LM(nn.Module):
    """A model whose embedding has four names: of two modules, one of them twice, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.again = self.embed
        self.head = Head(self.embed.weight)
        self.shared = self.embed.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head.proj(self.embed(x)))


NAMES = ("embed.weight", "head.proj.weight", "shared", "again.weight")


def trained(model: LM, optim: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for _ in range(steps):
        loss = model(torch.arange(6)).square().mean() + model.shared.sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LM, torch.optim.Optimizer]:
    """Return a trained model and its optimizer, and a DCP folder of them."""
    torch.manual_seed(1)
    model = LM()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optim, 2)
    folder = tmp_path_factory.mktemp("tied") / "dcp"
    holdfast.export(saved({"model": model, "optim": optim}), folder, format="dcp")
    return folder, model, optim


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strict", [True, "state", False])
@pytest.mark.parametrize("stored", [*((name,) for name in NAMES), NAMES[::2]])
def test_a_tied_model_loads_from_any_of_its_names(
    stored: tuple[str, ...], strict: Any, device: str, job: Any
) -> None:
    """No name is missing, the parameter stays a single object, and training continues."""
    folder, model, optim = job
    uri, reports = fresh_uri(), list[holdfast.LoadReport]()
    holdfast.import_(folder, uri, skip=[f"model.{n}" for n in NAMES if n not in stored])
    with torch.device(device):
        into = LM()
    weight = into.shared
    made = torch.optim.AdamW(into.parameters(), lr=0.1)
    state = {"model": into, "optim": made}
    holdfast.load(uri, into=state, strict=strict, on_report=reports.append)
    assert reports[0].missing == ()
    assert into.embed.weight is into.head.proj.weight is into.shared is weight
    assert difference(dict(model.state_dict()), dict(into.state_dict())) is None
    whole, whole_optim = copy.deepcopy((model, optim))
    assert trained(into, made, 3) == trained(whole, whole_optim, 3)


class Ordered(nn.Module):
    """Two names, in an order of choice, of one layer or of the weight of two."""

    def __init__(self, names: str, is_module: bool) -> None:
        super().__init__()
        layer = nn.Linear(4, 4, bias=False)
        for name in names:
            other = layer if is_module else nn.Linear(4, 4, bias=False)
            other.weight = layer.weight
            self.add_module(name, other)


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_an_optimizer_finds_its_parameter_under_any_of_its_names(
    names: str, is_module: bool
) -> None:
    """Its entries are stored under the first name of the model that was saved."""
    model, into = Ordered("ab", True), Ordered(names, is_module)
    optims = [torch.optim.AdamW(each.parameters()) for each in (model, into)]
    model.a.weight.grad = torch.ones(4, 4)
    optims[0].step()
    uri = saved({"model": model, "optim": optims[0]})
    holdfast.load(uri, into={"model": into, "optim": optims[1]})
    assert difference(optims[0].state_dict(), optims[1].state_dict()) is None


Layout = Callable[[torch.Tensor], dict[str, torch.Tensor]]

FILLED: dict[str, tuple[str, Layout]] = {
    "the same": ("a", lambda t: {"a": t, "b": t}),
    "a part": ("a", lambda t: {"a": t, "b": t[2:5]}),
    "columns": ("a", lambda t: {"a": t.view(8, 8), "b": t.view(8, 8)[:, 2:5]}),
    "transposed": ("a", lambda t: {"a": t.view(8, 8), "b": t.view(8, 8).t()}),
    "columns of columns": ("a", lambda t: {"a": t.view(8, 8)[:, 2:6], "b": t.view(8, 8)[:, 3:5]}),
    "another dtype": ("a", lambda t: {"a": t, "b": t.view(torch.int32)[5:9]}),
    "negated": ("a", lambda t: {"a": t, "b": torch._neg_view(t[3:9])}),
    "numpy": ("a", lambda t: {"a": t, "b": t.numpy()[5:9]}),  # type: ignore[dict-item]
    "all parts": ("ac", lambda t: {"a": t[:20], "c": t[20:], "b": t}),
    "all columns": (
        "ac", lambda t: {"a": t.view(8, 8)[:, :3], "c": t.view(8, 8)[:, 3:], "b": t},
    ),
    "overlapping parts": ("ac", lambda t: {"a": t[:40], "c": t[20:], "b": t[5:60]}),
    "nothing of it": ("a", lambda t: {"a": (e := t[3:3]), "b": e}),
}  # fmt: skip

LACKING: dict[str, tuple[str, Layout]] = {
    "the whole": ("a", lambda t: {"a": t[2:5], "b": t}),
    "one element": ("a", lambda t: {"a": t[1:], "b": t}),
    "a hole": ("ac", lambda t: {"a": t[:20], "c": t[21:], "b": t}),
    "other columns": ("a", lambda t: {"a": t.view(8, 8)[:, :3], "b": t.view(8, 8)[:, 2:5]}),
    "a neighbour": ("a", lambda t: {"a": t[:5], "b": t[5:9]}),
    "an equal one": ("a", lambda t: {"a": t, "b": t.clone()}),
    "an empty one": ("a", lambda t: {"a": t[:0], "b": t.clone()[:0]}),
}


def stored_part(names: str, layout: Layout) -> str:
    """Return a checkpoint of only these tensors of a state."""
    whole = {**layout(torch.arange(64.0)), "z": torch.ones(1)}
    return saved({name: whole[name] for name in (*names, "z")})


@pytest.mark.parametrize("strict", [True, "state", "checkpoint", False])
@pytest.mark.parametrize(("names", "layout"), FILLED.values(), ids=FILLED)
def test_memory_that_other_names_fill_is_not_missing(names: str, layout: Any, strict: Any) -> None:
    """Views of stored tensors get their values, and so does a tensor made up of such views."""
    base, reports = torch.zeros(64), list[holdfast.LoadReport]()
    into = {**layout(base), "z": torch.zeros(1)}
    holdfast.load(stored_part(names, layout), into=into, strict=strict, on_report=reports.append)
    assert reports[0].missing == ()
    expected = layout(torch.arange(64.0))
    assert all(difference(expected[name], into[name]) is None for name in expected)


@pytest.mark.parametrize(("names", "layout"), LACKING.values(), ids=LACKING)
def test_memory_that_other_names_fill_in_part_is_missing(names: str, layout: Any) -> None:
    """It would be a mixture of stored values and others."""
    base, reports = torch.zeros(64), list[holdfast.LoadReport]()
    uri, into = stored_part(names, layout), {**layout(base), "z": torch.zeros(1)}
    for strict in (True, "state"):
        with pytest.raises(holdfast.MismatchError, match="'b'"):
            holdfast.load(uri, into=into, strict=strict)  # type: ignore[arg-type]
    assert base.tolist() == [0.0] * 64
    holdfast.load(uri, into=into, strict=False, on_report=reports.append)
    assert reports[0].missing == ("b",)


def test_a_tied_model_of_which_no_name_is_stored_is_refused() -> None:
    """Each of its names is listed; without strictness they stay as they are, also on meta."""
    uri = saved({"norm": nn.BatchNorm1d(6), "more": torch.ones(1)})
    for device in ("cpu", "meta"):
        with torch.device(device):
            into = LM()
        with pytest.raises(holdfast.MismatchError) as caught:
            holdfast.load(uri, into=into, strict="state")
        assert all(repr(name) in "".join(caught.value.differences) for name in NAMES)
        holdfast.load(uri, into=into, strict=False)
        assert into.shared.is_meta == (device == "meta")
        assert not into.norm.weight.is_meta


def test_a_name_is_not_missing_if_the_stored_one_does_not_fit() -> None:
    """The advice for that one is enough."""
    uri = saved({"a": torch.ones(3), "z": torch.ones(1)})
    tied = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(holdfast.MismatchError, match="differ in 1 place") as caught:
        holdfast.load(uri, into={"a": tied, "b": tied, "z": torch.zeros(1)})
    assert "cast=True" in str(caught.value)
    assert "'b'" not in str(caught.value)
    holdfast.load(uri, into={"a": tied, "b": tied, "z": torch.zeros(1)}, cast=True)
    assert tied.tolist() == [1.0] * 3


def test_a_failed_load_is_repaired_through_another_name(tmp_path: Path) -> None:
    """Its memory is whole again, whichever name the next checkpoint has."""
    tied = torch.zeros(3)
    state, touched = {"a": tied, "b": tied}, set[str]()
    options = LoadOptions(strict=False)
    holdfast.save(tmp_path / "c", {"a": torch.full((3,), 7.0)})
    image = image_in(tmp_path / "c")
    flip(image, image.read_bytes().index(torch.full((3,), 7.0).numpy().tobytes()))
    with pytest.raises(holdfast.DamagedError):
        load_state(tmp_path / "c", state, options, touched)
    assert touched == {"a", "b"}
    load_state(saved({"b": torch.ones(3)}), state, options, touched)
    assert tied.tolist() == [1.0] * 3


def test_a_dict_at_two_places_needs_values_of_one() -> None:
    """Either place will do for an item. A tuple is rebuilt at each place."""
    uri = saved({"b": {"w": torch.ones(2), "x": 1, "t": (1, 2)}})
    both = {"w": torch.zeros(2), "x": 0}
    holdfast.load(uri, into={"a": both, "b": both}, strict="state")
    assert (both["x"], both["w"].tolist()) == (1, [1.0, 1.0])  # type: ignore[attr-defined]
    one = (0, 0)
    with pytest.raises(holdfast.MismatchError, match=r'\["a"\]\["t"\]\[0\]: no such value'):
        holdfast.load(uri, into={"a": {"t": one}, "b": {"t": one}}, strict="state")
    with pytest.raises(holdfast.MismatchError, match=r'\["a"\]\["y"\]: no such value'):
        holdfast.load(uri, into={"a": (more := {"x": 0, "y": 0}), "b": more}, strict="state")


@pytest.mark.parametrize("tied", [[True, True, True], [True, False, True]])
def test_ranks_judge_their_own_memory(tied: list[bool]) -> None:
    """A rank without an element of a tied tensor lacks nothing; one with a tensor apart does."""

    def state(first: int, stop: int, value: float, is_tied: bool) -> dict[str, holdfast.Shard]:
        part = holdfast.Shard(torch.full((stop - first,), value), shape=(3,), offset=(first,))
        apart = holdfast.Shard(part.tensor.clone(), shape=(3,), offset=(first,))
        return {"a": part, "b": part if is_tied else apart}

    cuts = [(0, 2), (2, 3), (3, 3)]
    driver = saved_as_ranks([{"a": state(*cut, 1.0, True)["a"]} for cut in cuts])
    into = [state(*cut, 0.0, each) for cut, each in zip(cuts, tied, strict=True)]
    if all(tied):
        load_as_ranks(driver, into)
        assert [each["b"].tensor.tolist() for each in into] == [[1.0, 1.0], [1.0], []]
    else:
        with pytest.raises(holdfast.MismatchError, match=r"no tensor 'b'.*\(rank 1\)"):
            load_as_ranks(driver, into)
