"""A job under Hugging Face's Trainer, as its user starts it. Arguments: see :func:`main`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from holdfast.storage.integrations.transformers import HoldfastTrainerMixin
from support.framework_jobs import die, leave, note_loss
from support.sharded_on_cpu import SHARDED, deepspeed_config, let_accelerate_shard

ASYNCHRONOUS: dict[str, Any] = {"no": False, "yes": True, "lazy": "lazy"}


class Trainer(HoldfastTrainerMixin, transformers.Trainer):
    """Records the loss of each batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        note_loss(self.args.output_dir, self.state.global_step, loss)
        return loss


class Die(TrainerCallback):
    """Kills its process after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            die()


def model(*, lora: bool, dropout: float = 0.1) -> torch.nn.Module:
    """Return a small language model."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=dropout,
    )
    made = LlamaForCausalLM(config)
    if not lora:
        return made
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return get_peft_model(made, adapter)


def samples() -> list[dict[str, torch.Tensor]]:
    """Return the samples, the same in every run."""
    tokens = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def on_the_cpu(sharded: str | None) -> dict[str, Any]:
    """Return arguments of a trainer that runs on the CPU and shards the model as asked."""
    if sharded is None:
        return {"use_cpu": True}
    let_accelerate_shard(sharded)
    configured = {"accelerator_config": {"use_configured_state": True}}
    if sharded.startswith("zero"):
        return {"deepspeed": deepspeed_config(sharded), **configured}
    layers = {
        "version": int(sharded[-1]),
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "sync_module_states": False,  # which would need a GPU
    }
    return {"fsdp": True, "fsdp_config": layers, **configured}


def main() -> None:
    """Train for twelve steps, from the newest checkpoint if asked, or until killed at a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--checkpoints")
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--asynchronous", choices=ASYNCHRONOUS, default="no")
    parser.add_argument("--sharded", choices=SHARDED)
    args = parser.parse_args()
    arguments = TrainingArguments(
        args.out,
        per_device_train_batch_size=4,
        max_steps=12,
        learning_rate=0.01,
        warmup_steps=3,
        logging_steps=1,
        save_steps=2,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=4,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        **on_the_cpu(args.sharded),
    )
    data: Any = samples()
    trainer = Trainer(
        model(lora=args.lora),
        arguments,
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[Die(args.die_at)],
        checkpoints=args.checkpoints,
        asynchronous=ASYNCHRONOUS[args.asynchronous],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        done = {
            "steps": [log["step"] for log in trainer.state.log_history if "loss" in log],
            "best": trainer.state.best_model_checkpoint,
        }
        Path(args.out, "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
    leave()
