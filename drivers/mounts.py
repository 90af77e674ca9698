"""Which file system a path lies on, and whether other hosts see it too."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

__all__ = ["LUSTRE_TYPES", "Mount", "fs_type", "is_shared", "mount_of"]

LUSTRE_TYPES = {"lustre", "lustre_lite"}

_SHARED = LUSTRE_TYPES | {
    "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "daos", "fuse", "gfs2", "glusterfs", "gpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip


class Mount(NamedTuple):
    """What is mounted: the type of the file system, where it comes from, and where it is; "" if unknown."""

    fs_type: str
    source: str
    point: str


def fs_type(path: str) -> str:
    """The type of the file system that holds ``path`` (which need not exist yet), as mount(8) prints it; "" if unknown."""
    return mount_of(path).fs_type


def mount_of(path: str, mountinfo: str | None = None) -> Mount:
    """The mount that holds ``path`` (which need not exist yet). ``mountinfo`` stands in for ``/proc/self/mountinfo``."""
    if mountinfo is None:
        try:
            with open("/proc/self/mountinfo", "rb", buffering=0) as file:  # plainly: a save waits for it
                mountinfo = file.read().decode(errors="surrogateescape")
        except OSError:  # no /proc here: nothing is known, and nothing depends on it but a hint
            return Mount("", "", "")
    path = os.path.realpath(path)
    found, depth = Mount("", "", ""), -1
    for mount in _mounts(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and len(mount.point) >= depth:  # of two mounts on one folder, the later one covers the earlier
            found, depth = mount, len(mount.point)
    return found


@lru_cache(maxsize=1)
def _mounts(mountinfo: str) -> tuple[Mount, ...]:
    """All that is mounted. Kept while it is the same: a save asks twice while training waits for it to begin."""
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, source = map(_unescaped, tail.split(" ", 2)[:2])
        found.append(Mount(kind, source, _unescaped(head.split(" ")[4])))
    return tuple(found)


def is_shared(fs_type: str) -> bool:
    """Whether a file system of this type is, by its nature, seen by other hosts. FUSE: mostly, so yes."""
    return fs_type in _SHARED or fs_type.startswith("fuse.")


def _unescaped(field: str) -> str:
    if "\\" not in field:
        return field
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
