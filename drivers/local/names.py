"""Names of files below a root: what is an object, what is unfinished, and what is neither."""

from __future__ import annotations

import re
import secrets

__all__ = ["is_hidden", "is_reserved", "is_temporary", "split", "temporary_name"]

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp", re.DOTALL)
_HIDDEN = re.compile(r"\.nfs[0-9a-f]{24}|\.fuse_hidden[0-9a-f]{16}")


def temporary_name(name: str) -> str:
    """A new name for what is to become ``name``: hidden from listings, and at most 255 bytes
    long."""
    return f".{name[:48]}.{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a file of this name is an upload, unfinished or dead, rather than an object."""
    return name.endswith(".tmp") and _TEMPORARY.fullmatch(name) is not None


def is_hidden(name: str) -> bool:
    """Whether the client of a network file system, or libfuse, gives this name to a file that was
    removed while some process of this host has it open. It removes the file when that is closed."""
    return name.startswith((".nfs", ".fuse_hidden")) and _HIDDEN.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Whether no object can have this name, because it means something else."""
    return is_temporary(name) or is_hidden(name)


def split(key: str) -> tuple[str, str]:
    """The key of the folder that holds ``key`` ("" is the root), and its name there."""
    folder, _, name = key.rpartition("/")
    return folder, name
