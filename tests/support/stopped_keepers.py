"""Keepers that do not answer for a while, as on an overloaded host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .kept_runs import KeptRun


@contextmanager
def stopped_keeper(run: KeptRun, host: str = "") -> Iterator[int]:
    """Stop the keeper of a host during the body, which may resume the process earlier; yield its
    id."""
    folder = run.keeper_of(host) if host else run.keeper
    pid = int(folder.lock.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):  # it ends with the training
            os.kill(pid, signal.SIGCONT)
