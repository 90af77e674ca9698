"""Runs fio next to the limit of a file system, with the same threads, and about the same bytes and
block size."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Literal

from ...core.units import ceil_div, round_up, size_text
from ..machine import sync_tree
from .raw_file import CHUNK_NBYTES, RawFile, takes_direct

__all__ = ["Fio", "fio_seconds"]

_ALIGN_NBYTES = 4096
_TRIAL_NBYTES = 1 << 20


@dataclass(frozen=True)
class Fio:
    """fio on the file of ``setting``, with its threads. Methods raise OSError where fio fails, and
    return the seconds that fio says it took: starting it is no part of them."""

    setting: RawFile

    @property
    def name(self) -> str:
        """Such as "fio, 8 threads, blocks of 16.0 MiB"."""
        return f"fio, {self.setting.threads} threads, blocks of {size_text(self._block_nbytes)}"

    @property
    def nbytes(self) -> int:
        """Bytes that it writes and reads: the same number of whole blocks in each thread."""
        return self._block_nbytes * self._blocks * self.setting.threads

    def try_out(self) -> None:
        """Write and read a little."""
        small = Fio(self.setting.at_size(_TRIAL_NBYTES))
        try:
            small.write()
            small.read()
        finally:
            self.remove()

    def write(self) -> float:
        """Replace the file, durably."""
        self.remove()
        seconds = self._run("write", "--end_fsync=1")
        sync_tree(self.setting.path)
        return seconds

    def read(self) -> float:
        """Read all of it."""
        return self._run("read")

    def remove(self) -> None:
        """Delete the file. Nothing there is no error."""
        self.setting.remove()

    @property
    def _blocks(self) -> int:
        """Blocks of each thread."""
        return ceil_div(self.setting.nbytes, self.setting.threads * CHUNK_NBYTES)

    @property
    def _block_nbytes(self) -> int:
        return round_up(
            ceil_div(self.setting.nbytes, self.setting.threads * self._blocks), _ALIGN_NBYTES
        )

    def _run(self, kind: Literal["write", "read"], *more: str) -> float:
        path = self.setting.path
        share = self._block_nbytes * self._blocks
        done = subprocess.run(
            [
                "fio",
                f"--name={kind}",
                f"--filename={path.name}",  # in a path, fio would take a colon for a separator
                f"--rw={kind}",
                f"--bs={self._block_nbytes}",
                f"--size={share}",
                f"--offset_increment={share}",
                f"--numjobs={self.setting.threads}",
                "--thread",
                "--ioengine=psync",
                f"--direct={int(takes_direct(path.parent))}",
                f"--fallocate={'posix' if self.setting.preallocate else 'truncate'}",
                *more,
                "--group_reporting",
                "--output-format=json",
            ],
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise OSError(f"fio ended with {done.returncode}: {said[-1] if said else 'no word'}")
        return fio_seconds(done.stdout, kind, self.nbytes)


def fio_seconds(text: str, kind: Literal["write", "read"], nbytes: int) -> float:
    """Return how long fio says, in JSON, that its only group of jobs took to move ``nbytes``.
    Raises OSError where it moved another number of bytes, or says something else."""
    try:
        (job,) = json.loads(text[text.index("{") :])["jobs"]  # warnings come before it
        moved, error, milliseconds = job[kind]["io_bytes"], job["error"], int(job[kind]["runtime"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise OSError(f"fio's report cannot be read: {wrong!r}") from wrong
    if error or moved != nbytes:
        raise OSError(error, f"fio moved {moved:,} bytes of {nbytes:,}")
    return max(milliseconds, 1) / 1e3
