"""The output folder of the demo. At the start it is emptied of an earlier demo's files only."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from ...drivers.uri import join, parse
from ...errors import UsageError

__all__ = ["checkpoint_uri", "checkpoints_uri", "name_of", "prepare"]

_MARKER = ".holdfast-demo"
_OURS = ("checkpoints", "logs", "loss.svg", "loss.png", "tree.txt")


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


def checkpoint_uri(root: str, step: int) -> str:
    """Return the URI of the checkpoint of ``step`` below ``root``."""
    return str(join(root, f"step-{step:06d}"))


def name_of(uri: str) -> str:
    """Return the last path segment of ``uri``, without options."""
    return uri.partition("?")[0].rstrip("/").rpartition("/")[2]


def _remove(path: Path) -> None:
    """Remove a file, link or folder. Never follow a link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
