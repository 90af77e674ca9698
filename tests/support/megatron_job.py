"""A small GPT that Megatron-core trains under any layout: functions for the ranks of a job."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .megatron_on_cpu import cuda_is_cpu  # isort: skip  # before Megatron

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import holdfast
from holdfast.storage.integrations.megatron import (
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
    optimizer_state,
)

BATCH = 4
LENGTH = 8
LEARNING_RATE = 1e-2
EXPERTS = 4
FINDS_STRATEGIES = megatron.core.__version__ < "0.17"
"""True if Megatron finds the strategy of a folder by ``metadata.json``."""


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a job; other ranks are data-parallel. ``vocabulary`` includes padding."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    dtype: torch.dtype = torch.float32
    vocabulary: int = 34
    experts: str = ""
    """"": a dense model; "sequential", "grouped": the implementation of its experts."""
    expert: int = 1
    expert_tensor: int = 1


class Job:
    """A model and its distributed optimizer on one rank. A context manager."""

    def __init__(self, layout: Layout, seed: int) -> None:
        cuda_is_cpu()
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        torch.manual_seed(seed)
        config = _config(layout)
        self.model = _model(config, layout)
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1000)
        self.replica = DistributedDataParallel(config, buffers, self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=LEARNING_RATE,
                use_distributed_optimizer=True,
                params_dtype=layout.dtype,
                bf16=layout.dtype is torch.bfloat16,
            ),
            [self.replica],
        )
        self.metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        parallel_state.destroy_model_parallel()

    def model_state(self) -> dict[str, Any]:
        """Return the model's state as Megatron describes it."""
        described: dict[str, Any] = self.model.sharded_state_dict(metadata=self.metadata)
        return described

    def state(self, step: int = 0) -> dict[str, Any]:
        """Return the state for :func:`holdfast.save` and :func:`holdfast.load`."""
        model_state = self.model_state()
        optim = optimizer_state(self.optimizer, model_state)
        return {"model": model_state, "optim": optim, "step": step}

    def described(self, *, loading: bool = False) -> dict[str, Any]:
        """Return the state for Megatron's ``dist_checkpointing``."""
        optim = self.optimizer.sharded_state_dict(
            self.model_state(), is_loading=loading, metadata=self.metadata
        )
        random = {"rank": dist.get_rank(), "state": torch.get_rng_state()}
        place = (dist.get_world_size(),), (dist.get_rank(),)
        return {
            "model": self.model_state(),
            "optimizer": optim,
            "random": ShardedObject("random", random, *place),
        }

    def train(self, first: int, last: int) -> list[float]:
        """Take these steps; return their losses."""
        return [self._step(step) for step in range(first, last)]

    def _step(self, step: int) -> float:
        self.replica.zero_grad_buffer()
        tokens = _tokens(step)
        reduced = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter([tokens]),
            model=[self.replica],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=len(tokens),
            forward_only=False,
        )
        finalize_model_grads([self.replica])
        self.optimizer.step()
        return _mean_of_replicas(sum(float(each["loss"]) for each in reduced))


def _config(layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        params_dtype=layout.dtype,
        pipeline_dtype=layout.dtype,
        bf16=layout.dtype is torch.bfloat16,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        batch_p2p_comm=False,
        **(_of_experts(layout) if layout.experts else {}),
    )


def _of_experts(layout: Layout) -> dict[str, Any]:
    return {
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": 32,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": layout.experts == "grouped",
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.tensor > 1,
    }


def _model(config: TransformerConfig, layout: Layout) -> GPTModel:
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(EXPERTS if layout.experts else None, layout.experts == "grouped"),
        vocab_size=layout.vocabulary,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(layout.dtype)


def _tokens(step: int) -> torch.Tensor:
    """Return this rank's part of the batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (BATCH, LENGTH + 1), generator=generator)
    replicas = parallel_state.get_data_parallel_world_size()
    return tokens.chunk(replicas)[parallel_state.get_data_parallel_rank()]


def _forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    def reduced(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return losses, reduced


def _mean_of_replicas(loss: float) -> float:
    """Return the mean loss of all replicas. Only the ranks of the last stage have a loss."""
    mean = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(mean)
    last = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    return float(mean / last)


def trains(layout: Layout, uri: str, save_after: int, last: int) -> list[float]:
    """Return the losses of a job that saves while it trains, without a stop."""
    with Job(layout, seed=1) as job:
        losses = job.train(0, save_after)
        saving = holdfast.async_save(uri, job.state(save_after), lazy=True)
        losses += job.train(save_after, last)
        saving.wait()
        return losses


def goes_on(layout: Layout, uri: str, last: int, again: str) -> tuple[int, list[float]]:
    """Resume another job from ``uri``, save it ``again``; return the step and later losses."""
    with Job(layout, seed=2) as job:
        state = job.state()
        holdfast.load(uri, into=state)
        holdfast.save(again, job.state(state["step"]))
        return state["step"], job.train(state["step"], last)


def saves_by_megatron(
    layout: Layout,
    folder: str,
    save_after: int,
    last: int,
    strategy: Any = None,
    wrapped: bool = False,
) -> list[float]:
    """Return the losses of a job that saves with Megatron's ``save``, perhaps by our strategy."""
    with Job(layout, seed=1) as job:
        if wrapped:
            strategy = FullyParallelSaveStrategyWrapper(strategy)
        losses = job.train(0, save_after)
        described = job.described() | {"step": save_after}
        dist_checkpointing.save(described, _made(folder), sharded_strategy=strategy)
        return losses + job.train(save_after, last)


def _made(folder: str) -> str:
    """Create a folder that all ranks see; return it."""
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    return folder


def saves_in_the_background(
    layout: Layout, folder: str, save_after: int, last: int, dies_in: str
) -> None:
    """Save asynchronously while training continues, twice, with Megatron's queue.

    Die while the second save, to ``dies_in``, is in flight. A file next to that folder
    lists Megatron's processes.
    """
    queue = AsyncCallsQueue()
    with Job(layout, seed=1) as job:
        job.train(0, save_after)
        queue.schedule_async_request(_requested(job, _made(folder)))
        for step in range(save_after, last):
            job.train(step, step + 1)
            queue.maybe_finalize_async_calls()
        queue.maybe_finalize_async_calls(blocking=True)
        queue.schedule_async_request(_requested(job, _made(dies_in)))
        processes = [str(process.pid) for process in multiprocessing.active_children()]
        Path(f"{dies_in}-{dist.get_rank()}").write_text("\n".join(processes))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def fails_in_the_background(layout: Layout, folder: str) -> str:
    """Return the error with which Megatron's queue finalizes a save that cannot write."""
    queue = AsyncCallsQueue()
    with Job(layout, seed=1) as job:
        job.train(0, 1)
        Path(_made(folder), "data").touch()  # a file where a folder should be
        queue.schedule_async_request(_requested(job, folder))
        return raised(lambda: queue.maybe_finalize_async_calls(blocking=True))


def _requested(job: Job, folder: str) -> Any:
    return dist_checkpointing.save(
        job.described(),
        folder,
        sharded_strategy=HoldfastSaveStrategy(),
        async_sharded_save=True,
        **({} if FINDS_STRATEGIES else {"async_strategy": "mcore"}),
    )


def plain_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors that Megatron loads without a model."""
    strategy = HoldfastLoadStrategy()
    described = dist_checkpointing.load_tensors_metadata(folder, strategy)
    loaded: dict[str, torch.Tensor] = dist_checkpointing.load(
        described, folder, strategy, validate_access_integrity=False
    )
    return loaded


def loads_by_megatron(
    layout: Layout, folder: str, first: int, last: int, strategy: Any = None, wrapped: bool = False
) -> list[float]:
    """Return the losses of another job that resumes from a load by Megatron's own ``load``."""
    with Job(layout, seed=2) as job:
        if wrapped:
            strategy = FullyParallelLoadStrategyWrapper(strategy)
        job.train(0, 1)  # without Apex, Megatron has no moments to load into before
        described = job.described(loading=True)
        loaded = dist_checkpointing.load(described, folder, strategy, strict="raise_all")
        job.model.load_state_dict(loaded["model"], strict=False)  # except extra states
        job.optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["random"]["rank"] == dist.get_rank()
        assert loaded["random"]["state"].dtype == torch.uint8
        return job.train(first, last)


def refusals(layout: Layout, uri: str) -> dict[str, str]:
    """Return the error for each operation that a job with master copies must not do."""
    with Job(layout, seed=1) as job:
        state = job.state()
        holdfast.save(uri, state)
        tries: dict[str, Callable[[], object]] = {
            "masters left behind": lambda: holdfast.load(
                uri, into={"model": job.model_state()}, strict="state"
            ),
            "optimizer itself": lambda: holdfast.save(uri, {"optim": job.optimizer}),
            "other parameters": lambda: optimizer_state(job.optimizer, {}),
            "copied": lambda: optimizer_state(job.optimizer, _copied(job.model_state())),
        }
        return {name: raised(call) for name, call in tries.items()}


def _copied(model_state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a factory in place of each tensor, which does more than view it."""

    def built(key: str, data: torch.Tensor, *_: object) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, 2 * data)

    return {
        name: ShardedTensorFactory(item.key, item.data, built, None)
        for name, item in model_state.items()
        if isinstance(item, ShardedTensor)
    }


def raised(call: Callable[[], object]) -> str:
    """Return the error that a call raises as text, "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
