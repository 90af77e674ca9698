"""Lustre's stand-in, mounted for the length of a test; and a `lfs` that speaks to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["LFS", "lustre"]

LFS = f"""#!{sys.executable}
import os, struct, sys

command, *arguments = sys.argv[1:]
if command == "df":
    print("UUID  1K-blocks\\nmdt  1  /x[MDT:0]")
    print("\\n".join(f"ost  1  /x[OST:{{n}}]" for n in range(6)))
else:
    asked = dict(zip(arguments[0:-1:2], arguments[1:-1:2]))
    count, size = int(asked["--stripe-count"]), int(asked["--stripe-size"])
    layout = struct.pack("<IIQQIHH", 0x0BD10BD0, 0, 0, 0, size, count & 0xFFFF, 0xFFFF)
    os.setxattr(arguments[-1], "user.lov", layout)
"""
"""A fake `lfs` with the commands that the driver uses: `setstripe` on empty files, and `df`."""

_PROGRAM = Path(__file__).with_name("lustre_standin.py")
_MOUNT_TIMEOUT_S = 20.0


@contextmanager
def lustre(folder: Path, *, osts: int = 8, mode: str = "") -> Iterator[Path]:
    """Mount a stand-in for Lustre below ``folder``, or skip the test if that is impossible.

    See ``lustre_standin.py`` for its modes.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("Lustre's stand-in needs /dev/fuse")
    try:
        import mfusepy
    except (ImportError, OSError) as error:
        pytest.skip(f"Lustre's stand-in needs mfusepy and libfuse: {error}")
    assert mfusepy.FUSE
    backing, mount = folder / "backing", folder / "lustre"
    for made in (backing, mount):
        made.mkdir()
    arguments = [sys.executable, str(_PROGRAM), str(backing), str(mount), str(osts), mode]
    with subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _wait_until_mounted(mount, process)
            yield mount
        finally:
            process.terminate()
            process.communicate(timeout=_MOUNT_TIMEOUT_S)


def _wait_until_mounted(mount: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _MOUNT_TIMEOUT_S
    while not os.path.ismount(mount):
        if process.poll() is not None and process.stderr is not None:
            pytest.fail(f"Lustre's stand-in did not start: {process.stderr.read()}")
        if time.monotonic() > deadline:
            pytest.fail("Lustre's stand-in is not mounted in time")
        time.sleep(0.02)
