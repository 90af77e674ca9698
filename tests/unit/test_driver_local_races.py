"""Test files that another user replaces by links, pipes and devices, also during reads."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.tree import Tree
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.runtime.engine import start

pytestmark = pytest.mark.clocked

RACE_S = 2.0
WAIT_S = 20.0
STATE = {"w": torch.arange(50_000.0), "step": 3}
IN_OPEN = 0x20
EVENT = struct.Struct("iIII")
"""Header of an inotify event; the name follows."""


class Watch:
    """Tells what anybody has opened in a folder."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_OPEN) >= 0

    def opened(self) -> list[str]:
        """Return the names opened since the last call; "" is the folder itself."""
        assert os.readlink(f"/proc/self/fd/{self.fd}") == "anon_inode:inotify"
        try:
            events = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        names = []
        while events:
            _, _, _, nbytes = EVENT.unpack_from(events)
            names.append(os.fsdecode(events[EVENT.size : EVENT.size + nbytes].rstrip(b"\0")))
            events = events[EVENT.size + nbytes :]
        return names


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[tuple[Path, Watch]]:
    """Yield a folder outside the root, and a watch of the files opened in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"secret")
    watch = Watch(folder)
    assert watch.opened() == []
    (folder / "file").read_bytes()
    assert watch.opened() == ["file"]
    yield folder, watch
    os.close(watch.fd)


def impostors(outside: Path) -> dict[str, Callable[[Path], None]]:
    """Return functions that put something else in the place of a file."""

    def device(path: Path) -> None:
        if os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
        else:
            path.symlink_to("/dev/zero")

    def truncated(path: Path) -> None:
        path.write_bytes(b"\0" * 100)

    return {
        "link out of the root": lambda path: path.symlink_to(outside / name_of(path)),
        "relative link out of it": lambda path: path.symlink_to(
            os.path.relpath(outside / name_of(path), path.parent)
        ),
        "named pipe": os.mkfifo,
        "folder": lambda path: path.mkdir(),
        "device": device,
        "short file": truncated,
        "nothing": lambda path: None,
    }


def saved(tmp_path: Path, outside: Path) -> tuple[Path, list[Path]]:
    """Return a checkpoint and its files, with whole copies of them outside the root."""
    root = tmp_path / "root"
    holdfast.save(root, STATE)
    files = [root / MANIFEST_KEY, next(root.rglob("0.safetensors"))]
    for file in files:
        shutil.copy(file, outside / file.name)
    return root, files


def name_of(beside: Path) -> str:
    """Return the original's name, given the path of its replacement."""
    return beside.name.removeprefix(".").removesuffix(".other")


def put_in_place(make: Callable[[Path], None], file: Path) -> None:
    """Exchange a file for an impostor, as an attacker would.

    Prepare it in the same folder, and rename it where possible.
    """
    beside = file.with_name("." + file.name + ".other")
    make(beside)
    if beside.is_dir() and not beside.is_symlink():
        file.unlink(missing_ok=True)
    if beside.is_symlink() or beside.exists():
        os.rename(beside, file)
    else:
        file.unlink(missing_ok=True)


def put_back(file: Path, outside: Path) -> None:
    """The file as it was, as a new one."""
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    beside = file.with_name("." + file.name + ".whole")
    shutil.copyfile(outside / file.name, beside)
    os.rename(beside, file)


def within(work: Callable[[], None]) -> None:
    """Do it on a thread of its own; fail where it does not come back."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except holdfast.HoldfastError as error:
            str(error)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"
    if failures:
        raise failures[0]


def readers(root: Path, copies: Iterator[int]) -> list[Callable[[], None]]:
    """Return all operations that read a checkpoint; each checks the values it reads."""

    def load() -> None:
        assert torch.equal(holdfast.load(root)["w"], STATE["w"])

    def rows() -> None:
        with holdfast.open(root) as c:
            assert c.read("w", 49_999).item() == 49_999
            c.verify()

    def copy() -> None:
        target = root.parent / f"copy-{next(copies)}"
        holdfast.copy(root, target)
        assert torch.equal(holdfast.load(target)["w"], STATE["w"])
        shutil.rmtree(target)

    return [load, rows, copy, lambda: holdfast.list_checkpoints(root) and None]


@pytest.mark.parametrize("which", [0, 1], ids=["manifest", "image"])
def test_an_impostor_is_neither_followed_nor_waited_for(
    tmp_path: Path, outside: tuple[Path, Watch], which: int
) -> None:
    """Each kind, in the place of each file, before every reader."""
    folder, watch = outside
    root, files = saved(tmp_path, folder)
    for make in impostors(folder).values():
        put_in_place(make, files[which])
        watch.opened()
        for read in readers(root, itertools.count()):
            within(read)
        assert watch.opened() == []
        put_back(files[which], folder)
    assert torch.equal(holdfast.load(root)["w"], STATE["w"])


def test_files_that_are_exchanged_while_they_are_read_are_not_followed(
    tmp_path: Path, outside: tuple[Path, Watch], rng: np.random.Generator
) -> None:
    """Files that are replaced again and again during reads are never followed out of the root.

    Every read returns the saved values or raises one of our errors, and none hangs.
    """
    folder, watch = outside
    root, files = saved(tmp_path, folder)
    kinds, stop, rounds = list(impostors(folder).values()), threading.Event(), itertools.count()
    copies = tmp_path / "whole"
    shutil.copytree(folder, copies)

    def exchange() -> None:
        while not stop.is_set():
            file = files[int(rng.integers(2))]
            put_in_place(kinds[int(rng.integers(len(kinds)))], file)
            time.sleep(float(rng.random()) * 0.002)
            put_back(file, copies)
            next(rounds)

    attacker = threading.Thread(target=exchange)
    watch.opened()
    attacker.start()
    try:
        until = time.monotonic() + RACE_S
        numbers = itertools.count()
        while time.monotonic() < until:
            for read in readers(root, numbers):
                within(read)
    finally:
        stop.set()
        attacker.join()
    assert next(rounds) > 10
    assert watch.opened() == []
    assert torch.equal(holdfast.load(root)["w"], STATE["w"])


def test_a_pipe_that_comes_between_two_opens_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is opened once plainly and once for direct access; in between somebody puts a named
    pipe in its place."""
    (tmp_path / "o").write_bytes(bytes(1 << 20))
    plainly = Tree.open_object

    def then_a_pipe(tree: Tree, key: str) -> tuple[int, int]:
        opened = plainly(tree, key)
        os.unlink(tmp_path / "o")
        os.mkfifo(tmp_path / "o")
        return opened

    monkeypatch.setattr(Tree, "open_object", then_a_pipe)
    driver, into = LocalDriver(tmp_path), memoryview(bytearray(b"x" * (1 << 20)))
    within(lambda: start(driver.read("o", 0, into)).result())
    assert bytes(into) == bytes(1 << 20)
    start(driver.close()).result()
