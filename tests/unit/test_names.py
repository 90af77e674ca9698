"""The names that tensors of modules and optimizers are saved under are those that torch gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from holdfast.storage.frameworks.names import Walked, module_state, walk
from holdfast.storage.frameworks.optimizer import optimizer_state


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
    """Two layers with one weight, and buffers between them."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    return net


def shared() -> nn.Module:
    """A module that is in two places, the first of them deeper."""
    inner = nn.Linear(3, 3)
    return nn.ModuleDict(
        {"deep": nn.Sequential(nn.Sequential(inner), nn.ReLU()), "again": inner, "last": nn.Linear(3, 3)}
    )


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
    """For modules and their optimizers, asked once and asked again."""
    module = MODULES[kind]()
    optim = torch.optim.AdamW([{"params": [p]} for p in module.parameters()])
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    for _ in range(2):
        expected = get_model_state_dict(module)
        assert walk(module) == [(f"{name}." if name else "", part) for name, part in module.named_modules()]
        assert {k: str(v) for k, v in module_state(Walked(module)).items()} == {k: str(v) for k, v in expected.items()}
        assert list(module_state(Walked(module))) == list(expected)
        assert str(optimizer_state(optim, [Walked(module)])) == str(get_optimizer_state_dict(module, optim))


@pytest.mark.filterwarnings(TORCHS_OWN)
def test_names_change_with_the_modules_kinds() -> None:
    """A part that is wrapped meanwhile is saved under the names that it had."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = list(module_state(Walked(module)))
    module[1] = torch.compile(module[1])  # type: ignore[assignment]
    assert list(module.state_dict()) != before
    assert sorted(module_state(Walked(module))) == sorted(before)
