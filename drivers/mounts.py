"""The file system that holds a path, and whether other hosts share it."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

_LOCAL = {
    "apfs", "aufs", "bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4",
    "f2fs", "fuseblk", "hfs", "hfsplus", "iso9660", "jffs2", "jfs", "minix", "msdos", "nilfs2",
    "ntfs", "ntfs3", "overlay", "overlayfs", "ramfs", "reiser4", "reiserfs", "rootfs", "squashfs",
    "tmpfs", "ubifs", "udf", "ufs", "vfat", "xfs", "zfs",
}  # fmt: skip
"""File systems that only one host mounts at a time."""

_COHERENT = {"ceph", "gfs2", "gpfs", "lustre", "lustre_lite", "ocfs2"}
"""Shared file systems with coherent attributes: all hosts see a change at once."""


_CLONING = {"bcachefs", "btrfs", "ocfs2", "xfs", "zfs"}
"""File systems on which files can share blocks."""

_WITHOUT_LINKS = {"", "exfat", "fuseblk", "msdos", "ntfs", "vfat"}
"""File systems on which hard links are missing or doubtful."""


class Mount(NamedTuple):
    """A mount; each field is "" if unknown. ``device`` identifies the file system on this host, and
    ``options`` are the file system's own."""

    fs_type: str = ""
    source: str = ""
    point: str = ""
    device: str = ""
    options: str = ""


def fs_type(path: str) -> str:
    """Return the type of the file system that holds ``path``, as mount(8) prints it; "" if unknown.
    The path need not exist."""
    return mount_of(path).fs_type


def mount_of(path: str, mountinfo: str | None = None) -> Mount:
    """Return the mount that holds ``path``, which need not exist. ``mountinfo`` replaces the
    content of ``/proc/self/mountinfo``."""
    if mountinfo is None:
        try:
            # Unbuffered, because a save waits for it.
            with open("/proc/self/mountinfo", "rb", buffering=0) as file:
                mountinfo = file.read().decode(errors="surrogateescape")
        except OSError:  # without /proc the mount is unknown; callers treat it as a hint
            return Mount()
    path = os.path.realpath(path)
    found = Mount()
    depth = -1
    for mount in _mounts(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # A later mount on the same folder covers an earlier one.
        if inside and len(mount.point) >= depth:
            found = mount
            depth = len(mount.point)
    return found


@lru_cache(maxsize=1)
def _mounts(mountinfo: str) -> tuple[Mount, ...]:
    """Parse all mounts. Cached while the table is unchanged, because each save asks twice while
    training waits."""
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, source, options = map(_unescaped, tail.split(" ", 2))
        _, _, device, _, point, *_ = head.split(" ")
        found.append(Mount(kind, source, _unescaped(point), device, options))
    return tuple(found)


def is_shared(fs_type: str) -> bool:
    """Return whether other hosts may see a file system of this type. Unknown types count as shared:
    it is worse to sweep another host's live upload than to keep a dead one for a while."""
    return fs_type not in _LOCAL


def may_be_stale(fs_type: str) -> bool:
    """Return whether attributes of open files may be outdated because other hosts change them."""
    return is_shared(fs_type) and fs_type not in _COHERENT


def can_clone(fs_type: str) -> bool:
    """Return whether files of a file system of this type can share blocks."""
    return fs_type in _CLONING


def can_copy(mount: Mount) -> bool:
    """Return whether ranges of files can be copied without passing through this host's memory."""
    if mount.fs_type == "nfs4":
        return "vers=4.2" in mount.options.split(",")
    return can_clone(mount.fs_type)


def can_link(fs_type: str) -> bool:
    """Return whether a file of a file system of this type can have several names."""
    return fs_type not in _WITHOUT_LINKS


def _unescaped(field: str) -> str:
    if "\\" not in field:
        return field
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
