"""Test loading objects with a state: their order, their questions, and in-place filling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.held import Held
from torch import nn

import holdfast


class Order:
    """Looks at a module when it takes its state back."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        """What the module has beside tensors."""
        return {"seen": self.net.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What the module has by then."""
        self.seen = self.net.extra


class Extra(nn.Linear):
    """A module with a state beside its tensors."""

    extra = "new"

    def get_extra_state(self) -> str:
        """It."""
        return self.extra

    def set_extra_state(self, state: str) -> None:
        """It."""
        self.extra = state


def test_modules_have_their_state_before_other_objects() -> None:
    """Wherever they stand in the state: an average of weights, say, takes over what a module has."""
    net, other = Extra(2, 2), Extra(2, 2)
    net.extra = "stored"
    uri = fresh_uri()
    holdfast.save(uri, {"first": Order(net), "net": net})
    order = Order(other)
    holdfast.load(uri, into={"first": order, "net": other})
    assert order.seen == "stored"


class Refuses(Held):
    """Takes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """An error of its own."""
        raise KeyError("of its own")


def test_an_error_of_an_object_says_whose_it_is() -> None:
    """It stays what it is, with a note that has the path."""
    uri = fresh_uri()
    holdfast.save(uri, {"a": [Held(1.0)]})
    with pytest.raises(KeyError, match="of its own") as caught:
        holdfast.load(uri, into={"a": [Refuses(1.0)]})
    assert caught.value.__notes__ == ['while state["a"][0] took its state back']


class Unready(Held):
    """Has no state before it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        """None yet."""
        raise RuntimeError("not ready")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The first."""
        self.given = state


def test_an_object_without_a_state_before_the_load_gets_what_is_stored() -> None:
    """Its ``state_dict`` may raise: then there is nothing to fill."""
    uri = fresh_uri()
    holdfast.save(uri, [Held(2.0)])
    unready = Unready(1.0)
    holdfast.load(uri, into=[unready])
    assert difference(Held(2.0).state_dict(), unready.given) is None


class Samples(torch.utils.data.DataLoader[int]):
    """A data loader with a state."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; starts the workers of loaders that have some."""
        self.asked += 1
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.position = state["position"]


def test_a_data_loader_is_not_asked_before_the_load() -> None:
    """It would start its workers, for nothing: it has no tensors to fill."""
    uri = fresh_uri()
    holdfast.save(uri, {"data": Samples([1, 2])})
    into = Samples([1, 2])
    holdfast.load(uri, into={"data": into})
    assert (into.asked, into.position) == (0, 3)


class Keeps(Held):
    """Keeps what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it is."""
        self.given = state


def test_tensors_of_an_object_are_filled_in_place() -> None:
    """Tensors of equal shape and dtype are filled; others are allocated."""
    uri = fresh_uri()
    holdfast.save(uri, [Held(2.0)])
    keeps = Keeps(1.0)
    holdfast.load(uri, into=[keeps])
    assert keeps.given["t"].data_ptr() == keeps.t.data_ptr()
    assert keeps.u.tolist() == [[2.0] * 3] * 2
    other = Keeps(1.0)
    other.t, other.u = torch.ones(4, dtype=torch.float64), torch.ones(1).expand(2, 3)
    holdfast.load(uri, into=[other])
    assert difference(Held(2.0).state_dict(), other.given) is None
    assert other.t.tolist() == [1.0] * 4
    assert other.u.tolist() == [[1.0] * 3] * 2
