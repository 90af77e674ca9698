"""A training loop with torchtitan's parts, as its Trainer runs them. The Trainer itself needs an
accelerator. As a script: see :func:`main`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from holdfast import MismatchError, NotACheckpointError, StorageError
from holdfast.storage.integrations.torchtitan import HoldfastCheckpointManager
from support.framework_jobs import die

STEPS = 12


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """An endless stream of batches. Every rank sees all of them, so that losses do not depend on
    the number of ranks."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self.position)
            self.position += 1
            yield torch.randn(4, 8, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


class TrainState:
    """The Trainer's own state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 32 * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def network(sharded: bool = True) -> nn.Module:
    """Build the model, sharded over all ranks or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    if sharded:
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)
    return model


class Renamed(StateDictAdapter):
    """Converts to the names that the model has at Hugging Face."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return HuggingFaceStorageReader(path)


class Job:
    """The objects that Trainer builds, and its loop."""

    def __init__(
        self,
        folder: str,
        config: dict[str, Any],
        manager: type[CheckpointManager] = HoldfastCheckpointManager,
    ) -> None:
        self.model = network()
        self.optimizers = default_adamw(lr=0.01)
        self.optimizers.implementation = "for-loop"
        self.optimizers = self.optimizers.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedules = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.numbers = Numbers()
        self.loader = ParallelAwareDataloader(
            self.numbers, dist.get_rank(), dist.get_world_size(), batch_size=None
        )
        self.state = TrainState()
        self.shift = 0.0
        self.load_step = config.get("load_step", -1)
        self.checkpoints = manager.Config(
            **{"enable": True, "interval": 2, "last_save_model_only": False} | config
        ).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self.state},
            sd_adapter=Renamed(None, None),
            base_folder=folder,
        )

    def run(
        self,
        steps: int = STEPS,
        die_at: int | None = None,
        note: Callable[[int, float], None] = lambda step, loss: None,
    ) -> dict[int, float]:
        """Train up to this step, from the configured or the newest checkpoint if there is one;
        return the losses. ``die_at``: kill this process in the middle of saving that step. ``note``
        is called after each step."""
        self.checkpoints.load(self.load_step)
        self.numbers.position = self.state.step  # has no effect if the loader's state is loaded
        batches = iter(self.loader)
        losses: dict[int, float] = {}
        while self.state.step < steps:
            self.state.step += 1
            losses[self.state.step] = self.step(next(batches))
            note(self.state.step, losses[self.state.step])
            if self.state.step == die_at:
                die_in_mid_save(Path(self.checkpoints.folder, f"step-{die_at}"))
            self.checkpoints.save(self.state.step, last_step=self.state.step == steps)
        self.checkpoints.close()
        return losses

    def step(self, x: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True) + self.shift)
        self.optimizers.zero_grad()
        loss.backward()
        self.checkpoints.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedules.step()
        return loss.item()


def die_in_mid_save(folder: Path) -> None:
    """Slow each operation of the next save down to half a second, and end this process once there
    is a file in ``folder``."""
    os.environ["HOLDFAST_FAULTS"] = "delay:1,delay_s:0.5"

    def watch() -> None:
        while not any(path.is_file() for path in folder.rglob("*")):
            time.sleep(0.01)
        die()

    threading.Thread(target=watch, daemon=True).start()


def train(folder: str, config: dict[str, Any], steps: int = STEPS) -> dict[int, float]:
    """Train, as a task for rank processes."""
    return Job(folder, config).run(steps)


def train_with_dcp(folder: str, config: dict[str, Any]) -> dict[int, float]:
    """Train with torchtitan's own manager."""
    return Job(folder, config, CheckpointManager).run()


def export_and_load(folder: str) -> None:
    """Train for four steps, and start other jobs from each form of the saved checkpoints."""
    alone = {"folder": "alone", "last_save_model_only": True, "export_dtype": "bfloat16"}
    hf = {"folder": "hf", "last_save_model_only": True, "last_save_in_hf": True}
    for config in (alone, hf):
        Job(folder, config).run(4)
    trained = Job(folder, {"folder": "dcp"}, CheckpointManager)
    trained.run(4)
    for config in (
        {"initial_load_path": f"{folder}/hf/step-4", "initial_load_in_hf": True},
        {"initial_load_path": f"{folder}/dcp/step-4", "initial_load_model_only": False},
        {"folder": "dcp"},
    ):
        job = Job(folder, {"folder": "new"} | config)
        assert job.checkpoints.load()
        for ours, theirs in zip(job.model.parameters(), trained.model.parameters(), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())
        assert job.state.step == (0 if "initial_load_in_hf" in config else 4)
    assert not Job(folder, {"folder": "new"}).checkpoints.load()


def load_steps(folder: str) -> None:
    """Train. Load single steps, a missing one, and one of another model. The next job does not undo
    a step back."""
    Job(folder, {}).run(6)
    job = Job(folder, {})
    assert job.checkpoints.load(4)
    assert job.state.step == 4
    job = Job(folder, {})
    assert job.checkpoints.load()
    assert job.state.step == 4
    raised(NotACheckpointError, job.checkpoints.load, 5)
    job.checkpoints.states["more"] = TrainState()
    raised(MismatchError, job.checkpoints.load, 4)
    Path(folder, "file").touch()
    job = Job(folder, {"folder": "file", "async_mode": "async"})
    job.checkpoints.save(2)
    raised(StorageError, job.checkpoints.close)


def raised(kind: type[Exception], function: Callable[..., object], *arguments: object) -> None:
    """Fail unless the function raises an error of this kind."""
    try:
        function(*arguments)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    """Train. Arguments: the folder, the configuration as JSON, and the step at which to die."""
    folder, config, die_at = sys.argv[1:]
    dist.init_process_group("gloo")
    Job(folder, json.loads(config)).run(die_at=int(die_at))


if __name__ == "__main__":
    main()
