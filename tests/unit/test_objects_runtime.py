"""The end of a process that has used an object store."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from holdfast.drivers.objects import runtime

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are told apart by /proc")
def test_the_end_waits_for_threads_that_may_want_the_lock() -> None:
    """One of obstore's that is at work, without the interpreter's lock, gets it before the
    interpreter ends."""
    runtime.use("s3://bucket")
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        (TASKS / str(threading.get_native_id()) / "comm").write_text("tokio-runtime-worker"[:15])
        begun.set()
        hashlib.sha256(bytes(32 << 20)).digest()
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    runtime.settle()
    assert ended.is_set()
    thread.join()
