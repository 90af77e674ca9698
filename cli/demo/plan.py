"""Settings of the demo and its output folder, checked before anything starts."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ...drivers.uri import join, parse
from ...errors import UsageError
from .text import SEQUENCES

SAVES = 5
WHOLE = "whole"
INCREMENTAL = "incremental"
"""Folders of the two kinds of checkpoints of the incremental demo."""
_MARKER = ".holdfast-demo"
_OURS = ("checkpoints", "logs", "loss.svg")


@dataclass(frozen=True, slots=True)
class Plan:
    """Train ``steps`` steps on ``before`` ranks, kill a rank in a save, and resume with ``after``
    ranks. Raises UsageError for settings that cannot work."""

    steps: int
    before: int
    after: int

    def __post_init__(self) -> None:
        for ranks in (self.before, self.after):
            if ranks < 1 or SEQUENCES % ranks:
                raise UsageError(f"{ranks} ranks cannot share {SEQUENCES} sequences evenly")
        if self.before < 2:
            raise UsageError("with one rank, none survives the kill")
        if self.steps < SAVES:
            raise UsageError(f"{self.steps} steps are too few for {SAVES} saves")

    @property
    def every(self) -> int:
        """Steps between two saves."""
        return self.steps // SAVES

    @property
    def kill_at(self) -> int:
        """The step in whose save a rank is killed: not the first, since one must be there to resume
        from."""
        return 3 * self.every

    @property
    def victim(self) -> int:
        """The rank that is killed. Not rank 0, which leads the save and tells the others how it
        ended."""
        return min(2, self.before - 1)


def prepare(out: str) -> Path:
    """Make or empty the folder ``out``. Raises UsageError if it holds anything and no demo made
    it."""
    folder = Path(os.path.abspath(out))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    marker = folder / _MARKER
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise UsageError(
            f"{folder} holds something other than an earlier demo",
            advice="Give another folder with --out.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text("Made by `holdfast demo`, which may empty this folder.\n")
    for name in _OURS:
        _remove(folder / name)
    return folder


def checkpoints_uri(uri: str | None, folder: Path) -> str:
    """Return the URI of the folder of checkpoints: a new one below ``uri``, or in ``folder`` if
    that is None.

    Raises UriError, and UsageError for storage that processes of a job do not share.
    """
    if uri is None:
        return str(join(str(folder), "checkpoints"))
    if (scheme := parse(uri).scheme) in ("memory", "fsspec+memory"):
        raise UsageError(f"the ranks of a job are processes, and share no {scheme}:// storage")
    return str(
        join(uri, time.strftime("demo-%Y%m%dT%H%M%S-", time.gmtime()) + secrets.token_hex(2))
    )


def checkpoint_uri(root: str, step: int, kind: str = "") -> str:
    """Return the URI of the checkpoint of ``step`` below ``root``, in the folder ``kind`` if
    any."""
    return str(join(join(root, kind) if kind else root, f"step-{step:06d}"))


def _remove(path: Path) -> None:
    """Remove a file, link or folder. Never follow a link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
