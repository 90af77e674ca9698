"""Files of the local driver: one that is being written, and those that are being read. All functions block."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .contract import Buffer
from .local_io import DIRECT_MIN_NBYTES, OpenFile, open_direct, write_at
from .local_tree import Tree, split, sync_folder, temporary_name

__all__ = ["NewFile", "OpenFiles", "open_for_reading"]

_log = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class NewFile:
    """An object being written under a temporary name, until :meth:`publish` gives it its own. Methods raise OSError."""

    def __init__(self, tree: Tree, key: str, nbytes: int, *, direct: str) -> None:
        """``direct``: "auto", "on" (a file system that refuses O_DIRECT is an error) or "off". Touches nothing yet."""
        self._tree, self._nbytes, self._direct = tree, nbytes, direct
        self._above, self._name = split(key)
        self._temporary = temporary_name(self._name)
        self._file: OpenFile | None = None
        self._folder = -1
        self._lock = threading.Lock()

    def open(self, *, exclusive: bool = False) -> None:
        """Create the temporary file, and the folders above it. ``exclusive``: EEXIST where the key is taken."""
        self._folder = self._tree.open_folder(self._above, make=True)
        try:
            self._check_target(exclusive)
            self._file = self._create()
        except BaseException:
            self.drop()
            raise

    def write(self, start: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``start``."""
        with self._opened() as file:
            write_at(file, start, data)

    def publish(self, *, exclusive: bool = False) -> None:
        """Make content and name durable, in this order. What fails, be it the fsync, is dropped and cannot be repeated:
        after a failed fsync the kernel may call lost pages clean, and the next fsync a success."""
        with self._opened() as file:
            try:
                os.fsync(file.plain)
                named_new = self._give_name(exclusive)
                self._sync_name(named_new)
            finally:
                self.drop()

    def drop(self) -> None:
        """Remove the temporary file, if it still has that name. Safe to call at any time, and again; raises nothing."""
        with self._lock:
            folder, self._folder = self._folder, -1
            file, self._file = self._file, None
        if folder < 0:
            return
        try:
            os.unlink(self._temporary, dir_fd=folder)
        except FileNotFoundError:
            pass  # published, or never made
        except OSError as error:
            _log.warning("temporary file %s is left behind: %s", self._temporary, error)
        os.close(folder)
        if file is not None:
            file.close()
