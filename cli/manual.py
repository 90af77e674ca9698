"""The end of each command's help: examples and exit statuses.

Scope: loaded at every start of the command, so it is data and imports nothing slow.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["MANUAL", "HelpFormatter", "Manual", "closing_words"]

WIDTH = 80
"""Greatest width of a help text, in columns: it fits any terminal."""


class Manual(NamedTuple):
    """``examples``: command lines, each with its purpose. ``statuses``: the meanings of 0 and 1;
    the other statuses are the same for all commands."""

    examples: tuple[tuple[str, str], ...]
    statuses: Mapping[int, str]


_COMMON = {
    2: "wrong usage, or a failure; stderr says why",
    3: "a bug in Holdfast, with a traceback",
    130: "interrupted",
    141: "the reader of the output has closed it, as head does",
}

MANUAL: Mapping[str, Manual] = {
    "ls": Manual(
        (
            ("holdfast ls s3://bucket/run", "all checkpoints of a run"),
            ("holdfast ls s3://bucket/run --last 5", "the five stored last"),
            ("holdfast ls /checkpoints --json", "the same as JSON, for a program"),
        ),
        {0: "there are checkpoints", 1: "there are none"},
    ),
    "show": Manual(
        (
            ("holdfast show /checkpoints/step-500", "every tensor, with its layout"),
            ("holdfast show s3://bucket/run/step-500 --depth 2", "a summary of two levels"),
        ),
        {0: "the checkpoint was shown"},
    ),
    "verify": Manual(
        (("holdfast verify s3://bucket/run/step-500", "read and check every byte"),),
        {0: "every byte is what was written", 1: "something is damaged"},
    ),
    "diff": Manual(
        (("holdfast diff /run/step-500 s3://bucket/run/step-500", "is a copy the same?"),),
        {0: "both hold the same state", 1: "they differ"},
    ),
    "cp": Manual(
        (
            ("holdfast cp /nvme/run/step-500 s3://bucket/run/step-500", "one checkpoint"),
            ("holdfast cp --recursive /nvme/run s3://bucket/run", "all checkpoints missing there"),
        ),
        {0: "everything was copied", 1: "with --recursive: a checkpoint was damaged"},
    ),
    "export": Manual(
        (
            (
                "holdfast export run/step-500 /models/new --only 'model.*' --rename 'model.*=*'",
                "the weights, for Hugging Face's libraries",
            ),
            (
                "holdfast export /run/step-500 /models/new.pt --format torch --dtype bf16",
                "one file for torch.load",
            ),
        ),
        {0: "the files were written"},
    ),
    "import": Manual(
        (
            ("holdfast import /models/base s3://bucket/base", "a folder of safetensors files"),
            (
                "holdfast import old.pt /run/step-0 --only 'model.*' --step 0",
                "the weights in a file of torch.save",
            ),
        ),
        {0: "the checkpoint was written"},
    ),
    "prune": Manual(
        (
            ("holdfast prune /run --keep-last 3 --dry-run", "what would be deleted?"),
            (
                "holdfast prune /run --keep-last 3 --keep-every 1000 --yes",
                "keep the newest three, and every thousandth step",
            ),
        ),
        {
            0: "checkpoints were deleted, or there was nothing to delete",
            1: "you answered no, or a folder could not be pruned",
        },
    ),
    "report": Manual(
        (
            ("holdfast report s3://bucket/run/step-500", "which rank was slow, and why"),
            ("holdfast report s3://bucket/run --html report.html", "all saves, with charts"),
        ),
        {0: "the saves were shown", 1: "there is no telemetry"},
    ),
    "bench": Manual(
        (
            ("holdfast bench /scratch/bench --size 8GiB", "measure a file system"),
            (
                "holdfast bench s3://bucket/x --peer all --html a.html",
                "compare with other libraries",
            ),
            ("holdfast bench s3://bucket/x --ranks 8", "measure with eight processes"),
            ("holdfast bench s3://bucket/x --tune", "find the best options, and keep them"),
            ("holdfast bench /scratch/bench --workload raw", "the driver, without checkpoints"),
            (
                "holdfast bench s3://bucket/x --workload llama3-1t --simulate",
                "plan a job of 1,024 ranks",
            ),
            ("holdfast bench compare before.json after.json", "did it become slower?"),
        ),
        {
            0: "the result is valid; for compare: nothing became slower",
            1: "the result is invalid; for compare: something became slower",
        },
    ),
    "keeper": Manual(
        (("holdfast keeper status", "what the keepers of this host hold"),),
        {0: "success"},
    ),
    "keeper run": Manual(
        (
            ("holdfast keeper run s3://bucket/run --memory 200GiB", "run the keeper of a run"),
            (
                "holdfast keeper run /run --local /nvme/keepers --local-every 50",
                "also survive a reboot",
            ),
        ),
        {0: "the keeper has exited", 1: "another keeper of the run is alive"},
    ),
    "keeper status": Manual(
        (
            ("holdfast keeper status", "all keepers of this user"),
            ("holdfast keeper status s3://bucket/run --watch", "one keeper, every second"),
        ),
        {0: "success, also if there is no keeper"},
    ),
    "keeper stop": Manual(
        (("holdfast keeper stop", "stop all keepers of this user, and free the memory"),),
        {0: "the keepers stop", 1: "there was no keeper"},
    ),
    "keeper periods": Manual(
        (
            (
                "holdfast keeper periods --step 2s --cost memory=20ms --rate memory=1/2h",
                "how often to save to memory",
            ),
            (
                "holdfast keeper periods --step 2s --cost remote=8s --rate remote=1/168h",
                "how often to save to storage",
            ),
        ),
        {0: "the periods were computed"},
    ),
    "keeper demo": Manual(
        (
            ("holdfast keeper demo", "with storage in a temporary folder"),
            ("holdfast keeper demo s3://bucket/demo --json", "on your storage, with JSON output"),
        ),
        {0: "every job resumed as expected", 1: "a loss or a step was wrong"},
    ),
    "drivers": Manual(
        (
            ("holdfast drivers", "the available storages"),
            ("holdfast drivers s3://bucket/run", "its options, with their sources"),
            ("holdfast drivers --check s3://bucket/run", "is it fit for checkpoints?"),
        ),
        {
            0: "the storage can be used",
            1: "SCHEME cannot be used here, or --check found a problem",
        },
    ),
    "demo": Manual(
        (
            ("holdfast demo", "four ranks, then two"),
            ("holdfast demo s3://bucket/demo --ranks-after 1", "on your storage"),
        ),
        {0: "the loss continued as without the kill", 1: "the loss differs"},
    ),
}


def closing_words(manual: Manual) -> str:
    """Return the end of a help text, in lines of at most 80 columns."""
    lines = ["examples:"]
    for command, purpose in manual.examples:
        lines += [f"  # {purpose}", f"  {command}"]
    lines += ["", "exit status:"]
    for status, meaning in {**manual.statuses, **_COMMON}.items():
        lines.append(f"  {status:<5}{meaning}")
    return "\n".join(lines)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps at 80 columns at most, and keeps the line breaks of texts that have some."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._width = min(self._width, WIDTH - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)
