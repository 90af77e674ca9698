"""Tasks for rank processes under FSDP2: states of wrappers in user code, and optimizers with
unusual states."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import holdfast

from .bits import difference
from .jobs import sharded, state_of, train


class AppState:
    """Model and optimizer as one object, as in torch's tutorial on distributed checkpoints."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both."""
        set_state_dict(
            self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


class Container:
    """Optimizers under flat names, as in trainers that split a model into parts."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return one dict with dotted names."""
        return get_optimizer_state_dict(self.model, self.optim, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such a dict."""
        set_optimizer_state_dict(self.model, self.optim, state, options=self.options)


class Plain:
    """An optimizer by torch's numbers, without a state before its first step."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.wrapped = [optim]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state."""
        return {"inner": self.wrapped[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.wrapped[0].load_state_dict(state["inner"])


class Moments:
    """Moments by parameter name, in a notation of its own; none before the first step."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.holder = {"optim": [optim]}
        self.names = {p: name for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of all parameters that have some."""
        (optim,) = self.holder["optim"]
        return {
            f"adam:{self.names[p]}/{key}": value
            for p, state in optim.state.items()
            for key, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the moments into the optimizer."""
        (optim,) = self.holder["optim"]
        for p, name in self.names.items():
            optim.state[p] = {
                key: state[f"adam:{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }


WRAPPERS: dict[str, Any] = {
    "app": AppState,
    "container": Container,
    "moments": Moments,
    "plain": Plain,
}


def state_with(kind: str, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state that contains both, wrapped."""
    wrapper = WRAPPERS[kind](model, optim)
    return {"app": wrapper} if kind == "app" else {"model": model, "optim": wrapper}


def wrapped_save(uri: str, kind: str, layout: str) -> dict[str, Any]:
    """Train and save; return the saved state."""
    model, optim = sharded(layout, 1)
    train(model, optim, 0, 3)
    holdfast.save(uri, state_with(kind, model, optim))
    return state_of(model, optim)


def wrapped_load(uri: str, kind: str, layout: str, more: int) -> tuple[dict[str, Any], int]:
    """Load into a new job and train on. Return its state, and the largest number of elements of one
    tensor that the load passed."""
    model, optim = sharded(layout, 2)
    state = state_with(kind, model, optim)
    wrapper = next(value for value in state.values() if not isinstance(value, nn.Module))
    largest = 0
    load_state_dict = wrapper.load_state_dict

    def seen(given: dict[str, Any]) -> None:
        nonlocal largest
        largest = max(held(given))
        load_state_dict(given)

    wrapper.load_state_dict = seen
    holdfast.load(uri, into=state)
    train(model, optim, 3, 3 + more)
    return state_of(model, optim), largest


def held(value: Any) -> list[int]:
    """Count the elements that this rank holds of each tensor."""
    if isinstance(value, DTensor):
        return [value.to_local().numel()]
    if isinstance(value, torch.Tensor):
        return [value.numel()]
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [n for item in items for n in held(item)]


def whole_mean(grad: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row, in a layout that no rank has to complete."""
    mean = grad.square().mean(dim=-1)
    if isinstance(mean, DTensor):
        return mean.redistribute(
            placements=[Replicate() if at.is_partial() else at for at in mean.placements]
        )
    return mean


class Factored(torch.optim.Optimizer):
    """Keeps second moments by rows, and others with another shape or dtype than their parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["norm"] = p.grad.new_zeros(())
                    state["history"] = p.grad.new_zeros((3, 5))
                    state["wide"] = torch.zeros_like(p, dtype=torch.float64)
                    if p.ndim == 2:
                        state["row"] = p.grad.new_zeros(p.shape[0])
                        state["mean"] = whole_mean(p.grad)
                state["step"] += 1
                state["norm"] += p.grad.square().sum()
                state["history"] += 0.5
                state["wide"] += p.grad.double() / 3
                scale = state["norm"].sqrt() + state["history"].sum()
                if p.ndim == 2:
                    state["row"] += p.grad.square().mean(dim=-1)
                    state["mean"] = state["mean"] * 0.9 + state["row"] * 0.1
                    scale = scale + state["mean"].sum()
                p.add_(p.grad / (1 + scale), alpha=-group["lr"])


def factored(
    uri: str, layout: str, steps: int, load: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Train with :class:`Factored`, after a load or before a save. Return the state, and the layout
    of one parameter's state."""
    model, _ = sharded(layout, 1 if not load else 2)
    optim = Factored(model.parameters())
    if load:
        holdfast.load(uri, into={"model": model, "optim": optim})
    first = 3 if load else 0
    laid_out = kinds_of(model, optim)
    train(model, optim, first, first + steps)
    if uri and not load:
        holdfast.save(uri, {"model": model, "optim": optim})
        laid_out = kinds_of(model, optim)
    return state_of(model, optim), laid_out


class Local(torch.optim.SGD):
    """Works on local tensors. Its states are plain: of each rank, or equal on all by chance."""

    def fill(self) -> None:
        """Fill the state as a step would."""
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local().detach()
                rank = float(dist.get_rank())
                self.state[p] = {
                    "own": torch.full_like(local, rank),
                    "norms": torch.full((7,), rank),
                    "alike": torch.zeros_like(local),
                }


def local_states(uri: str) -> bool:
    """Return whether a new :class:`Local` gets back this rank's own states."""
    model, _ = sharded("fsdp", 1)
    optim = Local(model.parameters())
    optim.fill()
    holdfast.save(uri, {"model": model, "optim": optim})
    other, _ = sharded("fsdp", 2)
    into = Local(other.parameters())
    holdfast.load(uri, into={"model": other, "optim": into})
    states = zip(optim.state.values(), into.state.values(), strict=True)
    return all(difference(old, new) is None for old, new in states)


def kinds_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, str]:
    """Return the layouts of the first matrix's states."""
    p = next(p for p in model.parameters() if p.ndim == 2)
    state = optim.state.get(p, {})
    return {k: str(v.placements) if isinstance(v, DTensor) else "plain" for k, v in state.items()}


def own_optimizer(uri: str, load: bool, with_module: bool = True) -> Any:
    """Save or load an optimizer on each rank with its own parameters. If they have names, the
    groups are in another order at the load."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = range(4)[4 * rank // world : 4 * (rank + 1) // world]
    model = nn.ModuleDict({str(i): layers[i] for i in mine})
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "lr": torch.tensor(1.0)},
        {"params": rest, "lr": 2.0},
    ]
    if load and with_module:
        groups = [{"params": rest, "lr": 7.0}, {"params": decay, "lr": 8.0}]
    if not with_module:  # each rank has one parameter more than the previous one
        groups = [
            {"params": decay[:1], "lr": 1.0},
            {"params": [*rest, *decay][: rank + 1], "lr": 2.0},
        ]
    optim = torch.optim.SGD(groups, momentum=0.9)
    state = {"model": model, "optim": optim} if with_module else {"optim": optim}
    if not load:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step()
        holdfast.save(uri, state)
        return None
    holdfast.load(uri, into=state)
    return [
        (float(group["lr"]), len(group["params"]), all(p in optim.state for p in group["params"]))
        for group in optim.param_groups
    ]


class Given:
    """An object that holds the state that it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        self.state = state


def sharded_of_an_object(uri: str) -> list[str]:
    """Load DTensors into an object that has them in another dtype, or does not have them. No
    parameter has their names."""
    model, _ = sharded("fsdp", 1)
    p = next(iter(model.parameters())).detach()
    holdfast.save(
        uri, {"model": model, "object": Given({"there": p.clone(), "new": [{"x": p * 2}]})}
    )
    given = Given({"there": p.double()})
    holdfast.load(uri, into={"model": model, "object": given})
    found = [given.state["there"], given.state["new"][0]["x"]]
    assert torch.equal(found[0].to_local(), p.to_local())
    assert torch.equal(found[1].to_local(), p.to_local() * 2)
    alone = Given({"there": p.double()})
    holdfast.load(uri, into={"object": alone}, strict="state")
    return [f"{t.dtype} {t.placements}" for t in [*found, alone.state["there"]]]
