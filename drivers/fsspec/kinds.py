"""What is known of fsspec's file systems, and fsspec does not tell: how a new file appears.

Scope: knowledge, as tables and pure functions. ``driver.py`` does the I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["Kind", "kind_of", "modified_s"]


@dataclass(frozen=True, slots=True)
class Kind:
    """``appears``: how a new file comes to be seen.

    ``renamed``  it is written under a temporary name, and the file system renames it, in one step
    ``copied``   likewise; and put in place by one copy in memory
    ``closed``   the store shows nothing before a file is closed, and then all of it
    ``unknown``  nothing is promised: a temporary name, and a rename whose result is checked

    ``folders``: they exist by themselves, and must be made. ``threads``: calls may be made at the
    same time. ``listings``: it takes the argument that keeps it from caching listings; one that
    takes it for an argument of its library's does not.
    """

    appears: Literal["renamed", "copied", "closed", "unknown"]
    folders: bool
    threads: bool = True
    shared: bool = True
    listings: bool = True


_OBJECTS = Kind("closed", folders=False)
_KINDS = {
    "file": Kind("renamed", folders=True, shared=False),
    "local": Kind("renamed", folders=True, shared=False),
    "memory": Kind("copied", folders=False, shared=False),
    # paramiko mixes up the answers to calls that are made at the same time.
    "sftp": Kind("renamed", folders=True, threads=False, listings=False),
    "ssh": Kind("renamed", folders=True, threads=False, listings=False),
    "hdfs": Kind("unknown", folders=True),
    **dict.fromkeys(("abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"), _OBJECTS),
}

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def kind_of(protocol: str, cls: type) -> Kind:
    """What is known of ``protocol``, which ``cls`` serves. Of one that is not known, the worst is
    taken to be true."""
    known = _KINDS.get(protocol)
    return known or Kind("unknown", folders=True, threads=bool(getattr(cls, "async_impl", False)))


def modified_s(info: Mapping[str, Any]) -> float:
    """When a file was written, in seconds since the epoch; 0 where the file system does not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
