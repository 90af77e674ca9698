"""A job under DeepSpeed, as a launcher starts it: what becomes of its saves and loads. Arguments:
the URI, and where to put the outcome."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from support.foreign_jobs import outcome


class Model(nn.Module):
    """Two layers, one of them too large to be kept whole on each rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def engine(model: nn.Module, stage: int) -> tuple[Any, Any]:
    """What DeepSpeed makes of ``model``, after a step."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *a, **k: None  # type: ignore[attr-defined]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": stage < 3},
    }
    made, optim, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    step(made)
    return made, optim


def step(made: Any) -> None:
    """One step on a fixed batch."""
    dtype = next(made.module.parameters()).dtype
    made.backward(made(torch.ones(4, 16, dtype=dtype)).float().square().mean())
    made.step()


def partitioned(uri: str) -> dict[str, Any]:
    """ZeRO-3."""
    import deepspeed

    made, optim = engine(Model(1), 3)
    states = {
        "module": {"model": made.module},
        "engine": {"model": made},
        "optimizer": {"optim": optim},
        "state dict": {"model": made.module.state_dict(), "rng": holdfast.RNGState()},
    }
    found: dict[str, Any] = {
        f"save {name}": outcome(
            lambda state=state, name=name: holdfast.save(f"{uri}/{name}", state)
        )
        for name, state in states.items()
    }
    found["committed"] = sorted(
        path.parent.name for path in Path(uri).glob("*/manifest.safetensors")
    )
    with deepspeed.zero.GatheredParameters(list(made.module.parameters())):
        holdfast.save(f"{uri}/gathered", {"model": made.module})
        expected = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    found["load module"] = outcome(
        lambda: holdfast.load(f"{uri}/gathered", into={"model": made.module})
    )
    plain = Model(2)
    holdfast.load(f"{uri}/gathered", into={"model": plain})
    found["gathered"] = all(torch.equal(p, expected[name]) for name, p in plain.named_parameters())
    return found


def with_masters(uri: str) -> dict[str, Any]:
    """ZeRO-1 in bf16."""
    source = Model(3).bfloat16()
    holdfast.save(f"{uri}/source", {"model": source})
    made, optim = engine(Model(4), 1)
    states = {
        "module": {"model": made.module},
        "engine": {"model": made},
        "optimizer": {"optim": optim},
    }
    found: dict[str, Any] = {
        f"load {name}": outcome(lambda state=state: holdfast.load(f"{uri}/source", into=state))
        for name, state in states.items()
    }
    found["save optimizer"] = outcome(
        lambda: holdfast.save(f"{uri}/optimizer", states["optimizer"])
    )
    found["save module"] = outcome(lambda: holdfast.save(f"{uri}/saved", states["module"]))
    holdfast.load(f"{uri}/source", into={"model": made.module.state_dict()})
    made.optimizer.refresh_fp32_params()
    step(made)
    distance = (made.module.up.weight.float() - source.up.weight.float()).abs().max().item()
    found["goes on from what was loaded"] = distance < 0.01
    return found


def main() -> None:
    """Run on every rank."""
    uri, folder = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"3": partitioned(uri), "1": with_masters(uri)}
    Path(folder, str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
