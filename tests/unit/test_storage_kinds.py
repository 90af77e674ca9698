"""Kinds of dicts come back; types that would be lost are refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.wrapped import Given
from torch.optim import lr_scheduler as schedules

import holdfast
from holdfast.storage.format.tree import Container, Tree, merge_trees


def kinds(value: Any, path: str = "") -> dict[str, str]:
    """The type of everything in a nested state, by its path."""
    found = {path: type(value).__qualname__}
    if isinstance(value, defaultdict):
        found[path] += f"({value.default_factory})"
    if isinstance(value, dict):
        for key, item in value.items():
            found |= kinds(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found |= kinds(item, f"{path}/{index}")
    return found


KINDS: dict[str, Any] = {
    "counter": Counter({2: 1, 4: 3}),
    "empty": Counter(),
    "ordered": OrderedDict(b=1, a=torch.tensor(1)),
    "lists": defaultdict(list, {"a": [1, (2,)], 3: []}),
    "counts": defaultdict(int, {"a": 1}),
    "none": defaultdict(None, {1: OrderedDict()}),
    "nested": [Counter("abca"), (OrderedDict({1: Counter()}),)],
    "plain": {"a": {}},
}


@pytest.mark.parametrize("other", [{}, KINDS], ids=["empty", "alike"])
def test_kinds_of_dicts_come_back(other: dict[str, Any]) -> None:
    """In a state that is built, and in that of an object, whatever the object has had."""
    uri = fresh_uri()
    for _ in range(2):  # the second save sees a state that is laid out as before
        holdfast.save(uri, {"state": KINDS, "object": Given(KINDS)})
        built = holdfast.load(uri)
        assert kinds(built) == kinds({"state": KINDS, "object": KINDS})
        assert built["state"]["counter"] == KINDS["counter"]
        into = Given(dict(other))
        holdfast.load(uri, into={"object": into}, strict=False)
        assert kinds(into.state) == kinds(KINDS)
    into.state["lists"]["new"].append(1)


def optimizer() -> torch.optim.Optimizer:
    """One that schedulers can work with."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)


class Scale:
    """A function that is an object."""

    def __call__(self, step: int) -> float:
        return 0.9**step


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4]),
    "CyclicLR, an object": lambda o: schedules.CyclicLR(o, 0.1, 0.2, scale_fn=Scale()),
    "LambdaLR": lambda o: schedules.LambdaLR(o, Scale()),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.MultiStepLR(o, [2]), schedules.MultiStepLR(o, [5])], [3]
    ),
}


def stepped(scheduler: Any, optim: Any, steps: int) -> list[float]:
    """Return the learning rates of some steps."""
    rates = []
    for _ in range(steps):
        optim.step()
        scheduler.step()
        rates.append(optim.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_come_back_as_they_were(name: str) -> None:
    """Every type in their state is restored, and the next learning rates are the same."""
    optim, other = optimizer(), optimizer()
    scheduler, into = SCHEDULES[name](optim), SCHEDULES[name](other)
    stepped(scheduler, optim, 3)
    uri = fresh_uri()
    holdfast.save(uri, {"optim": optim, "scheduler": scheduler})
    holdfast.load(uri, into={"optim": other, "scheduler": into})
    assert kinds(into.state_dict()) == kinds(scheduler.state_dict())
    assert stepped(into, other, 4) == stepped(scheduler, optim, 4)


class Own(dict[str, int]):
    """A dict of somebody's own."""


class OwnList(list[int]):
    """A list of somebody's own."""


@pytest.mark.parametrize(
    "value",
    [Own(a=1), OwnList([1]), defaultdict(lambda: 1), {1, 2}, namedtuple("Pair", "a b")(1, 2)],
    ids=["dict", "list", "factory", "set", "namedtuple"],
)
def test_a_type_that_an_object_would_not_get_back_is_refused(value: Any) -> None:
    """Refused in an object's state, by path; allowed in the user's own containers."""
    with pytest.raises(holdfast.StateError, match=r'state\["object"\]\["deep"\]\[0\] is a '):
        holdfast.save(fresh_uri(), {"object": Given({"deep": [value]})})
    if isinstance(value, dict | list):
        uri = fresh_uri()
        state = {"deep": [value]}
        holdfast.save(uri, state)
        assert holdfast.load(uri, into=state)["deep"][0] is value


def test_a_kind_of_a_later_release_is_a_dict() -> None:
    """Fields may say more than this release knows; nothing is imported for them."""
    uri = fresh_uri()
    real = Tree.to_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "to_json", lambda self: real(self) | {"kinds": [[1, "os.system"]]})
        holdfast.save(uri, {"a": {"b": 1}})
    assert kinds(holdfast.load(uri)) == kinds({"a": {"b": 1}})


def test_ranks_that_disagree_on_a_kind_cannot_save() -> None:
    """One of them would get back what it did not have; those that agree may have other containers."""
    trees = [
        Tree([Container(-1, None, "dict"), Container(0, key, "dict")]) for key in ("a", "b", "b")
    ]
    trees[1].kinds = {1: "Counter"}
    merged, _ = merge_trees(trees[:2])
    assert merged.kinds == {2: "Counter"}
    for order in (trees, trees[::-1]):
        with pytest.raises(
            holdfast.SaveError, match=r'state\["b"\] is a (Counter and a dict|dict and a Counter)'
        ):
            merge_trees(order)
