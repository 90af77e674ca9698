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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.drivers import HookedDriver
from support.given import Serve

import holdfast
from holdfast.drivers.memory import MemoryDriver
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


def steps(folder: Path) -> list[int | None]:
    """Return the steps that are there."""
    return [c.step for c in holdfast.list_checkpoints(folder)]


def test_the_step_at_hand_is_saved_and_the_process_ends_by_the_signal(tmp_path: Path) -> None:
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
def test_a_handler_that_was_there_before_is_called(tmp_path: Path) -> None:
    """An earlier signal handler runs after the save and may let the loop finish."""

    def work(tell: Tell) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(len(steps(tmp_path))))
        with holdfast.Checkpointer(tmp_path, every=1000) as ckpt:
            for step in range(1, 1000):
                ckpt.step(step, STATE)
                tell(step)
                if stop:
                    break
                time.sleep(0.02)
        tell(f"stopped {stop} {ckpt.preempted} {ckpt.counters.saved}")

    status, _, told = signalled(work)
    assert (status, told[-1]) == (0, "stopped [1] True 1")


def locked() -> tuple[Any, Any]:
    """Return a locked mutex: to lock it again waits in compiled code, where no handler runs."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    return libc, mutex


@pytest.mark.nightly(4)
@pytest.mark.parametrize("compiled", [False, True], ids=["in Python", "in compiled code"])
def test_a_step_that_never_comes_is_not_waited_for(compiled: bool, tmp_path: Path) -> None:
    """The process ends after the grace period; saves in flight are committed."""

    def work(tell: Tell) -> None:
        ckpt = holdfast.Checkpointer(tmp_path, every=1, grace_s=1.0)
        ckpt.step(1, STATE)
        libc, mutex = locked()
        tell(3)
        if compiled:
            libc.pthread_mutex_lock(mutex)
        time.sleep(50)

    status, took_s, told = signalled(work)
    assert status == -signal.SIGTERM, told
    assert 0.9 < took_s < 30
    assert steps(tmp_path) == [1]


@pytest.mark.nightly(5)
def test_the_grace_period_begins_also_within_compiled_code(tmp_path: Path) -> None:
    """The next step is saved, and the previous handler is called."""

    def work(tell: Tell) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        ckpt = holdfast.Checkpointer(tmp_path, every=1000)
        libc, mutex = locked()

        def unlock() -> None:
            while not ckpt.preempted:
                time.sleep(0.01)
            tell("seen")
            libc.pthread_mutex_unlock(mutex)

        threading.Thread(target=unlock).start()
        tell(3)
        libc.pthread_mutex_lock(mutex)
        ckpt.step(7, STATE)
        ckpt.close()
        tell(f"stopped {stop} {ckpt.counters.saved}")

    status, _, told = signalled(work)
    assert (status, told) == (0, ["3", "seen", "stopped [1] 1"])
    assert steps(tmp_path) == [7]


def test_a_forked_child_ends_by_sigterm_and_its_parent_hears_nothing_of_it() -> None:
    """Data loaders fork workers, and end them so; neither has a grace period then."""
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


def test_whoever_watched_signals_before_goes_on_watching() -> None:
    """An event loop of the main thread still receives its signals."""

    async def heard() -> list[str]:
        loop, said, event = asyncio.get_running_loop(), [], asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, event.set)
        try:
            for when in ("before", "with", "after"):
                ckpt = holdfast.Checkpointer(fresh_uri()) if when == "with" else None
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.wait_for(event.wait(), 30)
                event.clear()
                said.append(when)
                if ckpt is not None:
                    ckpt.close()
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
        return said

    assert asyncio.run(heard()) == ["before", "with", "after"]


def test_two_checkpointers_may_be_closed_in_any_order() -> None:
    """Two checkpointers may close in any order.

    No signal number is written to a descriptor that has been reused by then.
    """
    before, written = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    first, second = (holdfast.Checkpointer(fresh_uri()) for _ in range(2))
    first.close()
    read_fd, write_fd = os.pipe()  # likely has the numbers that have just become free
    heard = signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    second.close()
    signal.signal(signal.SIGUSR1, heard)
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    assert signal.set_wakeup_fd(written) == -1
    signal.signal(signal.SIGTERM, before)


@pytest.mark.nightly(3)
def test_a_second_signal_is_not_kept_waiting(tmp_path: Path) -> None:
    """A second SIGTERM ends the process at once, with any number of Checkpointers."""

    def work(tell: Tell) -> None:
        kept = [holdfast.Checkpointer(tmp_path / str(n), grace_s=50.0) for n in range(3)]
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        tell(len(kept))
        time.sleep(50)

    status, took_s, told = signalled(work)
    assert (status, took_s < 40) == (-signal.SIGTERM, True), told


def test_the_end_of_the_loop_ends_the_process_too(tmp_path: Path) -> None:
    """A signal that comes after the last step is not forgotten."""

    def work(tell: Tell) -> None:
        with holdfast.Checkpointer(tmp_path, every=1) as ckpt:
            ckpt.step(1, STATE)
            tell(3)
            while not ckpt.preempted:
                time.sleep(0.01)
        tell("not reached")

    status, _, told = signalled(work)
    assert (status, told) == (-signal.SIGTERM, ["3"])
    assert steps(tmp_path) == [1]


def test_a_save_that_takes_longer_than_the_grace_period(serve: Serve) -> None:
    """Is given up, and what handled the signal before gets it; the previous checkpoint stays."""
    go = threading.Event()

    async def hold(operation: str, key: str) -> None:
        if operation == "commit":
            await asyncio.to_thread(go.wait, 60)

    uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=hold))
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        ckpt = holdfast.Checkpointer(uri, grace_s=0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.preempted
        assert ckpt.step(1, {"x": torch.ones(3)}) is None
        assert handled == [signal.SIGTERM]
        assert ckpt.counters.in_flight == 1
        go.set()
        ckpt.close()
        assert handled == [signal.SIGTERM]
    finally:
        go.set()
        signal.signal(signal.SIGTERM, before)


def test_the_signal_is_as_it_was_when_the_checkpointer_is_closed() -> None:
    """Closing a checkpointer restores the signal handler, unless another one was set meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.Checkpointer(fresh_uri()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with holdfast.Checkpointer(fresh_uri(), grace_s=None):
        assert signal.getsignal(signal.SIGTERM) == before
    try:
        with holdfast.Checkpointer(fresh_uri()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_the_signal_is_left_alone() -> None:
    """Python handles signals in the main thread only. All else works there."""
    before, saved = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
            ckpt.step(1, {"x": torch.ones(3)})
        saved.append(ckpt.counters.saved)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert (saved, signal.getsignal(signal.SIGTERM)) == ([1], before)


def both(folder: Path, stepped: str, graces: tuple[float, float]) -> Callable[[Tell], None]:
    """Return a loop with two Checkpointers, a and b, which steps those in ``stepped`` in order."""

    def work(tell: Tell) -> None:
        made = {
            name: holdfast.Checkpointer(folder / name, every=1000, grace_s=grace_s)
            for name, grace_s in zip("ab", graces, strict=True)
        }
        for step in range(1, 1000):
            for name in stepped:
                made[name].step(step, STATE)
            tell(step)
            time.sleep(0.02)

    return work


@pytest.mark.nightly(4)
@pytest.mark.parametrize("stepped", ["ab", pytest.param("ba", marks=pytest.mark.drill)])
def test_all_checkpointers_of_a_process_save(stepped: str, tmp_path: Path) -> None:
    """Each the step at hand, in whatever order; then the process ends by the signal."""
    status, took_s, told = signalled(both(tmp_path, stepped, (40.0, 50.0)))
    assert status == -signal.SIGTERM, told
    assert took_s < 30
    for name in "ab":
        assert steps(tmp_path / name) in ([int(told[-1])], [int(told[-1]) + 1])


@pytest.mark.nightly(6)
def test_a_checkpointer_that_never_steps_keeps_the_others_no_longer_than_its_grace(
    tmp_path: Path,
) -> None:
    """A checkpointer that never steps delays the signal by no more than its grace period.

    The others have saved, and training continues meanwhile.
    """
    status, took_s, told = signalled(both(tmp_path, "a", (30.0, 2.0)))
    assert status == -signal.SIGTERM, told
    assert 1.5 < took_s < 20
    assert len(steps(tmp_path / "a")) == 1


class Heard:
    """A handler that was there before. A context manager."""

    def __enter__(self) -> list[int]:
        heard: list[int] = []
        self._before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        return heard

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def term() -> None:
    """Send it to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_last_of_several_to_end_hands_the_signal_over(order: tuple[int, ...]) -> None:
    """The last checkpointer to save or close passes the signal on, once.

    After that, the signal has its earlier effect.
    """
    with Heard() as heard:
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


def test_a_signal_that_was_handed_over_does_not_count_again() -> None:
    """A signal that was passed on does not count for the next checkpointer.

    The watching thread notices it only once there is another checkpointer.
    """
    process = preemption._process
    with Heard() as heard:
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


def test_a_checkpointer_that_is_made_after_the_signal_is_asked_too() -> None:
    """A checkpointer made after the signal saves too, while others are still saving."""
    with Heard() as heard:
        first = holdfast.Checkpointer(fresh_uri())
        term()
        second = holdfast.Checkpointer(fresh_uri())
        assert second.preempted
        first.close()
        assert heard == []
        second.step(1, {"x": torch.ones(3)})
        assert len(heard) == 1
        second.close()


def test_a_checkpointer_that_was_dropped_keeps_nobody_waiting() -> None:
    """A checkpointer that was dropped, or closed in another thread, delays nobody.

    Python lets only the main thread set handlers.
    """
    with Heard() as heard:
        dropped = holdfast.Checkpointer(fresh_uri())
        elsewhere = holdfast.Checkpointer(fresh_uri())
        thread = threading.Thread(target=elsewhere.close)
        thread.start()
        thread.join(60)
        del dropped
        gc.collect()
        term()
        assert heard == [signal.SIGTERM]
        assert not elsewhere.preempted


def test_a_signal_is_handed_over_though_the_last_one_is_closed_in_another_thread() -> None:
    """The main thread does it when it can."""
    with Heard() as heard:
        ckpt = holdfast.Checkpointer(fresh_uri())
        term()
        thread = threading.Thread(target=ckpt.close)
        thread.start()
        thread.join(60)
        until_s = time.monotonic() + 30
        while not heard and time.monotonic() < until_s:
            time.sleep(0.01)
        assert heard == [signal.SIGTERM]


def test_a_handler_that_was_set_between_two_is_the_one_that_is_handed_over_to() -> None:
    """The handler set before the last Checkpointer is called."""
    with Heard() as heard:
        first = holdfast.Checkpointer(fresh_uri())
        ours, chained = signal.getsignal(signal.SIGTERM), []

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
        assert callable(ours)


def test_a_step_that_was_just_saved_is_not_saved_again() -> None:
    """A step that was just saved is not saved again when the signal precedes ``step``."""
    with Heard() as heard, holdfast.Checkpointer(fresh_uri(), every=1000) as ckpt:
        ckpt.save(7, {"x": torch.ones(3)})
        term()
        assert ckpt.step(7, {"x": torch.ones(3)}) is None
        assert heard == [signal.SIGTERM]
        assert (ckpt.counters.due, ckpt.counters.failed) == (1, 0)


def test_no_save_begins_when_the_grace_period_is_over() -> None:
    """No save begins after the grace period.

    A checkpointer that is too late does not delay the save of another one with more time.
    """
    with Heard() as heard:
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
