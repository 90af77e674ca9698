"""Tensors of modules and optimizers are saved under the names that torch gives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from holdfast.storage.state.adapters.module_names import Walked, module_state
from holdfast.storage.state.adapters.optimizer import optimizer_state


class Extra(nn.Module):
    """Has a state of its own, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = checkpoint_wrapper(nn.Linear(3, 3))
        self.register_buffer("lost", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        pass


def tied() -> nn.Module:
    """Return two layers with one weight, and buffers between them."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    return net


def shared() -> nn.Module:
    """Return a module that is in two places, the first of them deeper."""
    inner = nn.Linear(3, 3)
    deep = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    return nn.ModuleDict({"deep": deep, "again": inner, "last": nn.Linear(3, 3)})


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "shared": shared,
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Linear(3, 3)))),  # type: ignore[return-value]
    "recomputing, with an extra state": lambda: nn.Sequential(Extra(), nn.Linear(3, 3)),
    "one level": lambda: nn.Linear(3, 3),
}  # fmt: skip
TORCHS_OWN = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"


@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.parametrize("kind", MODULES)
def test_names_are_those_that_torch_gives(kind: str) -> None:
    """This holds for modules and their optimizers, for the first request and later ones."""
    module = MODULES[kind]()
    optim = torch.optim.AdamW([{"params": [p]} for p in module.parameters()])
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    for _ in range(2):
        expected = get_model_state_dict(module)
        assert str(dict(module_state(Walked(module)))) == str(dict(expected))
        found = optimizer_state(optim, [Walked(module)])
        assert str(found) == str(get_optimizer_state_dict(module, optim))


def hooked() -> nn.Module:
    """Return a module with a hook that takes a tensor out of the state dict."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def without_bias(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[f"{prefix}bias"]

    net[1].register_state_dict_post_hook(without_bias)
    return net


def replaced() -> nn.Module:
    """Return a module with a part that overrides a method in the instance, not in its class."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].__dict__["_save_to_state_dict"] = lambda destination, prefix, _: None
    return net


class Sparing(nn.Linear):
    """Saves a tensor in another form."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach().half()


def incomplete() -> nn.Module:
    """Return a module with declared members that are absent, and a buffer that is not saved."""
    net = nn.ModuleDict(
        {"a": nn.Linear(3, 3, bias=False), "b": nn.BatchNorm1d(2, affine=False), "c": nn.Identity()}
    )
    net.add_module("none", None)
    net.register_buffer("empty", None)
    net.register_buffer("lost", torch.ones(2), persistent=False)
    net.register_buffer("kept", torch.ones(2))
    net.register_parameter("own", nn.Parameter(torch.ones(1)))
    return net


STATES: dict[str, Callable[[], nn.Module]] = {
    "hooked": hooked,
    "replaced": replaced,
    "sparing": lambda: nn.Sequential(Sparing(3, 3), nn.Linear(3, 3)),
    "incomplete": incomplete,
    "scripted": lambda: nn.Sequential(
        torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)), nn.Linear(3, 3)
    ),
    "recurrent": lambda: nn.LSTM(2, 3, num_layers=2),
    **MODULES,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", STATES)
def test_a_modules_state_is_what_its_state_dict_says(kind: str) -> None:
    """A module's state equals its state dict, in the same memory, also with hooks and overrides."""
    module = STATES[kind]()
    found, expected = module_state(Walked(module)), module.state_dict()
    names = [re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", key) for key in expected]
    assert sorted(found) == sorted(names)
    for name, value in zip(names, expected.values(), strict=True):
        if not isinstance(value, torch.Tensor):
            assert found[name] == value
            continue
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
        assert not found[name].requires_grad
        assert found[name].data_ptr() == value.data_ptr() or kind == "sparing"
