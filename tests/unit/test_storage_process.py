"""Test the engine within its process: memory, exits, threads, signals and unclosed objects."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.bits import difference, fresh_uri, saved
from support.commands import finished
from support.inside import on_allocation, read_within
from support.tiny import BLOCK_NBYTES, CHUNK_NBYTES, rechunked

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.integrations.fsspec import HoldfastFileSystem
from holdfast.storage.pipeline import verifier
from holdfast.storage.pipeline.image_reader import ImageReader
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime.buffers import host_pool
from holdfast.storage.runtime.engine import run as run_on_engine
from holdfast.storage.runtime.engine import start

pytestmark = pytest.mark.clocked


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return finished(command, timeout_s=100, cwd="/")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the sizes of all buffers allocated from now on; drop the pooled ones."""
    holdfast.release_memory()
    sizes: list[int] = []
    on_allocation(monkeypatch, sizes.append)
    yield sizes
    holdfast.release_memory()


def test_memory_stays_within_the_budget(tmp_path: Path, made: list[int]) -> None:
    """A save and a load of ten times the budget stay within it."""
    state = {
        "x": torch.arange(80 << 20, dtype=torch.uint8),
        "t": torch.arange(40 << 18).reshape(1024, -1).t(),
    }
    holdfast.save(tmp_path, state, budget_nbytes=32 << 20)
    assert 0 < sum(made) <= 32 << 20
    into = {
        "x": torch.zeros(80 << 20, dtype=torch.uint8),
        "t": torch.zeros(10240, 1024, dtype=torch.int64),
    }
    holdfast.load(tmp_path, into=into, budget_nbytes=32 << 20)
    assert made.count(16 << 20) <= 2
    assert difference(state, into) is None
    assert host_pool(16 << 20).free_nbytes == made.count(16 << 20) << 24


def test_verification_stays_within_the_budget(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored digests are read a few at a time."""
    jobs, chunks, digests_nbytes = 4, 256, 2 * CHUNK_NBYTES // BLOCK_NBYTES * 16  # of two chunks
    driver = MemoryDriver(name := fresh_uri().removeprefix("memory://"))
    holdfast.save(f"memory://{name}", {"x": torch.zeros(chunks * CHUNK_NBYTES, dtype=torch.uint8)})
    start(
        driver.put(MANIFEST_KEY, rechunked(driver, start(read_manifest(driver)).result()[0]))
    ).result()
    read: list[int] = []
    read_pages = ImageReader.read_pages

    async def watched(self: ImageReader, image: int, starts: Sequence[int]) -> object:
        read.append(len(starts))
        return await read_pages(self, image, starts)

    read_within(monkeypatch, jobs * CHUNK_NBYTES)
    monkeypatch.setattr(verifier, "PAGES_NBYTES", digests_nbytes)
    monkeypatch.setattr(ImageReader, "read_pages", watched)
    holdfast.release_memory()
    made.clear()
    with holdfast.open(f"memory://{name}") as checkpoint:
        assert checkpoint.verify().nbytes > chunks * CHUNK_NBYTES
    assert sum(read) > chunks
    assert max(read) == 2
    assert 0 < sum(made) <= jobs * CHUNK_NBYTES


@pytest.mark.nightly(3)
def test_async_save_reuses_the_memory_of_the_one_before(made: list[int]) -> None:
    """The second save of the same size allocates nothing, until the memory is released."""
    uri = fresh_uri()
    state = {"x": torch.zeros(300 << 20, dtype=torch.uint8)}
    for _ in range(2):
        holdfast.async_save(uri, state).wait(60)
        assert made.count(16 << 20) in range(19, 21)
    holdfast.release_memory()
    assert host_pool(16 << 20).free_nbytes == 0


@pytest.mark.nightly(5)
def test_interpreter_ends_after_saves_in_flight(tmp_path: Path) -> None:
    """A save in flight is finished, and no thread is within torch when the interpreter ends."""
    holdfast.save(tmp_path / "open", {"x": torch.ones(3)})
    done = run(
        """
        import asyncio, sys, time, torch, holdfast
        from holdfast.drivers.calls import Call, in_new_thread
        from holdfast.storage.runtime import engine

        async def add():
            while True:
                numbers.add_(1)
                await asyncio.sleep(0)

        def add_in_thread():
            while time.monotonic() < until_s:
                others.add_(1)

        numbers, others = torch.zeros(100_000), torch.zeros(100_000)
        kept = holdfast.open(sys.argv[1] + "/open")
        kept.read("x")
        work = engine.start(add())
        engine._unfinished.clear()  # it is not waited for, as little as what goes on beside a save
        until_s = time.monotonic() + 1
        in_new_thread(add_in_thread, Call())  # a request that was given up
        holdfast.async_save(sys.argv[1] + "/c", {"x": torch.full((3_000_000,), 2.0)})
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert difference({"x": torch.full((3_000_000,), 2.0)}, holdfast.load(tmp_path / "c")) is None


def test_stuck_call_does_not_delay_the_end_of_the_interpreter() -> None:
    """A call to storage that does not answer is abandoned at exit."""
    done = run(
        """
        import atexit, time

        atexit.register(lambda: print(time.monotonic() - end_s < 30))  # after what waits for calls
        from holdfast.drivers.calls import Call, in_new_thread

        call = Call()
        call.progress_s -= 5
        in_new_thread(lambda: time.sleep(60), call)
        end_s = time.monotonic()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.nightly(28)
@pytest.mark.parametrize("first", ["before main returns", "in a thread that outlives main"])
def test_saves_and_loads_work_until_the_interpreter_has_ended(tmp_path: Path, first: str) -> None:
    """They work in late threads, atexit handlers and finalizers; a failure at exit is logged."""
    (tmp_path / "file").write_text("in the way")
    done = run(
        """
        import atexit, sys, threading, weakref
        import torch, holdfast

        def start_new_thread(*given):  # as Python 3.12 does
            if threading._SHUTTING_DOWN:
                raise RuntimeError("can't create new thread at interpreter shutdown")
            return starts(*given)

        def save_and_load(name):
            uri = f"{sys.argv[1]}/{name}"
            told = []
            progress = lambda done, total: told.append(done == total)
            holdfast.save(uri, {"x": x}, deadline_s=50, progress=progress)
            assert told[-1]
            assert torch.equal(holdfast.load(uri, {"x": torch.zeros_like(x)})["x"], x)
            assert torch.equal(holdfast.load(uri)["x"], x)
            holdfast.async_save(uri + "-waited", {"x": x}, lazy=True).wait()
            holdfast.async_save(uri + "-left", {"x": x})
            with holdfast.Checkpointer(uri + "-run", every=1, keep=1, when_busy="wait") as run:
                for step in range(run.resume({"x": x}) + 1, 4):
                    run.step(step, {"x": x})
            assert [c.step for c in holdfast.list_checkpoints(uri + "-run")] == [3]
            print(name)

        class Kept:
            pass

        starts, threading._start_new_thread = threading._start_new_thread, start_new_thread
        x = torch.arange(300_000.0)
        kept = Kept()
        weakref.finalize(kept, save_and_load, "finalizer")
        atexit.register(save_and_load, "atexit")
        if sys.argv[2].startswith("before"):
            holdfast.save(sys.argv[1] + "/early", {"x": x})
        def outlive():
            threading.main_thread().join()
            save_and_load("thread")
        threading.Thread(target=outlive).start()
        holdfast.async_save(sys.argv[1] + "/file/c", {"x": x})  # whose failure is logged
        """,
        tmp_path,
        first,
    )
    assert done.returncode == 0
    assert "file/c" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.split() == ["thread", "atexit", "finalizer"]
    assert len(list(tmp_path.glob("*-left/manifest.safetensors"))) == 3


def test_rank_that_has_not_joined_its_group_cannot_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its save would overwrite those of other ranks. Loading is allowed."""
    holdfast.save(tmp_path / "c", {"x": 1})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for save in (holdfast.save, holdfast.async_save):
        with pytest.raises(holdfast.UsageError, match="rank 1 of 2"):
            save(tmp_path / "d", {"x": 1})
    assert os.listdir(tmp_path) == ["c"]
    holdfast.save(tmp_path / "d", {"x": 1}, process_group="self")
    assert holdfast.load(tmp_path / "c") == {"x": 1}
    assert holdfast.load(tmp_path / "c", into={"x": 0}) == {"x": 1}


def test_saves_and_loads_in_a_running_event_loop_and_in_threads() -> None:
    """The engine has its own event loop."""
    results: list[object] = []

    def work(i: int) -> None:
        uri = saved({"i": i, "x": torch.full((10,), i)})
        results.append(holdfast.load(uri)["i"])

    async def main() -> None:
        work(-1)

    asyncio.run(main())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=int) == [-1, *range(8)]


def test_nothing_stays_open_after_saves_and_loads(tmp_path: Path, no_leaks: None) -> None:
    """No descriptor and no thread of a driver is left, also after failures."""
    for i in range(3):
        holdfast.save(tmp_path / "c", {"x": torch.full((100_000,), i)})
        holdfast.async_save(tmp_path / "c", {"x": torch.full((100_000,), i)}).wait(60)
        holdfast.load(tmp_path / "c")
    opened = holdfast.open(tmp_path / "c")
    opened.read("x")
    opened.close()
    for call in (holdfast.load, holdfast.open):
        with pytest.raises(holdfast.NotACheckpointError):
            call(tmp_path / "nothing")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(holdfast.StorageError):
        holdfast.save(tmp_path / "file" / "c", {"x": torch.ones(2)})


def test_signal_just_before_a_wait_is_not_lost() -> None:
    """A signal that would not wake the wait up, as one by ``interrupt_main``, is seen."""

    async def interrupted() -> None:
        _thread.interrupt_main()
        await asyncio.sleep(60)

    # A shell's background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_engine(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_s < 30


WAIT_S = 20.0


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    """Save a checkpoint of a few tensors; return its URI."""
    holdfast.save(tmp_path / "c", {"w": torch.ones(1000)})
    return tmp_path / "c"


def open_below(folder: Path) -> int:
    """Return the number of open descriptors of files below ``folder``."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
        except FileNotFoundError:
            continue
    return count


def io_threads() -> int:
    """Return the number of driver I/O threads."""
    return sum(thread.name.startswith("holdfast-io") for thread in threading.enumerate())


def soon(holds: Callable[[], bool]) -> bool:
    """Return whether ``holds`` becomes true in time: garbage collection does not wait."""
    end_s = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.005)
    return holds()


@pytest.mark.nightly(7)
def test_what_could_not_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    """No checkpoint, descriptor or warning remains."""
    (tmp_path / "manifest.safetensors").write_bytes(b"rubbish")
    with pytest.raises(holdfast.DamagedError):
        holdfast.open(tmp_path)
    gc.collect()
    assert open_below(tmp_path) == 0


@pytest.mark.nightly(18)
@pytest.mark.parametrize("where", ["engine", "thread", "cycle"])
def test_an_open_checkpoint_that_is_dropped_is_closed_with_a_warning(uri: Path, where: str) -> None:
    """It may be collected by the engine's thread, which cannot wait for itself, and by another.

    Its descriptors are given back, and its threads end.
    """
    threads = io_threads()
    held: list[object] = [holdfast.open(uri)]
    assert held[0].read("w").sum() == 1000  # type: ignore[attr-defined]
    if where == "cycle":
        held[0].itself = held[0]  # type: ignore[attr-defined]

    def drop() -> None:
        held.clear()
        gc.collect()

    async def drop_here() -> None:
        drop()

    def drop_there() -> None:
        if where == "engine":
            start(drop_here()).result(60)
        elif where == "thread":
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join(60)
        else:
            drop()

    with pytest.warns(ResourceWarning, match=f"unclosed checkpoint file://{uri}"):
        drop_there()
    assert soon(lambda: open_below(uri) == 0 and io_threads() <= threads)
    holdfast.save(uri, {"w": torch.ones(10)})


@pytest.mark.nightly(6)
def test_a_file_system_is_closed_when_it_is_collected(uri: Path) -> None:
    """There is no warning, because nobody closes a file system of fsspec."""
    files = HoldfastFileSystem(str(uri))
    assert files.cat_file("w.npy", -4) == torch.ones(1).numpy().tobytes()
    assert open_below(uri) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del files
        gc.collect()
    assert soon(lambda: open_below(uri) == 0)
