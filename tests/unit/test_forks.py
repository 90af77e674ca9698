"""Test forks at any moment of a save, and of ranks: children have free locks and an engine."""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import difference, fresh_uri, saved
from support.commands import finished
from support.drivers import Halting
from support.forked import in_a_fork
from support.given import Serve
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.core.forks import renewal
from holdfast.core.forks.cached import cached_property
from holdfast.storage.runtime.engine import start

pytestmark = [
    pytest.mark.clocked,
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded.*:DeprecationWarning"
    ),  # of Python 3.12 and newer
]

STATE = {"w": torch.arange(1000.0), "step": 3}


def save_and_load() -> None:
    """Save in each way, and load."""
    uri = fresh_uri()
    handle = holdfast.async_save(uri, STATE, lazy=True)
    holdfast.fence()
    handle.wait(20)
    holdfast.save(uri, STATE)
    assert difference(holdfast.load(uri), STATE) is None
    into = {"w": torch.zeros(1000), "step": 0}
    holdfast.load(uri, into=into)
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.read("w").sum() == STATE["w"].sum()
    holdfast.release_memory()


def run(code: str, *args: object) -> str:
    """Run ``code`` in a new interpreter; return its complaints, "" if none."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    done = finished(command, timeout_s=100, cwd="/")
    return done.stderr or str(done.returncode or "")


@contextlib.contextmanager
def beside(work: Any) -> Iterator[None]:
    """Run the block while another thread is within the context manager that ``work`` returns."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with work():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(20)
        yield
    finally:
        leave.set()
        thread.join()


def test_child_finds_every_lock_free() -> None:
    """Another thread holds every lock at the fork; the child still saves, loads and reads."""
    save_and_load()
    opened = holdfast.open(saved(STATE))
    locks = [
        lock for reference in list(renewal._locks.values()) if (lock := reference()) is not None
    ]
    assert len(locks) > 8  # at least the locks of modules

    @contextlib.contextmanager
    def all_locks() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                assert lock.acquire(timeout=20)
                stack.callback(lock.release)
            yield

    def use() -> None:
        save_and_load()
        assert opened.read("w").sum() == STATE["w"].sum()

    with opened:
        with beside(all_locks):
            assert in_a_fork(use) == ""
        use()


def test_fork_waits_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork waits for imports of other threads, whose locks no child could release."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(
        "import time\nbegun = time.sleep(0.5)\nloaded = True\n"
    )
    importing = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    importing.start()
    while "slow_to_import" not in sys.modules:
        time.sleep(0.001)

    def use() -> None:
        assert importlib.import_module("slow_to_import").loaded

    assert in_a_fork(use) == ""
    importing.join()


def test_fork_does_not_wait_for_ever_for_an_import(tmp_path: Path) -> None:
    """A fork proceeds if an import waits for the forking thread."""
    (tmp_path / "never_imported.py").write_text(
        "import threading\ngo_on = threading.Event()\ngo_on.wait(60)\n"
    )
    code = """
        import importlib, os, sys, threading, time
        import holdfast
        from holdfast.core.forks import renewal
        sys.path.insert(0, sys.argv[1])
        renewal.IMPORTS_S = 0.2
        importing = threading.Thread(target=importlib.import_module, args=("never_imported",))
        importing.start()
        while not hasattr(sys.modules.get("never_imported"), "go_on"):
            time.sleep(0.001)
        began_s = time.monotonic()
        child = os.fork()
        if child == 0:
            import colorsys
            os._exit(0)
        took_s = time.monotonic() - began_s
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert 0.2 <= took_s < 20
        sys.modules["never_imported"].go_on.set()
    """
    assert run(code, tmp_path) == ""


def test_cached_property_works_in_a_child() -> None:
    """Another thread computes the property of another object at the fork."""

    class Sized:
        def __init__(self, ready: threading.Event, begun: threading.Event) -> None:
            self.ready, self.begun, self.computed = ready, begun, 0

        @cached_property
        def size(self) -> int:
            self.begun.set()
            assert self.ready.wait(60)
            self.computed += 1
            return 3

    ready, begun, over = threading.Event(), threading.Event(), threading.Event()
    over.set()
    slow = Sized(ready, begun)
    computing = threading.Thread(target=lambda: slow.size)
    computing.start()
    assert begun.wait(20)
    assert in_a_fork(lambda: Sized(over, threading.Event()).size) == ""
    ready.set()
    computing.join()
    quick = Sized(over, threading.Event())
    assert (quick.size, quick.size, quick.computed) == (3, 3, 1)


def test_child_cannot_wait_for_a_save_of_its_parent(serve: Serve) -> None:
    """Waiting for a parent's save is an error, unless the save has ended."""
    ended = holdfast.async_save(fresh_uri(), STATE)
    ended.wait(20)
    storage = Halting(serve, "create")
    pending = holdfast.async_save(storage.uri, STATE)

    def ask() -> None:
        assert ended.done()
        ended.wait(5)
        for question in (pending.wait, pending.done, pending.durable.wait):
            with pytest.raises(holdfast.UsageError, match="running in the parent process"):
                question()

        async def awaits() -> None:
            await pending

        with pytest.raises(holdfast.UsageError, match="running in the parent process"):
            start(awaits()).result(5)

    assert in_a_fork(ask) == ""
    storage.go.set()
    pending.wait(20)


def test_child_cannot_use_its_parents_checkpointer(tmp_path: Path) -> None:
    """A child may only close its parent's Checkpointer, which does nothing."""
    checkpointer = holdfast.Checkpointer(tmp_path, every=1)

    def use() -> None:
        for call in (
            lambda: checkpointer.step(1, STATE),
            lambda: checkpointer.save(1, STATE),
            lambda: checkpointer.resume(STATE),
        ):
            with pytest.raises(holdfast.UsageError, match="belongs to the parent"):
                call()
        checkpointer.close()

    handle = checkpointer.step(1, STATE)
    assert in_a_fork(use) == ""
    checkpointer.close()
    assert handle is not None
    assert handle.done()


@pytest.mark.nightly(6)
def test_parent_survives_the_clean_up_of_a_child(tmp_path: Path) -> None:
    """A child reads its parent's checkpoint and exits normally; the parent's engine still works."""
    code = """
        import gc, os, sys, torch, holdfast
        folder = sys.argv[1]
        state = {"x": torch.ones(1000)}
        holdfast.save(folder + "/a", state)
        opened = holdfast.open(folder + "/a")
        child = os.fork()
        if child == 0:
            holdfast.save(folder + "/b", state)
            assert opened.read("x").sum() == 1000
            opened.close()
            del opened
            gc.collect()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert opened.read("x").sum() == 1000
        opened.close()
        holdfast.async_save(folder + "/c", state).wait(20)
    """
    assert run(code, tmp_path) == ""


@pytest.fixture
def uri() -> str:
    """Save a checkpoint; return its URI."""
    uri = saved(STATE)
    return uri


@pytest.fixture
def group(uri: str) -> Iterator[dist.Store]:
    """Make this process rank 1 of a job of two; return its store, which nobody else uses."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=1, world_size=2)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def calls(uri: str) -> list[Callable[[], Any]]:
    """Return the collective calls of a job."""
    return [
        lambda: holdfast.save(uri, STATE, deadline_s=5),
        lambda: holdfast.async_save(uri, STATE, deadline_s=5).wait(20),
        lambda: holdfast.load(uri, into={"w": torch.zeros(1000), "step": 0}, deadline_s=5),
        lambda: holdfast.Checkpointer(uri, deadline_s=5).resume({"w": torch.zeros(1000)}),
    ]


@pytest.mark.parametrize("number", range(4), ids=["save", "async_save", "load into", "resume"])
def test_a_child_is_refused_what_all_ranks_do_together(
    number: int, uri: str, group: dist.Store
) -> None:
    """A child is refused before it contacts any other rank."""
    keys = group.num_keys()

    def child() -> None:
        with pytest.raises(
            holdfast.UsageError, match="not rank 1 but was forked from it"
        ) as raised:
            calls(uri)[number]()
        assert "holdfast.open" in str(raised.value)
        assert group.num_keys() == keys

    assert in_a_fork(child) == ""


def test_a_child_reads_checkpoints_by_itself(uri: str, group: dist.Store) -> None:
    """It opens a checkpoint, and loads a whole one."""

    def child() -> None:
        assert difference(holdfast.load(uri), STATE) is None
        with holdfast.open(uri) as checkpoint:
            assert checkpoint.read("w").sum() == STATE["w"].sum()
            assert checkpoint.verify().ok

    assert in_a_fork(child) == ""


def test_a_child_that_leaves_the_group_is_a_process_of_its_own(uri: str, group: dist.Store) -> None:
    """It saves and loads as any process that is alone; it may also join a group of its own."""

    def child() -> None:
        dist.destroy_process_group()
        holdfast.save(uri, STATE)
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        holdfast.load(uri, into={"w": torch.zeros(1000), "step": 0})

    assert in_a_fork(child) == ""


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of a checkpoint, read by a worker, which may also save."""

    def __init__(self, uri: str, saves: bool) -> None:
        self.uri, self.saves = uri, saves

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Any:
        if self.saves:
            holdfast.save(self.uri, STATE, deadline_s=5)
        with holdfast.open(self.uri) as checkpoint:
            return checkpoint.read("w")[row]


@pytest.mark.parametrize("saves", [False, True])
def test_a_worker_of_a_data_loader_reads_and_does_not_save(
    saves: bool, uri: str, group: dist.Store
) -> None:
    """This holds while its parent is a rank."""
    rows = DataLoader(
        Rows(uri, saves), num_workers=1, batch_size=None, multiprocessing_context="fork", timeout=30
    )
    if saves:
        with pytest.raises(holdfast.UsageError, match="forked"):
            list(rows)
    else:
        assert [float(row) for row in rows] == [0.0, 1.0]
