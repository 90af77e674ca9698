"""A training loop under DeepSpeed, as its user writes it. Arguments: see :func:`main`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import holdfast
from support.framework_jobs import die, note_loss

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
}


def state_of(engine: Any) -> dict[str, Any]:
    """All that the job goes on from."""
    return {
        "model": engine,
        "optim": engine.optimizer,
        "schedule": engine.lr_scheduler,
        "engine": {name: getattr(engine, name) for name in COUNTERS},
    }


def resume(engine: Any, uri: str) -> None:
    """Go on from a checkpoint."""
    state = holdfast.load(uri, into=state_of(engine))
    for name, value in state["engine"].items():
        setattr(engine, name, value)


def main() -> None:
    """Train for eight steps, from the newest checkpoint if there is one; ``--die-at`` a step, one
    rank is killed while that is being saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *a, **k: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 1))
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    checkpoints = Path(args.out, "checkpoints")
    saved = holdfast.list_checkpoints(checkpoints) if checkpoints.exists() else []
    torch.distributed.barrier()
    if saved:
        resume(engine, f"{checkpoints}/{saved[-1].path}")
    while engine.global_steps < 8:
        step = engine.global_steps
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = nn.functional.mse_loss(engine(x.bfloat16()).float(), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        note_loss(args.out, step, loss)
        if engine.global_steps % 2 == 0:
            uri = f"{checkpoints}/step-{engine.global_steps}"
            handle = holdfast.async_save(uri, state_of(engine), step=engine.global_steps)
            if rank == 1 and engine.global_steps == args.die_at:
                die()
            handle.wait()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
