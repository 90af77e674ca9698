"""Creating files with a Lustre layout, and reading layouts back. All functions block."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.forks.renewal import new_lock
from ...errors import StorageError
from ..local.files import create_file
from ..mounts import mount_of
from .layout import ALL_OSTS, STRIPE_NBYTES, Layout, choose, decode, encode

STRIPED_MIN_NBYTES = 1 << 20
"""Smaller files keep the folder's default: one stripe is enough, and it may be stored with the
metadata."""
OST_COUNT_UNKNOWN = 4
"""Assumed number of OSTs if it cannot be determined."""

_LOV = "lustre.lov"
# O_LOV_DELAY_CREATE is encoded as O_NOCTTY | O_ASYNC: create no objects until the layout is set or
# the first byte is written.
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NOCTTY | os.O_ASYNC
_NO_LAYOUTS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.EACCES)
_LFS_TIMEOUT_S = 30.0
_PARAMETERS = (Path("/sys/fs/lustre"), Path("/proc/fs/lustre"))

_log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """Properties of a whole file system: the number of OSTs, and the layout of folders without
    their own."""

    ost_count: int
    default: Layout = Layout()


class Striper:
    """Creates the files of one root with a layout. Thread-safe.

    ``stripe_count`` and ``stripe_nbytes`` are the requested values, or None to choose. If both are
    None and a folder has a composite default, its files keep that. A chosen layout that does not
    take effect is logged once; a requested layout that is refused is an error.
    """

    def __init__(
        self,
        uri: str,
        *,
        stripe_count: int | None,
        stripe_nbytes: int | None,
        writers: int | None,
        facts: Callable[[], Facts],
    ) -> None:
        """Take a redacted ``uri`` for messages. ``facts`` is called once, on first use."""
        self._uri = uri
        self._writers = writers
        self._find_facts = facts
        self._stripe_count = stripe_count
        self._stripe_nbytes = stripe_nbytes
        self._asked = stripe_count is not None or stripe_nbytes is not None
        self._lock = new_lock()
        self._facts: Facts | None = None
        self._logged: set[str] = set()

    def create(self, folder: int, name: str, nbytes: int) -> int:
        """Create a file, as a :data:`CreateFile`. Raises OSError; raises StorageError if a
        requested layout is refused."""
        wanted = None
        if nbytes >= STRIPED_MIN_NBYTES:
            wanted = self._wanted(folder, nbytes)
        if wanted is None:
            return create_file(folder, name, nbytes)
        fd = os.open(name, _CREATE, 0o666, dir_fd=folder)
        try:
            self._set(fd, folder, name, wanted)
            self._check(layout_of(fd), wanted)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise
        return fd

    def _wanted(self, folder: int, nbytes: int) -> Layout | None:
        """Return the layout for a file of ``nbytes``; None to keep the folder's default."""
        facts = self._found_facts()
        default = layout_of(folder) or facts.default
        if default.composite and not self._asked:
            return None
        count = self._stripe_count
        if count is None:
            count = choose(nbytes, ost_count=facts.ost_count, writers=self._writers)
        return Layout(count, self._stripe_nbytes or STRIPE_NBYTES, default.pool)

    def _found_facts(self) -> Facts:
        with self._lock:
            if self._facts is None:
                self._facts = self._find_facts()
            return self._facts

    def _set(self, fd: int, folder: int, name: str, wanted: Layout) -> None:
        try:
            os.setxattr(fd, _LOV, encode(wanted))
        except OSError as error:
            by_lfs = error.errno in _NO_LAYOUTS and _set_by_lfs(folder, name, wanted)
            if not by_lfs and self._asked:
                raise StorageError(
                    f"the requested layout, {wanted}, is refused: {error.strerror}",
                    uri=self._uri,
                    advice=(
                        "Leave out stripe_count and stripe_size, or check what `lfs setstripe` "
                        "accepts in this folder."
                    ),
                ) from error
            if not by_lfs:
                self._warn_once(
                    f"no layout can be set ({error.strerror}): files get the folder's default"
                )

    def _check(self, found: Layout | None, wanted: Layout) -> None:
        """Compare layouts, because Lustre silently ignores one that is set too late."""
        if found is None:
            return  # already reported by _set, or unreadable
        count = wanted.stripe_count
        if count == ALL_OSTS:
            count = found.stripe_count
        if found != dataclasses.replace(wanted, stripe_count=count):
            self._warn_once(
                f"a file has {found}, not {wanted}: it was ignored, or there are not that "
                f"many targets"
            )
        elif "layout" not in self._logged:
            self._logged.add("layout")
            _log.info("%s: a file was given %s", self._uri, found)

    def _warn_once(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.warning("%s: %s", self._uri, what)


def layout_of(fd: int) -> Layout | None:
    """Return the layout of a file or the default of a folder; None if it has none or cannot be
    read."""
    try:
        return decode(os.getxattr(fd, _LOV))
    except OSError as error:
        if error.errno in (errno.ENODATA, *_NO_LAYOUTS):
            return None
        raise


def facts_of(path: str, ost_count: int | None = None) -> Facts:
    """Return the facts of the file system that holds ``path``. With ``ost_count``, does not count
    targets."""
    fd = os.open(mount_of(path).point or "/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        default = layout_of(fd) or Layout()
    finally:
        os.close(fd)
    return Facts(ost_count or count_osts(path), default)


def count_osts(path: str, parameters: Sequence[Path] = _PARAMETERS) -> int:
    """Return the number of OSTs of the file system that holds ``path``: from the kernel, else `lfs
    df`, else a guess."""
    fs_name = mount_of(path).source.rpartition("/")[2]
    for folder in parameters:
        for file in folder.glob(f"lov/{fs_name or '*'}-clilov-*/activeobd"):
            text = file.read_text().strip()
            if text.isdecimal() and int(text) > 0:
                return int(text)
    return (_lfs("df", path) or "").count("[OST:") or OST_COUNT_UNKNOWN


def _set_by_lfs(folder: int, name: str, wanted: Layout) -> bool:
    pool = []
    if wanted.pool:
        pool = ["--pool", wanted.pool]
    count = str(wanted.stripe_count)
    size = str(wanted.stripe_nbytes)
    path = f"/proc/{os.getpid()}/fd/{folder}/{name}"
    return (
        _lfs("setstripe", "--stripe-count", count, "--stripe-size", size, *pool, path) is not None
    )


def _lfs(*arguments: str) -> str | None:
    lfs = shutil.which("lfs")
    if lfs is None:
        return None
    try:
        run = subprocess.run(
            [lfs, *arguments], capture_output=True, text=True, timeout=_LFS_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("lfs %s failed: %s", arguments[0], error)
        return None
    return run.stdout
