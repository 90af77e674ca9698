"""Test SIGTERM: saves finish, the current step is saved, and the previous handler runs."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.copies import steps_at
from support.drivers import Halting
from support.given import Serve
from support.shelves import until

import holdfast
from holdfast.storage.training import preemption

pytestmark = [
    pytest.mark.clocked,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

Tell = Callable[[object], object]
STATE = {"x": torch.zeros(1000)}


def signalled(
    work: Callable[[Tell], None], *, at: object = 3, timeout_s: float = 60
) -> tuple[int, float, list[str]]:
    """Fork a child that does ``work``, and send it SIGTERM once it reports ``at``.

    Return its exit status, how long it took to end, and its reports.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work(lambda what: os.write(writing, f"{what}\n".encode()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    killer = threading.Timer(timeout_s, os.kill, (child, signal.SIGKILL))
    killer.start()
    told = []
    with open(reading) as lines:
        for line in lines:
            told.append(line.strip())
            if told[-1] == str(at):
                break
        os.kill(child, signal.SIGTERM)
        began_s = time.monotonic()
        told += [line.strip() for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    killer.cancel()
    return status, time.monotonic() - began_s, told


def term() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def in_a_thread(work: Callable[[], object]) -> None:
    """Call ``work`` in another thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Return the signals that reached the previous handler."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_current_step_is_saved_and_the_process_ends_by_the_signal(tmp_path: Path) -> None:
    """The current step is saved although no save is due."""

    def work(tell: Tell) -> None:
        state = {"x": torch.zeros(1000)}
        with holdfast.Checkpointer(tmp_path, every=1000) as ckpt:
            for step in range(1, 1000):
                state["x"].fill_(step)
                ckpt.step(step, state)
                tell(step)
                time.sleep(0.02)

    status, _, told = signalled(work)
    assert status == -signal.SIGTERM, told
    (found,) = holdfast.list_checkpoints(tmp_path)
    assert found.step == int(told[-1]) + 1
    assert holdfast.load(tmp_path / found.path)["x"].eq(found.step).all()
    with holdfast.open(tmp_path / found.path) as checkpoint:
        assert checkpoint.verify().ok


@pytest.mark.nightly(4)
@pytest.mark.parametrize("compiled", [False, True], ids=["in Python", "in compiled code"])
def test_process_ends_after_its_grace_without_a_step(compiled: bool, tmp_path: Path) -> None:
    """If no step comes, the process ends after its grace period; saves in flight are committed."""

    def work(tell: Tell) -> None:
        ckpt = holdfast.Checkpointer(tmp_path, every=1, grace_s=1.0)
        ckpt.step(1, STATE)
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        libc.pthread_mutex_lock(mutex)
        tell(3)
        if compiled:
            libc.pthread_mutex_lock(mutex)  # blocks in compiled code, where no handler runs
        time.sleep(50)

    status, took_s, told = signalled(work)
    assert status == -signal.SIGTERM, told
    assert 0.9 < took_s < 30
    assert steps_at(tmp_path) == [1]


@pytest.mark.nightly(3)
def test_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """A second SIGTERM ends the process at once, with any number of Checkpointers."""

    def work(tell: Tell) -> None:
        kept = [holdfast.Checkpointer(tmp_path / str(n), grace_s=50.0) for n in range(3)]
        threading.Timer(0.5, term).start()
        tell(len(kept))
        time.sleep(50)

    status, took_s, told = signalled(work)
    assert (status, took_s < 40) == (-signal.SIGTERM, True), told


def test_forked_child_ends_by_the_signal_and_its_parent_sees_none() -> None:
    """Data loaders fork workers and end them by SIGTERM; neither has a grace period then."""
    with holdfast.Checkpointer(fresh_uri()) as ckpt:
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        began_s = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert time.monotonic() - began_s < 20
        assert not ckpt.preempted


def test_event_loop_still_receives_its_signals() -> None:
    """Signals are forwarded to a wakeup descriptor that was set before."""

    async def said() -> list[str]:
        loop, found, event = asyncio.get_running_loop(), [], asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, event.set)
        try:
            for when in ("before", "with", "after"):
                ckpt = holdfast.Checkpointer(fresh_uri()) if when == "with" else None
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.wait_for(event.wait(), 30)
                event.clear()
                found.append(when)
                if ckpt is not None:
                    ckpt.close()
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
        return found

    assert asyncio.run(said()) == ["before", "with", "after"]


def test_no_signal_is_written_to_a_reused_descriptor() -> None:
    """After the first of two Checkpointers has closed, no number goes to a descriptor of others."""
    before, written = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    first, second = (holdfast.Checkpointer(fresh_uri()) for _ in range(2))
    first.close()
    read_fd, write_fd = os.pipe()  # likely has the numbers that have just become free
    ignored = signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    second.close()
    signal.signal(signal.SIGUSR1, ignored)
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    assert signal.set_wakeup_fd(written) == -1
    signal.signal(signal.SIGTERM, before)


def test_save_longer_than_the_grace_period_is_left(serve: Serve, heard: list[int]) -> None:
    """The previous handler gets the signal while the save is in flight, once."""
    storage = Halting(serve, "commit")
    ckpt = holdfast.Checkpointer(storage.uri, grace_s=0.3)
    try:
        term()
        assert ckpt.preempted
        assert ckpt.step(1, {"x": torch.ones(3)}) is None
        assert heard == [signal.SIGTERM]
        assert ckpt.counters.in_flight == 1
    finally:
        storage.go.set()
    ckpt.close()
    assert heard == [signal.SIGTERM]


def test_close_restores_the_handler(heard: list[int]) -> None:
    """close() restores the previous handler, unless another one was set meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.Checkpointer(fresh_uri()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with holdfast.Checkpointer(fresh_uri(), grace_s=None):
        assert signal.getsignal(signal.SIGTERM) == before
    with holdfast.Checkpointer(fresh_uri()):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_another_thread_leaves_the_signal_alone() -> None:
    """Python handles signals in the main thread only; all else works in other threads."""
    before, saved = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
            ckpt.step(1, {"x": torch.ones(3)})
        saved.append(ckpt.counters.saved)

    in_a_thread(work)
    assert (saved, signal.getsignal(signal.SIGTERM)) == ([1], before)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_last_of_several_hands_the_signal_over(order: tuple[int, ...], heard: list[int]) -> None:
    """The last Checkpointer to save or close passes the signal on, once.

    After that, the signal has its earlier effect.
    """
    made = [holdfast.Checkpointer(fresh_uri(), grace_s=30.0 + n) for n in range(3)]
    term()
    assert [ckpt.preempted for ckpt in made] == [True] * 3
    for n in order:
        assert heard == []
        if n == 1:
            made[n].close()
        else:
            assert made[n].step(1, {"x": torch.ones(3)}) is None
            assert made[n].counters.saved + made[n].counters.in_flight == 1
    assert heard == [signal.SIGTERM]
    term()
    assert len(heard) == 2
    for ckpt in made:
        ckpt.close()
    with holdfast.Checkpointer(fresh_uri()) as ckpt:
        assert not ckpt.preempted
        term()
        assert ckpt.preempted
        assert len(heard) == 2
    assert len(heard) == 3


def test_handed_over_signal_does_not_count_again(heard: list[int]) -> None:
    """A signal that its watcher thread notices late does not count for the next Checkpointer."""
    process = preemption._process
    first = holdfast.Checkpointer(fresh_uri())
    watcher = process._watcher
    assert watcher is not None
    term()
    first.close()
    assert heard == [signal.SIGTERM]
    with holdfast.Checkpointer(fresh_uri()) as second:
        process._see(watcher)
        assert not second.preempted
    assert heard == [signal.SIGTERM]


def test_checkpointer_made_after_the_signal_saves_too(heard: list[int]) -> None:
    """A Checkpointer made while others are still saving is notified."""
    first = holdfast.Checkpointer(fresh_uri())
    term()
    second = holdfast.Checkpointer(fresh_uri())
    assert second.preempted
    first.close()
    assert heard == []
    second.step(1, {"x": torch.ones(3)})
    assert len(heard) == 1
    second.close()


def test_dropped_checkpointer_delays_nobody(heard: list[int]) -> None:
    """Nor does one closed in another thread, where no handler can be set, delay the process."""
    dropped = holdfast.Checkpointer(fresh_uri())
    elsewhere = holdfast.Checkpointer(fresh_uri())
    in_a_thread(elsewhere.close)
    del dropped
    gc.collect()
    term()
    assert heard == [signal.SIGTERM]
    assert not elsewhere.preempted


def test_signal_is_handed_over_after_a_close_in_another_thread(heard: list[int]) -> None:
    """The main thread hands the signal over as soon as it can."""
    ckpt = holdfast.Checkpointer(fresh_uri())
    term()
    in_a_thread(ckpt.close)
    until(lambda: heard, "the signal is handed over", 30)
    assert heard == [signal.SIGTERM]


def test_handler_set_between_two_checkpointers_gets_the_signal(heard: list[int]) -> None:
    """The handler set before the last Checkpointer is called, and stays."""
    first = holdfast.Checkpointer(fresh_uri())
    chained: list[int] = []

    def mine(number: int, frame: Any) -> None:
        chained.append(number)

    signal.signal(signal.SIGTERM, mine)
    second = holdfast.Checkpointer(fresh_uri())
    term()
    assert (first.preempted, second.preempted, chained) == (True, True, [])
    second.close()
    first.close()
    assert chained == [signal.SIGTERM]
    assert heard == []
    assert signal.getsignal(signal.SIGTERM) is mine


def test_saved_step_is_not_saved_again(heard: list[int]) -> None:
    """A step that was just saved is not saved again when the signal precedes ``step``."""
    with holdfast.Checkpointer(fresh_uri(), every=1000) as ckpt:
        ckpt.save(7, {"x": torch.ones(3)})
        term()
        assert ckpt.step(7, {"x": torch.ones(3)}) is None
        assert heard == [signal.SIGTERM]
        assert (ckpt.counters.due, ckpt.counters.failed) == (1, 0)


def test_no_save_begins_after_the_grace_period(heard: list[int]) -> None:
    """A Checkpointer that is too late does not delay one that has more time."""
    short = holdfast.Checkpointer(fresh_uri(), grace_s=0.05)
    long = holdfast.Checkpointer(fresh_uri(), grace_s=40.0)
    term()
    time.sleep(0.1)
    assert short.step(1, {"x": torch.ones(3)}) is None
    assert (short.counters.due, heard) == (0, [])
    long.step(1, {"x": torch.ones(3)})
    assert (long.counters.due, heard) == (1, [signal.SIGTERM])
    short.close()
    long.close()
