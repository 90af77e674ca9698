"""File systems that are mounted by FUSE: whether that can be done here, and how it ends."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

__all__ = ["FUSE", "await_mount", "fuse_works", "unmount"]

FUSE = "FUSE cannot be used here: that takes /dev/fuse, and root"
"""Why a test is skipped where :func:`fuse_works` says no."""
MOUNT_S = 60.0


def fuse_works() -> bool:
    """Tell whether this process may mount by FUSE."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        return False
    return os.geteuid() == 0


def await_mount(folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until ``process`` has mounted ``folder``. Raises RuntimeError, with the end of its log,
    where it does not."""
    deadline_s = time.monotonic() + MOUNT_S
    while not os.path.ismount(folder):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{folder} is not mounted:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.05)


def unmount(folder: Path) -> None:
    """Unmount ``folder``, if it is mounted; at once, also where somebody still uses it."""
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False, timeout=30)
