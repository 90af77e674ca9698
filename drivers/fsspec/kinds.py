"""Properties of fsspec's file systems that fsspec does not expose: above all, how a new file
appears.

Scope: tables and pure functions. ``driver.py`` does the I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of one file system. ``appears`` says how a new file becomes visible:

        ``renamed``  written under a temporary name and renamed in one step
        ``copied``   written under a temporary name and put in place by one copy in memory
        ``closed``   invisible until it is closed, then whole
        ``unknown``  nothing is promised: temporary name, and a rename whose result is checked

    ``folders``: folders exist on their own and must be created. ``threads``: concurrent calls are
    allowed. ``listings``: accepts the argument that disables the listings cache; other file systems
    would pass it on to their library.
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
    # paramiko mixes up the replies to concurrent calls.
    "sftp": Kind("renamed", folders=True, threads=False, listings=False),
    "ssh": Kind("renamed", folders=True, threads=False, listings=False),
    "hdfs": Kind("unknown", folders=True),
    **dict.fromkeys(("abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"), _OBJECTS),
}

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def kind_of(protocol: str, cls: type) -> Kind:
    """Return the properties of ``protocol``, which is served by ``cls``. Assumes the worst for an
    unknown one."""
    known = _KINDS.get(protocol)
    return known or Kind("unknown", folders=True, threads=bool(getattr(cls, "async_impl", False)))


def modified_s(info: Mapping[str, Any]) -> float:
    """Return a file's modification time in seconds since the epoch; 0 if the file system does not
    report it."""
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
