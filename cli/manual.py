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
    2: "the call was wrong, or could not be carried out; stderr says why",
    3: "a fault of Holdfast itself, with a traceback",
    130: "interrupted",
    141: "what read the output has closed it, as head does",
}

MANUAL: Mapping[str, Manual] = {
    "ls": Manual(
        (
            ("holdfast ls s3://bucket/run", "all checkpoints of a run"),
            ("holdfast ls s3://bucket/run --last 5", "the five that were stored last"),
            ("holdfast ls /checkpoints --json", "the same for a program, as one document"),
        ),
        {0: "there are checkpoints", 1: "there are none"},
    ),
    "show": Manual(
        (
            ("holdfast show /checkpoints/step-500", "every tensor, and where it lies"),
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
            ("holdfast cp --recursive /nvme/run s3://bucket/run", "all that are missing there"),
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
        {0: "it was done, or there was nothing to do", 1: "you answered no"},
    ),
    "report": Manual(
        (
            ("holdfast report s3://bucket/run/step-500", "which rank was slow, and why"),
            ("holdfast report s3://bucket/run --html report.html", "all saves, with pictures"),
        ),
        {0: "the saves were shown", 1: "nothing was recorded"},
    ),
    "bench": Manual(
        (
            ("holdfast bench /scratch/bench --size 8GiB", "what this file system gives"),
            ("holdfast bench s3://bucket/x --peer all --html a.html", "beside other libraries"),
            ("holdfast bench s3://bucket/x --ranks 8", "by eight processes of this host"),
            ("holdfast bench s3://bucket/x --tune", "find the best options, and keep them"),
            ("holdfast bench /scratch/bench --workload raw", "the driver, without checkpoints"),
            (
                "holdfast bench s3://bucket/x --workload llama3-1t --simulate",
                "plan a job of 1,024 ranks",
            ),
            ("holdfast bench compare before.json after.json", "did it become slower?"),
        ),
        {
            0: "the result is valid; of compare: nothing became slower",
            1: "a result is not to be believed; of compare: something became slower",
        },
    ),
    "keeper": Manual(
        (("holdfast keeper status", "what the keepers of this host hold"),),
        {0: "it was done"},
    ),
    "keeper run": Manual(
        (
            ("holdfast keeper run s3://bucket/run --memory 200GiB", "be the keeper of a run"),
            (
                "holdfast keeper run /run --local /nvme/keepers --local-every 50",
                "survive a reboot, too",
            ),
        ),
        {0: "it has ended", 1: "another keeper of the run is alive"},
    ),
    "keeper status": Manual(
        (
            ("holdfast keeper status", "of all runs of this user"),
            ("holdfast keeper status s3://bucket/run --watch", "of one, again and again"),
        ),
        {0: "it was shown, also where there is none"},
    ),
    "keeper stop": Manual(
        (("holdfast keeper stop", "end all keepers of this user, and free the memory"),),
        {0: "they end", 1: "there was none"},
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
        {0: "it was worked out"},
    ),
    "keeper demo": Manual(
        (
            ("holdfast keeper demo", "with storage in a temporary folder"),
            ("holdfast keeper demo s3://bucket/demo --json", "on a storage of yours, in figures"),
        ),
        {0: "all went on as it should", 1: "a loss or a step is another one"},
    ),
    "drivers": Manual(
        (
            ("holdfast drivers", "what can be used here"),
            ("holdfast drivers s3://bucket/run", "its options, and where each comes from"),
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
            ("holdfast demo s3://bucket/demo --ranks-after 1", "on a storage of yours"),
        ),
        {0: "training went on as if nothing had happened", 1: "the loss is another one"},
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
