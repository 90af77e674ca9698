"""Work in a forked child, with a time limit."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable


def in_a_fork(work: Callable[[], object], timeout_s: float = 30.0) -> str:
    """Call ``work`` in a forked child; return "" if it returned, else its error or "hung"."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os.write(write_fd, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    try:
        ended, _, _ = select.select([read_fd], [], [], timeout_s)
        if not ended:
            os.kill(child, signal.SIGKILL)
            return "hung"
        return os.read(read_fd, 4000).decode()
    finally:
        os.close(read_fd)
        os.waitpid(child, 0)
