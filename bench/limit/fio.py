"""Runs fio next to the limit of a file system, with the same threads and about the same size and
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
    """fio on the file of ``setting``, with its threads.

    Methods return the seconds that fio reports, which exclude its start, and raise OSError if fio
    fails.
    """

    setting: RawFile

    @property
    def name(self) -> str:
        """Name, such as "fio, 8 threads, blocks of 16.0 MiB"."""
        return f"fio, {self.setting.threads} threads, blocks of {size_text(self._block_nbytes)}"

    @property
    def nbytes(self) -> int:
        """Bytes that it writes and reads: the same number of whole blocks in each thread."""
        return self._block_nbytes * self._blocks * self.setting.threads

    def try_out(self) -> None:
        """Write and read a small file, to see whether fio works here."""
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
        """Read the whole file."""
        return self._run("read")

    def remove(self) -> None:
        """Delete the file, which need not exist."""
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
                f"--filename={path.name}",  # fio splits paths at colons
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
    """Return the seconds that fio reports, as JSON, for moving ``nbytes`` in its only group of
    jobs. Raises OSError if it moved another number of bytes, or if the report is unreadable."""
    try:
        (job,) = json.loads(text[text.index("{") :])["jobs"]  # warnings may precede it
        moved, error, milliseconds = job[kind]["io_bytes"], job["error"], int(job[kind]["runtime"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise OSError(f"fio's report cannot be read: {wrong!r}") from wrong
    if error or moved != nbytes:
        raise OSError(error, f"fio moved {moved:,} bytes of {nbytes:,}")
    return max(milliseconds, 1) / 1e3
