"""Starts ranks on this host under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...drivers.uri import Uri
from ...errors import RankFailedError
from ..place import clear
from .result import Measurement, decoded

_POLL_S = 0.05
_STOP_S = 40.0  # torchrun gives its ranks 30 s to stop
Say = Callable[[str], None]


def torchrun(ranks: int, module: str) -> list[str]:
    """Return a command that runs ``module`` on ``ranks`` ranks. Arguments may be appended."""
    options = ["--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
    ranks_and_module = [f"--nproc-per-node={ranks}", "-m", module]
    return [sys.executable, "-m", "torch.distributed.run", *options, *ranks_and_module]


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run torchrun, with variables added to the environment. At the end of the block, stop it and
    thereby its ranks, unless they have ended."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # this process passes a Ctrl-C on, once
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def launched(
    module: str, order: Mapping[str, Any], place: Uri, ranks: int, say: Say
) -> Measurement:
    """Measure with ``ranks`` processes of this host.

    Each process runs ``module`` with one argument: ``order`` as JSON, extended by the ``place`` to
    write to and the ``folder`` for its result. There rank 0 leaves ``result``, and a failed rank
    ``error-RANK``. At the end all processes and all their data are gone, also after an error.
    Raises RankFailedError with the message of the first rank that failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
            folder = Path(name)
            text = json.dumps({**order, "place": str(place), "folder": name})
            if _status([*torchrun(ranks, module), text], ranks, folder, say):
                raise _failure(ranks, folder)
            return decoded((folder / "result").read_text("utf-8"), "what rank 0 found")
    finally:
        clear(place)


def _status(command: Sequence[str], ranks: int, folder: Path, say: Say) -> int:
    """Run the ranks, pass on what rank 0 prints, and return the exit status."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    with (
        open(folder / "said", "wb") as said,
        open(folder / "log", "wb") as log,
        open(folder / "said", encoding="utf-8", errors="replace") as lines,
        running(command, environment, said, log) as process,
    ):
        status = None
        while status is None:
            time.sleep(_POLL_S)
            status = process.poll()
            for line in lines:
                say(line.rstrip("\n"))
        return status


def _failure(ranks: int, folder: Path) -> RankFailedError:
    """Return the error of the first cause. Ranks that only report the loss of another one leave no
    error file."""
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            return RankFailedError((folder / f"error-{rank}").read_text("utf-8"), rank=rank)
    log = (folder / "log").read_text("utf-8", errors="replace")
    return RankFailedError(f"a rank has ended:\n{log[-2000:]}")
