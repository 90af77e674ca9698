"""Models that Accelerate shards, in jobs without GPUs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

__all__ = ["SHARDED", "deepspeed_config", "let_accelerate_shard"]

SHARDED = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2")


def let_accelerate_shard(sharded: str) -> None:
    """Have Accelerate run on the CPU with gloo, and shard models as ``sharded`` says.

    Where it is asked for the CPU, it knows DDP alone. It shards models for FSDP where its state
    says that there are GPUs, whatever the device of the state is.
    """
    if sharded.startswith("zero"):
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda *_: None  # which would compile for minutes
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    if sharded.startswith("fsdp"):
        state.distributed_type = DistributedType.MULTI_GPU


def deepspeed_config(sharded: str) -> dict[str, Any]:
    """That of a stage of ZeRO, which also partitions small parameters."""
    zero = {"stage": int(sharded[-1]), "stage3_param_persistence_threshold": 20}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
