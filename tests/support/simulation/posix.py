"""A simulated file system that tracks both the visible state and the durable state.

An fsync of a folder makes its names durable, an fsync of a file its bytes. After a power cut, any
combination of the other changes may be on disk: a rename without its data, a later name without an
earlier one, half of a write. A failed fsync marks its pages clean and loses them: the next fsync
succeeds and saves nothing. The real local driver runs on this through :class:`SimOs`, which
replaces the module ``os``.

Scope: regular files and folders, one file system, hard links only, no permissions.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .loop import PROCESS, Crashed, Process

SECTOR_NBYTES = 512
Choose = Callable[[int], int]
"""A function that picks a number below its argument."""


@dataclass(eq=False)
class Inode:
    """A regular file."""

    number: int
    mtime_s: float
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last fsync."""
    spoiled: bool = False
    """True after a failed fsync: earlier writes are lost, even if a later fsync succeeds."""
    links: int = 0
    lock: Any = None

    def sync(self) -> None:
        """Make the bytes durable, as fsync does."""
        if not self.spoiled:
            self.synced = bytes(self.data)
        self.pending.clear()

    def fail_sync(self) -> None:
        """Fail an fsync: mark the pages clean although they are lost."""
        self.spoiled = self.spoiled or bool(self.pending)
        self.pending.clear()

    def survive(self, choose: Choose) -> None:
        """Lose pending writes at random, as a power cut does."""
        kept = bytearray(self.synced)
        mode = choose(3)
        for start, data in self.pending:
            n = (0, len(data), choose(len(data) // SECTOR_NBYTES + 1) * SECTOR_NBYTES)[
                mode if mode < 2 else choose(3)
            ]
            if n:
                kept.extend(bytes(max(0, start + n - len(kept))))
                kept[start : start + n] = data[:n]
        self.data, self.synced = kept, bytes(kept)
        self.pending.clear()
        self.spoiled, self.lock = False, None


@dataclass(eq=False)
class Folder:
    """A folder. ``durable``: the names on disk; ``pending``: atomic changes of names since then."""

    number: int
    entries: dict[str, Inode | Folder] = field(default_factory=dict)
    durable: dict[str, Inode | Folder] = field(default_factory=dict)
    pending: list[tuple[tuple[str, Inode | Folder | None], ...]] = field(default_factory=list)
    links: int = 2

    def change(self, *names: tuple[str, Inode | Folder | None]) -> None:
        """Add names, or remove them (None), as one atomic change."""
        for name, node in names:
            _put(self.entries, name, node)
        self.pending.append(names)

    def sync(self) -> None:
        """Make the names durable, as fsync does."""
        self.durable = dict(self.entries)
        self.pending.clear()

    def survive(self, choose: Choose) -> None:
        """Lose pending changes as a power cut does: all, none, a suffix or a random set."""
        mode, kept = choose(4), dict(self.durable)
        cut = choose(len(self.pending) + 1)
        for i, names in enumerate(self.pending):
            if mode == 1 or (mode == 2 and i < cut) or (mode == 3 and choose(2)):
                for name, node in names:
                    _put(kept, name, node)
        self.entries, self.durable = kept, dict(kept)
        self.pending.clear()


def _put(names: dict[str, Inode | Folder], name: str, node: Inode | Folder | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class FileSystem:
    """The tree of folders and files.

    ``syscall(name, key)`` is called before each system call, and may raise; ``changed(key)`` after
    a change of names; ``copied(key)`` when bytes of a file are copied to another,
    or another checkpoint gets a link to it.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        syscall: Callable[[str, str], None],
        changed: Callable[[str], None],
        copied: Callable[[str], None],
    ) -> None:
        self.now_s, self.syscall, self.changed, self.copied = now_s, syscall, changed, copied
        self.root = Folder(1)
        self.numbers = 1
        self.fds: dict[int, _Fd] = {}
        self.next_fd = 3

    def number(self) -> int:
        """Return a new inode number."""
        self.numbers += 1
        return self.numbers

    def walk(self, folder: Folder | None = None, prefix: str = "") -> Iterator[tuple[str, Inode]]:
        """Yield every file with its path."""
        for name, node in (folder or self.root).entries.items():
            if isinstance(node, Folder):
                yield from self.walk(node, f"{prefix}{name}/")
            else:
                yield prefix + name, node

    def find(self, path: str) -> Inode | Folder | None:
        """Return the file or folder at this path."""
        node: Inode | Folder | None = self.root
        for name in filter(None, path.split("/")):
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    def take_over(self, other: FileSystem) -> None:
        """Copy the state of ``other`` for new processes, without open files and locks."""
        copies: dict[Inode | Folder, Inode | Folder] = {}
        self.root, self.numbers = _copied(other.root, copies), other.numbers

    def power_cut(self, choose: Choose) -> None:
        """Keep durable data, and a random part of the rest."""
        self.fds.clear()
        folders, seen = [self.root], set[Inode]()
        for folder in folders:  # the list grows during the loop
            folder.survive(choose)
            folder.links = 2
            for node in folder.entries.values():
                if isinstance(node, Folder):
                    folders.append(node)
                elif node not in seen:
                    seen.add(node)
                    node.survive(choose)
        for inode in seen:
            inode.links = sum(
                node is inode for folder in folders for node in folder.entries.values()
            )


N = TypeVar("N", Inode, Folder, Inode | Folder)


def _copied(node: N, copies: dict[Inode | Folder, Inode | Folder]) -> N:
    """Return a deep copy of ``node`` that preserves hard links."""
    if node in copies:
        return copies[node]  # type: ignore[return-value]
    if isinstance(node, Inode):
        copies[node] = copy = Inode(
            node.number,
            node.mtime_s,
            bytearray(node.data),
            node.synced,
            list(node.pending),
            node.spoiled,
            node.links,
        )
        return copy
    copies[node] = folder = Folder(node.number, links=node.links)

    def names(of: dict[str, Inode | Folder]) -> dict[str, Inode | Folder]:
        return {name: copies.get(each) or _copied(each, copies) for name, each in of.items()}

    folder.entries, folder.durable = names(node.entries), names(node.durable)
    folder.pending = [
        tuple((name, None if each is None else _copied(each, copies)) for name, each in change)
        for change in node.pending
    ]
    return folder


class _Fd:
    __slots__ = ("node", "owner", "path")

    def __init__(self, node: Inode | Folder, owner: Process | None, path: str) -> None:
        self.node, self.owner, self.path = node, owner, path


class _Status:
    __slots__ = ("st_dev", "st_ino", "st_mode", "st_mtime", "st_nlink", "st_size")

    def __init__(self, node: Inode | Folder) -> None:
        self.st_ino, self.st_dev = node.number, 1
        self.st_nlink = node.links
        if isinstance(node, Folder):
            self.st_mode, self.st_size, self.st_mtime = stat.S_IFDIR | 0o777, 0, 0.0
        else:
            self.st_mode, self.st_size, self.st_mtime = (
                stat.S_IFREG | 0o666,
                len(node.data),
                node.mtime_s,
            )


class _Entry:
    def __init__(self, name: str, node: Inode | Folder) -> None:
        self.name, self._node = name, node

    def stat(self, *, follow_symlinks: bool = True) -> _Status:
        return _Status(self._node)


_CREAT, _DIRECTORY, _EXCL = int(os.O_CREAT), int(os.O_DIRECTORY), int(os.O_EXCL)
_FLAGS = {name: value for name, value in vars(os).items() if name.startswith("O_")}


class SimOs:
    """The subset of ``os`` that the local driver uses."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        vars(self).update(_FLAGS)
        self.path, self.strerror, self.fspath, self.fsencode = (
            os.path,
            os.strerror,
            os.fspath,
            os.fsencode,
        )
        self.PathLike = os.PathLike

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name, where = self._at(path, dir_fd)
        creates = flags & _CREAT
        self._fs.syscall("creat" if creates else "open", where)
        node = folder if name == "." else folder.entries.get(name)
        if node is None:
            if not creates:
                raise _error(errno.ENOENT, name)
            if not folder.links:
                raise _error(errno.ENOENT, name)
            node = Inode(self._fs.number(), self._fs.now_s(), links=1)
            folder.change((name, node))
            self._fs.changed(where)
        elif creates and flags & _EXCL:
            raise _error(errno.EEXIST, name)
        if flags & _DIRECTORY and not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, name)
        fs = self._fs
        fs.next_fd += 1
        fs.fds[fs.next_fd] = _Fd(node, PROCESS.get(), where)
        return fs.next_fd

    def close(self, fd: int) -> None:
        opened = self._fs.fds.pop(fd, None)
        if opened is not None and isinstance(opened.node, Inode) and opened.node.lock is opened:
            opened.node.lock = None

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        folder, name, where = self._at(path, dir_fd)
        self._fs.syscall("mkdir", where)
        if name in folder.entries:
            raise _error(errno.EEXIST, name)
        if not folder.links:
            raise _error(errno.ENOENT, name)
        folder.change((name, Folder(self._fs.number())))

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        folder, name, where = self._at(path, dir_fd)
        self._fs.syscall("rmdir", where)
        node = self._there(folder, name)
        if not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, name)
        if node.entries:
            raise _error(errno.ENOTEMPTY, name)
        node.links = 0
        folder.change((name, None))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        folder, name, where = self._at(path, dir_fd)
        self._fs.syscall("unlink", where)
        node = self._there(folder, name)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, name)
        node.links -= 1
        folder.change((name, None))
        self._fs.changed(where)

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        folder, name, _ = self._at(src, src_dir_fd)
        _, new, where = self._at(dst, dst_dir_fd)
        self._fs.syscall("rename", where)
        node, old = self._there(folder, name), folder.entries.get(new)
        if old is not None:
            old.links -= 1
        folder.change((name, None), (new, node))
        self._fs.changed(where)

    def link(
        self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool = True
    ) -> None:
        above, name, source = self._at(src, src_dir_fd)
        folder, new, where = self._at(dst, dst_dir_fd)
        self._fs.syscall("link", where)
        node = self._there(above, name)
        if "/lent/" in where:
            self._fs.copied(source)
        if new in folder.entries:
            raise _error(errno.EEXIST, new)
        node.links += 1
        folder.change((new, node))
        self._fs.changed(where)

    def fsync(self, fd: int) -> None:
        opened = self._opened(fd)
        try:
            self._fs.syscall(
                "fsync" if isinstance(opened.node, Inode) else "fsync folder", opened.path
            )
        except OSError:
            if isinstance(opened.node, Inode):
                opened.node.fail_sync()
            raise
        opened.node.sync()

    def pwrite(self, fd: int, data: Any, start: int) -> int:
        opened = self._opened(fd)
        self._fs.syscall("pwrite", opened.path)
        return self._written(opened, bytes(data), start)

    def copy_file_range(
        self, src: int, dst: int, count: int, offset_src: int, offset_dst: int
    ) -> int:
        source, opened = self._opened(src), self._opened(dst)
        self._fs.syscall("copy", opened.path)
        assert isinstance(source.node, Inode)
        self._fs.copied(source.path)
        content = bytes(source.node.data[offset_src : offset_src + count])
        return self._written(opened, content, offset_dst)

    def _written(self, opened: _Fd, content: bytes, start: int) -> int:
        inode = opened.node
        assert isinstance(inode, Inode)
        stop = start + len(content)
        if stop > len(inode.data):
            inode.data.extend(bytes(stop - len(inode.data)))
        inode.data[start:stop] = content
        inode.pending.append((start, content))
        inode.mtime_s = self._fs.now_s()
        return len(content)

    def preadv(self, fd: int, buffers: list[Any], start: int) -> int:
        opened = self._opened(fd)
        self._fs.syscall("pread", opened.path)
        (into,) = buffers
        assert isinstance(opened.node, Inode)
        n = max(0, min(len(into), len(opened.node.data) - start))
        into[:n] = memoryview(opened.node.data)[start : start + n]
        return n

    def fstat(self, fd: int) -> _Status:
        return _Status(self._opened(fd).node)

    def stat(self, path: str, *, dir_fd: int, follow_symlinks: bool = True) -> _Status:
        folder, name, where = self._at(path, dir_fd)
        self._fs.syscall("stat", where)
        return _Status(self._there(folder, name))

    @contextmanager
    def scandir(self, fd: int) -> Iterator[list[_Entry]]:
        opened = self._opened(fd)
        self._fs.syscall("scandir", opened.path)
        assert isinstance(opened.node, Folder)
        yield [_Entry(name, node) for name, node in opened.node.entries.items()]

    def _opened(self, fd: int) -> _Fd:
        try:
            return self._fs.fds[fd]
        except KeyError:
            process = PROCESS.get()
            if process is not None and not process.alive:
                raise Crashed from None
            raise _error(errno.EBADF, str(fd)) from None

    def _at(self, path: str, dir_fd: int | None) -> tuple[Folder, str, str]:
        """Return the folder, the name in it and the whole path; a missing folder is ENOENT."""
        above, _, name = path.rpartition("/")
        if dir_fd is None:
            folder, where = self._fs.find(above), path
        else:
            opened = self._opened(dir_fd)
            folder, where = opened.node, f"{opened.path}/{name}" if name != "." else opened.path
        if not isinstance(folder, Folder):
            raise _error(errno.ENOENT, path)
        return folder, name or ".", where

    @staticmethod
    def _there(folder: Folder, name: str) -> Inode | Folder:
        try:
            return folder.entries[name]
        except KeyError:
            raise _error(errno.ENOENT, name) from None


class SimFcntl:
    """A stand-in for ``fcntl``, with locks that end with their descriptor or process."""

    LOCK_EX, LOCK_NB = 2, 4

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def flock(self, fd: int, operation: int) -> None:
        opened = self._fs.fds[fd]
        inode = opened.node
        assert isinstance(inode, Inode)
        if inode.lock is not None and inode.lock is not opened and _lives(inode.lock.owner):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        inode.lock = opened


class SimFileIO:
    """A stand-in for ``io`` that reads whole files."""

    def __init__(self, sim: SimOs) -> None:
        self._os = sim

    @contextmanager
    def FileIO(self, fd: int) -> Iterator[_Whole]:
        try:
            yield _Whole(self._os, fd)
        finally:
            self._os.close(fd)


class _Whole:
    def __init__(self, sim: SimOs, fd: int) -> None:
        self._os, self._fd = sim, fd

    def readall(self) -> bytes:
        opened = self._os._opened(self._fd)
        self._os._fs.syscall("pread", opened.path)
        assert isinstance(opened.node, Inode)
        return bytes(opened.node.data)


def _lives(process: Process | None) -> bool:
    return process is None or process.alive


def _error(code: int, name: str) -> OSError:
    return OSError(code, _said(code), name)


_said = functools.cache(os.strerror)
