"""Which file system a path lies on, and whether other hosts see it too."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Mount", "fs_type", "is_shared", "may_be_stale", "mount_of"]

_LOCAL = {
    "apfs", "aufs", "bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4",
    "f2fs", "fuseblk", "hfs", "hfsplus", "iso9660", "jffs2", "jfs", "minix", "msdos", "nilfs2",
    "ntfs", "ntfs3", "overlay", "overlayfs", "ramfs", "reiser4", "reiserfs", "rootfs", "squashfs",
    "tmpfs", "ubifs", "udf", "ufs", "vfat", "xfs", "zfs",
}  # fmt: skip
"""File systems that, by their nature, one host mounts at a time."""

_COHERENT = {"ceph", "gfs2", "gpfs", "lustre", "lustre_lite", "ocfs2"}
"""Shared file systems whose attributes are under locks: what one host changes, all see at once."""


class Mount(NamedTuple):
    """What is mounted: the type of the file system, where it comes from, and where it is; "" if
    unknown."""

    fs_type: str
    source: str
    point: str


def fs_type(path: str) -> str:
    """The type of the file system that holds ``path`` (which need not exist yet), as mount(8)
    prints it; "" if unknown."""
    return mount_of(path).fs_type


def mount_of(path: str, mountinfo: str | None = None) -> Mount:
    """The mount that holds ``path`` (which need not exist yet). ``mountinfo`` stands in for
    ``/proc/self/mountinfo``."""
    if mountinfo is None:
        try:
            # Unbuffered, because a save waits for it.
            with open("/proc/self/mountinfo", "rb", buffering=0) as file:
                mountinfo = file.read().decode(errors="surrogateescape")
        except OSError:  # no /proc here: nothing is known, and nothing depends on it but a hint
            return Mount("", "", "")
    path = os.path.realpath(path)
    found = Mount("", "", "")
    depth = -1
    for mount in _mounts(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # Of two mounts on one folder, the later one covers the earlier.
        if inside and len(mount.point) >= depth:
            found = mount
            depth = len(mount.point)
    return found


@lru_cache(maxsize=1)
def _mounts(mountinfo: str) -> tuple[Mount, ...]:
    """All that is mounted. Kept while it is the same: a save asks twice while training waits for it
    to begin."""
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, source = map(_unescaped, tail.split(" ", 2)[:2])
        found.append(Mount(kind, source, _unescaped(head.split(" ")[4])))
    return tuple(found)


def is_shared(fs_type: str) -> bool:
    """Whether other hosts may see a file system of this type. One that is not known counts as
    shared: it is worse to take the live upload of another host for a dead one than to keep a dead
    one for a while."""
    return fs_type not in _LOCAL


def may_be_stale(fs_type: str) -> bool:
    """Whether what such a file system says of an open file may be what it was a while ago: other
    hosts change it."""
    return is_shared(fs_type) and fs_type not in _COHERENT


def _unescaped(field: str) -> str:
    if "\\" not in field:
        return field
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
