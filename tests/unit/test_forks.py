"""Test forks at any moment of a save: the child has free locks and its own engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.drivers import HookedDriver
from support.forked import in_a_fork
from support.given import Serve
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.core.forks import renewal
from holdfast.core.forks.cached import cached_property
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.runtime.engine import start

pytestmark = [
    pytest.mark.clocked,
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded.*:DeprecationWarning"
    ),  # of Python 3.12 and newer
]

STATE = {"w": torch.arange(1000.0), "step": 3}


def save_and_load() -> None:
    """What a child does, in each of the ways of a save."""
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
    """What a Python of its own has to complain of when it runs ``code``; "" if nothing."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd="/"
    )
    return done.stderr or str(done.returncode or "")


@contextlib.contextmanager
def beside(work: Any) -> Iterator[None]:
    """While a thread is within the context manager that ``work`` makes."""
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


def test_a_child_finds_every_lock_free() -> None:
    """Another thread holds every lock at the fork; the child still saves and loads."""
    save_and_load()
    locks = [
        lock for reference in list(renewal._locks.values()) if (lock := reference()) is not None
    ]
    assert len(locks) > 8  # those of modules, at least

    @contextlib.contextmanager
    def all_locks() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                assert lock.acquire(timeout=20)
                stack.callback(lock.release)
            yield

    with beside(all_locks):
        assert in_a_fork(save_and_load) == ""
    save_and_load()


def test_a_fork_waits_until_no_other_thread_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork waits for imports, whose locks the child could never release."""
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


def test_a_fork_does_not_wait_for_ever_for_an_import(tmp_path: Path) -> None:
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


def test_a_cached_property_is_computed_once_and_in_a_child_too() -> None:
    """Though another thread was computing that of another object when the child was forked."""

    class Sized:
        def __init__(self, ready: threading.Event, begun: threading.Event) -> None:
            self.ready, self.begun, self.computed = ready, begun, 0

        @cached_property
        def size(self) -> int:
            """How large it is."""
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
    assert Sized.size.__doc__ == "How large it is."


FORKS = """
import os, random, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch, holdfast
torch.set_num_threads(1)
folder, forks = sys.argv[1], int(sys.argv[2])
state = {"w": torch.ones(1 << 18), "many": {str(i): torch.ones(100) for i in range(30)}, "v": 1}
stop = threading.Event()
def saves(number):
    i = 0
    while not stop.is_set():
        holdfast.async_save(f"{folder}/parent{number}-{i % 3}", state, lazy=bool(i % 2)).wait(60)
        i += 1
threads = [threading.Thread(target=saves, args=(i,), daemon=True) for i in range(2)]
[t.start() for t in threads]
chance, bad = random.Random(int(sys.argv[3])), []
for i in range(forks):
    time.sleep(chance.random() * 0.03)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        mine = {"w": torch.full((1000,), float(i))}
        handle = holdfast.async_save(f"{folder}/child{i}", mine, lazy=True)
        holdfast.fence()
        handle.wait(15)
        os._exit(0 if torch.equal(holdfast.load(f"{folder}/child{i}")["w"], mine["w"]) else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code: bad.append((i, code))
stop.set()
[t.join() for t in threads]
holdfast.save(f"{folder}/last", state)
sys.exit(str(bad) if bad else 0)
"""


@pytest.mark.nightly(8)
def test_forks_at_random_moments_of_saves(tmp_path: Path, seed: int) -> None:
    """Every child saves and loads, even if forked while Holdfast is being imported."""
    assert run(FORKS, tmp_path, 25, seed) == ""


class Rows(Dataset[torch.Tensor]):
    """Rows of a tensor, read from a checkpoint that the trainer has opened."""

    def __init__(self, checkpoint: holdfast.Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.checkpoint.read("rows", rows=slice(row, row + 1))


def test_data_loaders_fork_workers_while_a_checkpointer_saves(tmp_path: Path) -> None:
    """Workers forked during lazy saves read the parent's checkpoint."""
    holdfast.save(tmp_path / "data", {"rows": torch.arange(32.0).reshape(8, 4)})
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    seen = torch.zeros(4)
    with (
        holdfast.open(tmp_path / "data") as data,
        holdfast.Checkpointer(
            tmp_path / "run", every=1, on_error="raise", when_busy="queue"
        ) as checkpointer,
    ):
        for step in range(1, 5):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            checkpointer.step(step, {"model": model, "optim": optimizer})
            loader = DataLoader(
                Rows(data), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=30
            )
            seen += sum(batch.sum(dim=(0, 1)) for batch in loader)
        assert torch.equal(data.read("rows").sum(dim=0) * 4, seen)
    assert checkpointer.counters.saved == 4


def test_a_child_is_told_that_a_save_is_its_parents(serve: Serve) -> None:
    """Waiting for a parent's save is an error; a finished one can be asked."""
    ended = holdfast.async_save(fresh_uri(), STATE)
    ended.wait(20)
    go_on = threading.Event()

    async def hold(operation: str, key: str) -> None:
        if operation == "create":
            assert await asyncio.to_thread(go_on.wait, 60)

    uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=hold))
    pending = holdfast.async_save(uri, STATE)

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
    go_on.set()
    pending.wait(20)


def test_a_checkpointer_is_of_the_process_that_made_it(tmp_path: Path) -> None:
    """A child cannot use its parent's Checkpointer, but may close it."""
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
def test_a_parent_goes_on_after_a_child_has_cleaned_up(tmp_path: Path) -> None:
    """A child that exits normally does not disturb its parent's engine."""
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
