"""Objects with a state: modules, optimizers, schedulers and random generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, saved
from support.held import Held
from torch import nn

import holdfast


class Net(nn.Module):
    """A module with a tied weight, buffers of two kinds, and a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mix(self.norm(self.embed(tokens)))))


Optimizers = dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups; one has its own hyperparameters."""
    return [
        {"params": parameters[:2]},
        {"params": parameters[2:], "lr": 0.003, "weight_decay": 0.2},
    ]


OPTIMIZERS: Optimizers = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD nesterov, groups": lambda p: torch.optim.SGD(
        groups(p), lr=0.1, momentum=0.9, nesterov=True
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW foreach, groups": lambda p: torch.optim.AdamW(groups(p), lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=0),
}


class Job:
    """A training run: module, optimizer, scheduler and steps. Batches depend on the step only."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optim = OPTIMIZERS[optimizer](trained)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, T_max=50)

    @property
    def state(self) -> dict[str, Any]:
        return {"net": self.net, "optim": self.optim, "scheduler": self.scheduler}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.net(tokens), tokens.roll(1))
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.scheduler.step()

    def snapshot(self) -> dict[str, Any]:
        """Return everything that can be compared."""
        return copy.deepcopy({name: dict(part.state_dict()) for name, part in self.state.items()})


SOME = ["SGD nesterov, groups", "Adam tensor lr", "AdamW fused", "ASGD"]


@pytest.mark.parametrize(
    ("name", "steps", "used"),
    [
        *((name, 3, 0) for name in OPTIMIZERS),
        *((name, 0, 0) for name in SOME),
        ("SGD momentum", 0, 3),
    ],
)
def test_training_resumes_as_if_it_had_not_been_interrupted(
    name: str, steps: int, used: int
) -> None:
    """A number of steps, a save, a load and three more steps equal an uninterrupted run.

    The job that loads may itself have trained.
    """
    whole, before, after = Job(name, 1), Job(name, 1), Job(name, 2)
    whole.train(0, steps + 3)
    before.train(0, steps)
    after.train(0, used)
    uri = saved(before.state)
    holdfast.load(uri, into=after.state)
    assert difference(before.snapshot(), after.snapshot()) is None
    after.train(steps, steps + 3)
    assert difference(whole.snapshot(), after.snapshot()) is None


@pytest.mark.parametrize("name", SOME)
def test_saving_leaves_a_fresh_optimizer_untouched(name: str) -> None:
    """A save changes no optimizer, module or gradient, nor later training."""
    job, other = Job(name, 1), Job(name, 1)
    job.net.frozen.grad = torch.ones(4)
    seen = job.snapshot()
    holdfast.save(fresh_uri(), job.state)
    assert difference(seen, job.snapshot()) is None
    assert [n for n, p in job.net.named_parameters() if p.grad is not None] == ["frozen"]
    job.train(0, 3)
    other.train(0, 3)
    assert difference(other.snapshot(), job.snapshot()) is None


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused"])
def test_gradients_at_hand_do_not_hinder_a_load(name: str) -> None:
    """A job may have run a backward pass, but no step yet. Its gradients survive the load."""
    before, after = Job(name, 1), Job(name, 2)
    before.train(0, 3)
    uri = saved(before.state)
    for p in after.net.parameters():
        p.grad = torch.full_like(p, 3.0)
    holdfast.load(uri, into=after.state)
    assert difference(before.snapshot(), after.snapshot()) is None
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in after.net.parameters())


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused"])
def test_parameters_that_never_had_a_gradient_go_on_likewise(name: str) -> None:
    """An optimizer has no state for them, and gets none by a load."""
    jobs = [Job(name, 1), Job(name, 1), Job(name, 2)]
    for job in jobs:
        job.optim.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        job.net.idle = job.optim.param_groups[-1]["params"][0]
        job.scheduler.base_lrs.append(0.1)
    whole, before, after = jobs
    whole.train(0, 5)
    before.train(0, 2)
    uri = saved(before.state)
    holdfast.load(uri, into=after.state)
    assert difference(before.snapshot(), after.snapshot()) is None
    after.train(2, 5)
    assert difference(whole.snapshot(), after.snapshot()) is None


def test_a_module_may_be_the_state() -> None:
    """The root of a state may be an object with a state; loading into it returns it."""
    net, other = Net(), Net()
    uri = saved(net)
    assert holdfast.load(uri, into=other) is other
    assert difference(dict(net.state_dict()), dict(other.state_dict())) is None
    assert difference(dict(net.state_dict()), holdfast.load(uri)) is None


def draws(state: dict[str, Any]) -> list[Any]:
    """Draw from every generator: the global ones, and those in ``state``."""
    own = [
        torch.rand(3, generator=state["torch"]).tolist(), state["numpy"].random(3).tolist(), state["legacy"].normal(size=3).tolist(),
        state["python"].random(), state["mt"].random(3).tolist(), state["philox"].integers(0, 1 << 62, 3).tolist(),
        state["sfc"].normal(size=3).tolist(),
    ]  # fmt: skip
    return [torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), *own]


def generators(seed: int) -> dict[str, Any]:
    """Return one generator of each kind, and seed them and the global ones."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return {
        "rng": holdfast.RNGState(), "torch": torch.Generator().manual_seed(seed), "numpy": np.random.default_rng(seed),
        "legacy": np.random.RandomState(seed), "python": random.Random(seed), "mt": np.random.Generator(np.random.MT19937(seed)),
        "philox": np.random.Generator(np.random.Philox(seed)), "sfc": np.random.Generator(np.random.SFC64(seed)),
    }  # fmt: skip


def test_random_generators_go_on_where_they_were() -> None:
    """All generators draw the same numbers after a load as after the save."""
    state = generators(1)
    draws(state)  # leaves half a pair of normals in some generators
    uri = saved(state)
    expected = [draws(state), draws(state)]
    into = generators(2)
    holdfast.load(uri, into=into)
    assert [draws(into), draws(into)] == expected


# Loads into objects: their order, their questions, and in-place filling


class Order:
    """Records the state of a module when it gets its own state back."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.net.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = self.net.extra


class Extra(nn.Linear):
    """A module with an extra state in addition to its tensors."""

    extra = "new"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def test_modules_have_their_state_before_other_objects() -> None:
    """This holds anywhere in the state. An average of weights, say, copies from the module."""
    net, other = Extra(2, 2), Extra(2, 2)
    net.extra = "stored"
    uri = saved({"first": Order(net), "net": net})
    order = Order(other)
    holdfast.load(uri, into={"first": order, "net": other})
    assert order.seen == "stored"


class Refuses(Held):
    """Refuses any state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("of its own")


def test_an_error_of_an_object_says_whose_it_is() -> None:
    """The error stays the same, with a note that contains the path."""
    with pytest.raises(KeyError, match="of its own") as caught:
        holdfast.load(saved({"a": [Held(1.0)]}), into={"a": [Refuses(1.0)]})
    assert caught.value.__notes__ == ['while state["a"][0] took its state back']


class Keeps(Held):
    """Keeps the state that it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


class Unready(Keeps):
    """Has no state before it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not ready")


def test_an_object_without_a_state_before_the_load_gets_what_is_stored() -> None:
    """Its ``state_dict`` may raise. Then nothing is filled in place."""
    unready = Unready(1.0)
    holdfast.load(saved([Held(2.0)]), into=[unready])
    assert difference(Held(2.0).state_dict(), unready.given) is None


class Samples(torch.utils.data.DataLoader[int]):
    """A data loader with a state."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_data_loader_is_not_asked_before_the_load() -> None:
    """It would start its workers in vain, because it has no tensors to fill."""
    into = Samples([1, 2])
    holdfast.load(saved({"data": Samples([1, 2])}), into={"data": into})
    assert (into.asked, into.position) == (0, 3)


def test_tensors_of_an_object_are_filled_in_place() -> None:
    """Tensors of equal shape and dtype are filled; others are allocated."""
    uri = saved([Held(2.0)])
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


# Something else stored in the place of an object


def stepped() -> torch.optim.Optimizer:
    """Return an optimizer of its own parameter, with a state."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def scheduler() -> Any:
    """Return a scheduler of torch, which accepts any dict."""
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 3)


OBJECTS: dict[str, Callable[[], Any]] = {
    "optimizer": stepped,
    "scheduler": scheduler,
    "object": lambda: Held(1.0),
    "torch.Generator": torch.Generator,
    "np.random.Generator": np.random.default_rng,
    "np.random.RandomState": np.random.RandomState,
    "random.Random": random.Random,
    "RNGState": holdfast.RNGState,
    "PerRank": lambda: holdfast.PerRank(torch.Generator()),
    "PerRank of an object": lambda: holdfast.PerRank(Held(1.0)),
}
STORED: dict[str, Any] = {
    "number": 3,
    "text": "text",
    "None": None,
    "floats": torch.ones(3),
    "bytes": torch.ones(3, dtype=torch.uint8),
    "array": np.ones(3),
    "list": [1, 2],
    "tensors": [torch.ones(3)],
    "tuple": (1, 2),
}
DICTS: dict[str, Any] = {
    "empty": {},
    "numbers": {"a": 1},
    "weights": {"weight": torch.ones(2)},
    "no groups": {"state": {0: {"step": torch.ones(())}}},
    "groups of another kind": {"state": {}, "param_groups": 3},
    "world": {"world": "two", "of": {"a": 1}},
}
OF_ANY_DICT = {"scheduler", "object", "PerRank of an object"}
"""Objects whose own code decides which dicts they accept."""


@pytest.mark.parametrize("stored", STORED | DICTS)
def test_another_kind_in_the_place_of_an_object_is_named(stored: str) -> None:
    """The error names the path in every mode. Nothing is filled, in the object or elsewhere."""
    uri = saved({"parts": {"one": (STORED | DICTS)[stored]}, "beside": torch.ones(2)})
    for name, make in OBJECTS.items():
        if stored in DICTS and name in OF_ANY_DICT:
            continue
        for strict in (True, False):
            beside = torch.zeros(2)
            state = {"parts": {"one": make()}, "beside": beside}
            with pytest.raises(holdfast.MismatchError, match=r'state\["parts"\]\["one"\]'):
                holdfast.load(uri, into=state, strict=strict)
            assert beside.tolist() == [0.0, 0.0], name


def test_an_entry_of_another_kind_in_an_optimizer_is_named() -> None:
    """A number in place of a parameter's state would fail in the next step."""
    stored = stepped().state_dict()
    stored["state"][0] = 3
    uri = saved({"optim": stored})
    into = stepped()
    with pytest.raises(holdfast.MismatchError, match=r'state\["optim"\]'):
        holdfast.load(uri, into={"optim": into})


@pytest.mark.parametrize("name", OBJECTS)
def test_the_state_of_an_object_of_the_same_kind_is_taken(name: str) -> None:
    """The refusals do not affect it."""
    uri = saved({"parts": {"one": OBJECTS[name]()}})
    holdfast.load(uri, into={"parts": {"one": OBJECTS[name]()}})
