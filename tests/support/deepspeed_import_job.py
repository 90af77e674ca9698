"""A job that trains under ZeRO and saves with DeepSpeed itself, next to plain AdamW. Arguments: the
folder, the stage and the dtype."""

from __future__ import annotations

import argparse
import copy
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.comm.torch
import torch


def main() -> None:
    """Take two steps; save the checkpoint, and the moments of plain AdamW."""
    folder, stage, dtype = sys.argv[1:]
    in_bf16 = dtype == "bf16"
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *a, **k: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5)
    )
    model[0].bias.requires_grad = False
    model.register_buffer("mask", torch.arange(3))
    groups = [
        {"params": [model[0].weight, model[1].weight]},
        {"params": [model[1].bias, model[2].weight, model[2].bias], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": int(stage),
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 50,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": in_bf16},
    }
    reference = copy.deepcopy(model)
    trained = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    optim = torch.optim.AdamW(trained.values(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    torch.manual_seed(1)
    for _ in range(2):
        batch = torch.randn(4, 13)
        optim.zero_grad()
        reference(batch).square().sum().backward()
        optim.step()
        engine.backward(engine(batch.bfloat16() if in_bf16 else batch).float().square().sum())
        engine.step()
    engine.save_checkpoint(folder, client_state={"args": argparse.Namespace(lr=1)})
    if engine.global_rank == 0:
        moments = {name: optim.state[p]["exp_avg"] for name, p in trained.items()}
        torch.save(moments, f"{folder}/moments.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
