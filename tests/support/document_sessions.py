"""A program that runs the blocks of documents, each document as one session in its own folder.

    document_sessions.py FOLDER DOCUMENT…

It prints a line of JSON for each document: ``[document, problem]``, with "" for none. torch is
imported once; each session is a fork of the process that did so.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import os
import pathlib
import re
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from support.documents import ROOT, Block, python_blocks
from support.forked import in_a_fork
from support.kept_runs import keepers_below_a_folder
from support.servers.ports import free_port

SESSION_S_MAX = 60.0


def main() -> None:
    """Run the sessions of all documents given."""
    folder = Path(sys.argv[1])
    warm_up()
    for document in sys.argv[2:]:
        text = (ROOT / document).read_text(encoding="utf-8")
        blocks = python_blocks(text)
        here = folder / document.replace("/", "_")
        here.mkdir(parents=True)
        problem = in_a_fork(partial(session, document, blocks, here), SESSION_S_MAX)
        print(json.dumps([document, problem]), flush=True)


def warm_up() -> None:
    """Import the modules that sessions need, before they fork: torch imports many at the first step
    of an optimizer. There is no backward pass, because a fork would lack its threads."""
    import torch.distributed.checkpoint
    import torch.optim.swa_utils

    for name in holdfast.__all__:
        getattr(holdfast, name)
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


def session(document: str, blocks: list[Block], here: Path) -> None:
    """Run a document's blocks in an empty folder, with the output in ``here``."""
    log = os.open(here / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    empty = here / "cwd"
    empty.mkdir()
    os.chdir(empty)
    # Frameworks warn about their own affairs; Holdfast's messages are in the output.
    warnings.simplefilter("default")
    with keepers_below_a_folder():
        run_blocks(document, blocks, here)


def run_blocks(document: str, blocks: list[Block], here: Path) -> None:
    """Run blocks in order; each sees the names of earlier ones. Raises the error of a block, with
    the line in the document in its traceback."""

    pattern = "|".join(re.escape(place) for place in PLACES)

    def place(text: str) -> str:
        """Replace storage that ``text`` names by folders below ``here``."""
        return re.sub(
            rf"(?:^|(?<=[\"':]))({pattern})(?=[/\"'])",
            lambda match: f"{here}/{re.sub(r'^.*//+', '', match[0]).strip('/')}",
            text,
        )

    names: dict[str, Any] = names_for(str(here))
    if document in _PREPARED:
        _PREPARED[document](place, names)
    for block in blocks:
        if block.reason is None:
            program = here / f"{Path(document).stem}.md.py"
            program.write_text("\n" * (block.line - 1) + place(block.code), encoding="utf-8")
            for _ in range(block.times):
                names = runpy.run_path(str(program), init_globals=names)


PLACES = (
    "/checkpoints",
    "/scratch",
    "/models",
    "/nvme",
    "/nfs",
    "s3://bucket",
    "hdfs://namenode:8020",
    "lustre:///scratch",
    "fsspec+sftp://host",
)
"""Storage that the documents name. A folder of this host, named without the scheme, replaces it."""


@dataclasses.dataclass
class Config:
    """A dataclass, for a page about values."""

    layers: int
    names: list[str]


def names_for(folder: str) -> dict[str, Any]:
    """Return the names that any block may use; ``uri`` is a new location below ``folder``."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optim = torch.optim.AdamW(model.parameters())

    def train(*_: object) -> float:
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return float(loss.detach())

    train()  # gives the optimizer a state
    return {
        "holdfast": holdfast,
        "torch": torch,
        "math": math,
        "enum": enum,
        "pathlib": pathlib,
        "dataclasses": dataclasses,
        "model": model,
        "engine": copy.deepcopy(model),
        "optim": optim,
        "optimizer": optim,
        "schedule": torch.optim.lr_scheduler.ConstantLR(optim),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "state": {"model": model, "optim": optim, "step": 7},
        "step": 7,
        "total": 500,
        "train": train,
        "train_step": train,
        "uri": f"{folder}/new/step-7",
        "rank": 0,
        "world": 1,
        "local_rank": free_port() - 9400,  # so that the page about metrics gets a free port
        "place": lambda name, tensor: None,
        "writer": types.SimpleNamespace(add_scalar=lambda name, value, step: None),
        "ckpt": holdfast.Checkpointer(f"{folder}/run"),
        "loader": StatefulDataLoader(list(range(8))),
        "order": torch.arange(64),
        "read_sample": int,
        # A buffer of two whole parameters; and one part of a tensor, as a box and as a range.
        "names": ["a", "b"],
        "shapes": [(4, 4), (8,)],
        "exp_avg": torch.ones(24),
        "begin": 0,
        "tensor": torch.zeros(1024, 4096),
        "start": 0,
        "stop": 1024 * 4096,
        "Config": Config,
        "config": Config(2, ["a"]),
    }


def _save_late(place: Callable[[str], str], names: dict[str, Any]) -> None:
    """Save a run that has nearly ended: the README's loop continues with its last steps."""
    model = torch.nn.Linear(1024, 1024)
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim, "step": 9_900, "rng": holdfast.RNGState()}
    holdfast.save(place("/checkpoints/step-9900"), state)


def _save_for_dcp(place: Callable[[str], str], names: dict[str, Any]) -> None:
    """Save the state as DCP's users do."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optim = get_state_dict(names["model"], names["optim"])
    names["state"] = {"model": model, "optim": optim, "step": 0}


def _save_source(place: Callable[[str], str], names: dict[str, Any]) -> None:
    holdfast.save(place("/nvme/run/step-500"), names["state"], step=500)


def _save_run(place: Callable[[str], str], names: dict[str, Any]) -> None:
    """Save steps of a run, before its loss exploded."""
    state = {name: names[name] for name in ("model", "optim", "schedule")}
    for step in (200, 400):
        holdfast.save(
            place(f"/scratch/run/step-{step}"), {**state, "rng": holdfast.RNGState()}, step=step
        )


def _save_step_500(place: Callable[[str], str], names: dict[str, Any]) -> None:
    for uri in ("s3://bucket/run/step-500", "/nvme/run/step-500", "/checkpoints/run/step-500"):
        state = {**names["state"], "rng": holdfast.RNGState()}
        holdfast.save(place(uri), state, step=500)


def _save_base(place: Callable[[str], str], names: dict[str, Any]) -> None:
    _save_step_500(place, names)
    holdfast.save(place("s3://bucket/base"), {"model": names["model"]})


def _save_llama(place: Callable[[str], str], names: dict[str, Any]) -> None:
    """Save the names and dtypes of the page about single tensors."""
    names["names"][:] = ["embed.weight", "norm.weight"]
    weights = {
        "layers.0.wq.weight": torch.ones(256, 64, dtype=torch.bfloat16),
        "layers.0.q_proj.weight": torch.ones(16, 64, dtype=torch.bfloat16),
        "embed.weight": torch.ones(64, 64, dtype=torch.bfloat16),
        "norm.weight": torch.ones(64, dtype=torch.bfloat16),
    }
    for uri in (place("/checkpoints/run/step-500"), place("s3://bucket/run/step-500")):
        holdfast.save(uri, {"model": weights})
    holdfast.save(names["uri"], {"model": weights})


def _save_table(place: Callable[[str], str], names: dict[str, Any]) -> None:
    weights = {
        "layers": [{"wq": torch.ones(16, 8)}],
        "norm": torch.ones(8),
        "embed": torch.ones(16, 4096),
    }
    for uri in ("s3://bucket/run/step-500", "lustre:///scratch/run/step-500"):
        holdfast.save(place(uri), {"model": weights, "step": 500})


_PREPARED: Mapping[str, Callable[[Callable[[str], str], dict[str, Any]], None]] = {
    "README.md": _save_late,
    "docs/how-to/checkpoint-a-training-loop.md": _save_run,
    "docs/how-to/coming-from-dcp.md": _save_for_dcp,
    "docs/how-to/exchange-models.md": _save_base,
    "docs/how-to/move-checkpoints.md": _save_source,
    "docs/how-to/open-a-checkpoint-with-pandas.md": _save_table,
    "docs/how-to/read-one-tensor.md": _save_llama,
    "docs/how-to/resume-in-another-layout.md": _save_step_500,
}
"""Functions that save the checkpoints that a page reads. They take the function for folders, and
the names."""


if __name__ == "__main__":
    main()
