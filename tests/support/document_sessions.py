"""A program: runs the blocks of documents, each document as one session in a folder of its own.

    document_sessions.py FOLDER DOCUMENT…

It prints a line of JSON for each document: ``[document, what went wrong]``, "" where nothing did.
torch is imported once; each session is a fork of the process that did so.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from support.document_names import PLACES, names_for, prepare
from support.documents import ROOT, Block, python_blocks
from support.forked import in_a_fork
from support.kept_runs import keepers_below_a_folder

SESSION_S_MAX = 60.0


def main() -> None:
    """Run it."""
    folder = Path(sys.argv[1])
    warm_up()
    for document in sys.argv[2:]:
        text = (ROOT / document).read_text(encoding="utf-8")
        blocks = python_blocks(text)
        here = folder / document.replace("/", "_")
        here.mkdir(parents=True)
        problem = in_a_fork(_session_of(document, blocks, here), SESSION_S_MAX)
        print(json.dumps([document, problem]), flush=True)


def warm_up() -> None:
    """Import what sessions need, before they fork: torch imports much at the first step of an
    optimizer. There is no backward pass, whose threads a fork would not have."""
    import torch.distributed.checkpoint
    import torch.optim.swa_utils
    import torchdata.stateful_dataloader  # noqa: F401

    for name in holdfast.__all__:
        getattr(holdfast, name)
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


def _session_of(document: str, blocks: list[Block], here: Path) -> Callable[[], None]:
    def session() -> None:
        log = os.open(here / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        empty = here / "cwd"
        empty.mkdir()
        os.chdir(empty)
        # Frameworks warn of what is not ours; what Holdfast says is in the output.
        warnings.simplefilter("default")
        with keepers_below_a_folder():
            run_blocks(document, blocks, here)

    return session


def run_blocks(document: str, blocks: list[Block], here: Path) -> None:
    """Run blocks in their order; each has the names of those before it. What a block raises, this
    raises; the line in the traceback is that of the document."""

    def place(uri: str) -> str:
        return _with_places(uri, here)

    names: dict[str, Any] = names_for(str(here))
    prepare(document, place, names)
    for block in blocks:
        if block.reason is None:
            program = here / f"{Path(document).stem}.md.py"
            program.write_text("\n" * (block.line - 1) + place(block.code), encoding="utf-8")
            for _ in range(block.times):
                names = runpy.run_path(str(program), init_globals=names)


def _with_places(text: str, here: Path) -> str:
    """``text`` with folders below ``here`` for the storage that documents name."""
    pattern = "|".join(re.escape(place) for place in PLACES)
    return re.sub(
        rf"(?:^|(?<=[\"':]))({pattern})(?=[/\"'])",
        lambda match: f"{here}/{re.sub(r'^.*//+', '', match[0]).strip('/')}",
        text,
    )


if __name__ == "__main__":
    main()
