"""Starts the ranks of a measurement on this host, as a launcher would.

The ranks are separate processes that meet through a store in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...drivers.uri import Uri
from ...errors import RankFailedError
from ..place import clear
from .ranks import LEAVE_S
from .result import Measurement, decoded

_POLL_S = 0.05
Say = Callable[[str], None]


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
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            text = json.dumps({**order, "place": str(place), "folder": folder})
            command = [sys.executable, "-m", module, text]
            with _workers(command, ranks, Path(folder)) as workers:
                _await(workers, Path(folder), say)
            return decoded((Path(folder) / "result").read_text("utf-8"), "what rank 0 found")
    finally:
        clear(place)


@contextlib.contextmanager
def _workers(
    command: Sequence[str], ranks: int, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the workers. On exit, interrupt them, let them clean up for some seconds, and kill the
    rest."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }
    workers = list[subprocess.Popen[bytes]]()
    try:
        for rank in range(ranks):
            with _file(folder, "said", rank) as said, _file(folder, "log", rank) as log:
                workers.append(
                    subprocess.Popen(
                        command,
                        env=environment | {"RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=log,
                        start_new_session=True,  # this process passes a Ctrl-C on, once
                    )
                )
        yield workers
    finally:
        _end(workers)
        del store


def _file(folder: Path, name: str, rank: int) -> BinaryIO:
    return open(folder / f"{name}-{rank}", "wb")


def _await(workers: Sequence[subprocess.Popen[bytes]], folder: Path, say: Say) -> None:
    """Wait for all workers, and pass on what rank 0 prints. Raises RankFailedError if one fails. If
    a rank hangs, the others fail after waiting :data:`.ranks.MEET_S` for it."""
    with open(folder / "said-0", encoding="utf-8", errors="replace") as said:
        while True:
            ended = [worker.poll() for worker in workers]
            for line in said:
                say(line.rstrip("\n"))
            failed = [rank for rank, status in enumerate(ended) if status]
            if failed:
                raise _failure(failed, workers, folder)
            if None not in ended:
                return
            time.sleep(_POLL_S)


def _failure(
    failed: Sequence[int], workers: Sequence[subprocess.Popen[bytes]], folder: Path
) -> RankFailedError:
    """Return the error of the first cause. Ranks that only report the loss of another one leave no
    error file."""
    deadline_s = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline_s and any(worker.poll() is None for worker in workers):
        time.sleep(_POLL_S)
    for rank in range(len(workers)):
        with contextlib.suppress(OSError):
            return RankFailedError((folder / f"error-{rank}").read_text("utf-8"), rank=rank)
    rank = failed[0]
    log = (folder / f"log-{rank}").read_text("utf-8", errors="replace")
    return RankFailedError(f"it ended with {workers[rank].returncode}:\n{log[-2000:]}", rank=rank)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + 2 * LEAVE_S
    for worker in workers:
        try:
            worker.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
