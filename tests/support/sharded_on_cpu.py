"""Models that Accelerate shards, in jobs without GPUs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

SHARDED = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2")


def let_accelerate_shard(sharded: str) -> None:
    """Have Accelerate run on the CPU with gloo, and shard models as ``sharded`` says.

    On a CPU, Accelerate supports DDP alone. It shards models for FSDP if its state claims GPUs,
    regardless of the actual device.
    """
    if sharded.startswith("zero"):
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda *_: None  # which would compile for minutes
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    if sharded.startswith("fsdp"):
        state.distributed_type = DistributedType.MULTI_GPU


def deepspeed_config(sharded: str) -> dict[str, Any]:
    """Return the configuration of a ZeRO stage that also partitions small parameters."""
    zero = {"stage": int(sharded[-1]), "stage3_param_persistence_threshold": 20}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
