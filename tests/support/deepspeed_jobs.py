"""Tasks for rank processes that train a small model under DeepSpeed, FSDP2, DDP or on its own, and
save and load it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import holdfast

from . import fsdp1_jobs
from .foreign_jobs import Refusals
from .fsdp1_jobs import contents, step
from .training import Held, Seen, Training


@dataclass(frozen=True)
class Job:
    """The form of a job. ``stage``: the stage of ZeRO; None for ``other``, a layout of torch.

    ``accumulated``: dtype of accumulated gradients; it makes DeepSpeed use another optimizer for
    ZeRO-1. ``frozen``: whether one parameter is frozen.
    """

    stage: int | None = None
    other: str = "plain"
    dtype: torch.dtype = torch.float32
    accumulated: str | None = None
    offloaded: bool = False
    frozen: bool = False
    persistent: int = 0

    def config(self) -> dict[str, Any]:
        """Return the configuration of DeepSpeed."""
        zero: dict[str, Any] = {"stage": self.stage}
        zero["stage3_param_persistence_threshold"] = self.persistent
        zero["sub_group_size"] = 20
        if self.offloaded:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 6,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "fp16": {"enabled": self.dtype == torch.float16, "initial_scale_power": 4},
        }
        if self.accumulated:
            config["data_types"] = {"grad_accum_dtype": self.accumulated}
        return config


def built(job: Job, seed: int) -> tuple[Any, Any]:
    """Build an engine or a model, and its optimizer, which has no state yet."""
    if job.stage is None:
        return fsdp1_jobs.built(fsdp1_jobs.Layout(job.other, frozen=job.frozen), seed)
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *a, **k: None  # type: ignore[attr-defined]
    model, optim = fsdp1_jobs.built(fsdp1_jobs.Layout("plain", frozen=job.frozen), seed)
    engine, zero, _, _ = deepspeed.initialize(
        model=model, optimizer=optim, config=job.config(), dist_init_required=False
    )
    return engine, zero


def stepped(model: Any, optim: Any, number: int) -> float:
    """Take a step on a batch that all ranks share; return its loss."""
    if not hasattr(model, "backward"):
        return step(model, optim, number)
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    loss = model(batch.to(model.get_data_types()[0])).float().square().mean()
    model.backward(loss)
    model.step()
    return loss.item()


def held(model: Any, optim: Any) -> dict[str, torch.Tensor]:
    """Return all tensors, gathered by their framework, with masters in place of weights."""
    if not hasattr(model, "backward"):
        return contents(model, optim)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(optim, "_hp_optimizer_states_linked"):
        # DeepSpeed links the state of the first group before the other groups have any.
        optim._hp_optimizer_states_linked = False
        optim._lazy_init_hp_params_optimizer_state()
    step_count = next(iter(optim.optimizer.state.values()))["step"]
    found = {f"model.{name}": buffer.clone() for name, buffer in model.module.named_buffers()}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter).clone()
        else:
            found[f"model.{name}"] = gathered(parameter)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                whole = safe_get_full_optimizer_state(parameter, key)
                found[f"optim.{name}.{key}"] = whole.clone()
            found[f"optim.{name}.step"] = step_count.clone()
    return found


def gathered(parameter: Any) -> torch.Tensor:
    """Return a whole parameter of the module."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def training(job: Job, seed: int) -> Training:
    """Build a job that has not stepped yet."""
    model, optim = built(job, seed)
    return Training(model, optim, partial(stepped, model, optim), partial(held, model, optim))


def save_and_go_on(uri: str, job: Job) -> Seen:
    """See :meth:`Training.save_and_go_on`."""
    return training(job, 1).save_and_go_on(uri)


def load_and_go_on(uri: str, job: Job) -> Seen:
    """Load into a job, which has trained if it uses DeepSpeed, and train for two steps."""
    loaded = training(job, 2)
    if job.stage is not None:
        loaded.step(9)
    holdfast.load(uri, into=loaded.state)
    if job.stage is not None:
        check_copies(loaded.model)
    return loaded.seen()


def load_into_new(uri: str, job: Job) -> list[float]:
    """Load into a job that has never stepped, and train for two steps."""
    loaded = training(job, 2)
    holdfast.load(uri, into=loaded.state)
    return [loaded.step(number) for number in (2, 3)]


def check_copies(engine: Any) -> None:
    """Check that the module's parameters equal the optimizer's masters in their dtype."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
            assert torch.equal(gathered(parameter), master.to(parameter.dtype)), name


def load_model_alone(uri: str, job: Job) -> dict[str, torch.Tensor]:
    """Load the weights into a job that has trained; return the weights that it then trains."""
    model, optim = built(job, 2)
    stepped(model, optim, 9)
    holdfast.load(uri, into={"model": model}, strict="state")
    check_copies(model)
    return {name: t for name, t in held(model, optim).items() if name.startswith("model.")}


def load_and_save_with_deepspeed(uri: str, folder: str, job: Job) -> None:
    """Load our checkpoint, and save one of DeepSpeed's own."""
    model, optim = built(job, 2)
    holdfast.load(uri, into={"model": model, "optim": optim})
    model.save_checkpoint(folder)


def save_with_deepspeed(folder: str, job: Job) -> Held:
    """Train for two steps and save with DeepSpeed; return the tensors at the save."""
    job_done = training(job, 1)
    for number in range(2):
        job_done.step(number)
    job_done.model.save_checkpoint(folder, client_state={"args": argparse.Namespace(lr=1)})
    return job_done.held()


def load_with_deepspeed_and_save(folder: str, uri: str, job: Job) -> dict[str, torch.Tensor]:
    """Load a checkpoint of DeepSpeed's own, and save ours; return the tensors at the save."""
    model, optim = built(job, 3)
    model.load_checkpoint(folder)
    holdfast.save(uri, {"model": model, "optim": optim})
    return held(model, optim)


def save_lazily(uri: str, job: Job) -> list[Held]:
    """See :meth:`Training.save_lazily`."""
    return training(job, 1).save_lazily(uri)


def refused(uri: str, stage: int) -> dict[str, tuple[str, str]]:
    """Save and load unsupported forms of DeepSpeed's state; return the errors of both."""
    model, optim = built(Job(stage, dtype=torch.bfloat16), 1)
    stepped(model, optim, 0)
    refusals = Refusals(uri, {"model": model, "optim": optim})
    tried = refusals.tried
    tried("module", {"model": model.module})
    tried("optimizer alone", {"optim": optim})
    tried("wrapped optimizer", {"model": model, "optim": optim.optimizer})
    if stage == 3:
        tried("state dict", {"model": model.module.state_dict()})
    optim.offloaded_states.add("hp_params")
    tried("offloaded", {"model": model})
    optim.offloaded_states.clear()
    # Only their configuration is tested: they need several hosts, or an accelerator.
    config = model._config.zero_config
    for name, value in (("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True)):
        before = getattr(config, name)
        setattr(config, name, value)
        tried(name, {"model": model})
        setattr(config, name, before)
    model.module[0].register_state_dict_post_hook(lambda *_: None)
    tried("own making", {"model": model})
    return refusals.errors
