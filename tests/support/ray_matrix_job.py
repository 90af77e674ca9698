"""Runs of Ray Train on a cluster of this host, one for each combination of CheckpointConfig's
options, with Ray's own checkpoints or ours. Arguments: see :func:`main`."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import holdfast
from holdfast.storage.integrations.ray import save_and_report, uri_of

MIDDLE, END = 8, 12
"""The step at which a run goes back, and its last step."""
Case = tuple[Any, ...]
CASES: list[Case] = list(
    itertools.product(
        [None, 1, 2, 3],  # num_to_keep
        [None, "max", "min"],  # checkpoint_score_order
        [None, 0, -1],  # index of the reported and kept checkpoint to go back to
    )
)


def step_of(checkpoint: Checkpoint, is_stock: bool) -> int:
    """Return the step of a checkpoint. Raises if it is incomplete."""
    if is_stock:
        return int(torch.load(Path(checkpoint.path, "state.pt"))["step"])
    with holdfast.open(uri_of(checkpoint)) as c:
        assert c.step is not None
        return c.step


def load(state: dict[str, Any], checkpoint: Checkpoint, is_stock: bool) -> None:
    """Load a checkpoint that was reported."""
    if not is_stock:
        holdfast.load(uri_of(checkpoint), into=state)
        return
    loaded = torch.load(Path(checkpoint.path, "state.pt"))
    state["step"] = loaded["step"]
    for name in ("model", "optim"):
        state[name].load_state_dict(loaded[name])


def save(state: dict[str, Any], metrics: dict[str, float], is_stock: bool) -> None:
    """Save, and report that."""
    if not is_stock:
        save_and_report(metrics, state, step=state["step"])
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = {name: state[name].state_dict() for name in ("model", "optim")}
        torch.save({"step": state["step"], **whole}, Path(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=Checkpoint(folder))


def loop(config: dict[str, Any]) -> None:
    """Train, saving every second step. In some cases, go back once to learn something else."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optim": optim, "step": 0}
    losses = []
    back, target = config["back"], 0.0
    while state["step"] < END:
        state["step"] += 1
        step = state["step"]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - target).pow(2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append([step, loss.item()])
        if step % 2 == 0:
            save(state, {"score": float(step * 7 % 5)}, config["is_stock"])
        if step == MIDDLE and back is not None:
            load(
                state, ray.train.get_all_reported_checkpoints()[back].checkpoint, config["is_stock"]
            )
            back, target = None, 1.0
    Path(config["out"], "losses").write_text(json.dumps(losses))


def outcome(out: Path, number: int, is_stock: bool) -> Any:
    """Train as a case says. Return the losses and the steps left behind; and the steps that Ray
    lists as the best ones and as the last."""
    keep, order, back = CASES[number]
    out.mkdir()
    result = TorchTrainer(
        loop,
        train_loop_config={"out": str(out), "is_stock": is_stock, "back": back},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run",
            storage_path=str(out / "storage"),
            checkpoint_config=CheckpointConfig(
                num_to_keep=keep,
                checkpoint_score_attribute=order and "score",
                checkpoint_score_order=order or "max",
            ),
        ),
    ).fit()
    left = [Checkpoint(path) for path in out.glob("storage/run/checkpoint*") if path.is_dir()]
    return (
        json.loads((out / "losses").read_text()),
        sorted(step_of(checkpoint, is_stock) for checkpoint in left),
        [step_of(checkpoint, is_stock) for checkpoint, _ in result.best_checkpoints],
        step_of(result.checkpoint, is_stock),
    )


def main() -> None:
    """Write the outcomes of some cases, with Ray's own checkpoints and with ours, to ``found.json``.
    Arguments: a folder, and the cases' numbers."""
    folder, *numbers = sys.argv[1:]
    ray.init(num_cpus=2 * len(numbers), include_dashboard=False, log_to_driver=False)
    runs = [(number, is_stock) for number in numbers for is_stock in (True, False)]

    def run(number: str, is_stock: bool) -> Any:
        return outcome(Path(folder, f"{number}-{is_stock}"), int(number), is_stock)

    with ThreadPoolExecutor(4) as pool:
        found = pool.map(run, *zip(*runs, strict=True))
        written = {
            f"{number}-{is_stock}": each
            for (number, is_stock), each in zip(runs, found, strict=True)
        }
    Path(folder, "found.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
