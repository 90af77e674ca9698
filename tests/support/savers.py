"""Savers in tests: found from outside, and for images of any size."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.storage.arenas.sockets import Line
from holdfast.storage.operations.saving import saver_save
from holdfast.storage.saver import client

from .victims import count_calls, state_of_step, tuned_state

MARK = "HOLDFAST_TEST_SAVER_OF"
"""Environment variable that names the trainer, which its saver inherits."""
WAIT_S = 60.0


def for_any_size(patch: pytest.MonkeyPatch) -> None:
    """Let savers write small images, too."""
    patch.setattr(saver_save, "NBYTES_MIN", 1)


def pid_of_saver() -> int:
    """Return the id of this process's saver."""
    saver = client._state.saver
    assert saver is not None
    return saver.pid


def savers_of(mark: str) -> list[int]:
    """Return the savers of the trainers with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_saver = b"storage.saver.process" in (path.parent / "cmdline").read_bytes()
            if is_saver and wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


def until_savers_ended(mark: str) -> None:
    """Wait for the end of these savers. Fails if one does not end."""
    until_s = time.monotonic() + WAIT_S
    while savers_of(mark):
        assert time.monotonic() < until_s, f"savers that do not end: {savers_of(mark)}"
        time.sleep(0.1)


def save_and_die_at(
    pipe: Connection, uri: str, step: int, at: int, mark: str, base: str | None = None
) -> None:
    """Save asynchronously by a saver, and die before the ``at``-th changing call, after sending the
    labels of all calls before it; or send how many there were. With a ``base``, most of the state
    can be borrowed from it."""
    import holdfast

    os.environ[MARK] = mark
    saver_save.NBYTES_MIN = 1
    seen = count_calls(at, pipe.send)
    state = state_of_step(step) if base is None else tuned_state(step)
    holdfast.async_save(uri, state, base=base).wait()
    pipe.send(seen())


def save_as_rank(pipe: Connection, uri: str, rank: int, world: int, store: str) -> None:
    """Save as a rank of a job, send when the saver has this rank's image, and wait for the end."""
    import torch
    import torch.distributed as dist

    import holdfast

    os.environ[MARK] = store
    saver_save.NBYTES_MIN = 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    state = {"step": 2, f"x{rank}": torch.full((100_000,), rank), "same": torch.arange(100_000)}
    sent, plain = threading.Event(), Line.send

    async def send(self: Line, data: bytes, fds: Sequence[int] = ()) -> None:
        await plain(self, data, fds)
        if fds:
            sent.set()

    Line.send = send  # type: ignore[method-assign]
    handle = holdfast.async_save(uri, state)
    assert sent.wait(WAIT_S)
    pipe.send("handed over")
    handle.wait()
    pipe.send("committed")
