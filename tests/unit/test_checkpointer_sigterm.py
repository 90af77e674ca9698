"""SIGTERM: what is under way is finished, the step at hand is saved, and then the signal does what it did before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri

import holdfast
from holdfast.storage import save as saving

PRELUDE = """
import os, signal, sys, threading, time, torch, holdfast
torch.set_num_threads(1)
folder = sys.argv[1]
state = {"x": torch.zeros(3_000_000)}
def told(step):
    print(step, flush=True)
"""


def signalled(code: str, folder: Path, *, at: str = "3", timeout_s: float = 60) -> tuple[int, float, str]:
    """Run ``code`` until it has said ``at``, send SIGTERM, and wait: its status, how long that took, and what it said."""
    command = [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")
    assert process.stdout is not None
    with process:
        said = ""
        for line in process.stdout:
            said += line
            if line.strip() == at:
                break
        process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        try:
            rest, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, time.monotonic() - began_s, said + rest


def test_the_step_at_hand_is_saved_and_the_process_ends_by_the_signal(tmp_path: Path) -> None:
    """Though no save is due; whoever started it sees that SIGTERM ended it."""
    status, _, said = signalled(
        """
        with holdfast.Checkpointer(folder, every=1000) as ckpt:
            for step in range(1, 1000):
                state["x"].fill_(step)
                ckpt.step(step, state)
                told(step)
                time.sleep(0.02)
        """,
        tmp_path,
    )
    assert status == -signal.SIGTERM, said
    (found,) = holdfast.list_checkpoints(tmp_path)
    assert found.step == max(int(line) for line in said.splitlines() if line.isdecimal()) + 1
    assert holdfast.load(tmp_path / found.path)["x"].eq(found.step).all()
    assert holdfast.open(tmp_path / found.path).verify().ok


def test_a_handler_that_was_there_before_is_called(tmp_path: Path) -> None:
    """After the saving; it may let the loop end by itself."""
    status, _, said = signalled(
        """
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(len(holdfast.list_checkpoints(folder))))
        with holdfast.Checkpointer(folder, every=1000) as ckpt:
            for step in range(1, 1000):
                ckpt.step(step, state)
                told(step)
                if stop:
                    break
                time.sleep(0.02)
        print("stopped", stop, ckpt.preempted, ckpt.counters.saved)
        """,
        tmp_path,
    )
    assert (status, said.splitlines()[-1]) == (0, "stopped [1] True 1")


def test_a_step_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    """After the grace period the process ends all the same; what was under way by then is committed."""
    status, took_s, said = signalled(
        """
        ckpt = holdfast.Checkpointer(folder, every=1, grace_s=1.0)
        ckpt.step(1, state)
        told(3)
        for _ in range(600):
            time.sleep(0.1)  # a handler runs between two of them, at the latest
        """,
        tmp_path,
    )
    assert status == -signal.SIGTERM, said
    assert 0.9 < took_s < 30
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [1]


LOCKED = """
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
"""
"""Whoever locks it again waits in compiled code, and no signal interrupts that."""


def test_the_grace_period_ends_also_within_compiled_code(tmp_path: Path) -> None:
    """Python calls no handler there, and the main thread never comes back; what was under way is committed all the same."""
    status, took_s, said = signalled(
        LOCKED
        + """
ckpt = holdfast.Checkpointer(folder, every=1, grace_s=1.0)
ckpt.step(1, state)
told(3)
libc.pthread_mutex_lock(mutex)
""",
        tmp_path,
    )
    assert status == -signal.SIGTERM, said
    assert 0.9 < took_s < 30
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [1]


def test_the_grace_period_begins_also_within_compiled_code(tmp_path: Path) -> None:
    """The clock runs from the signal on; the step after the call is saved, and a handler from before is called in turn."""
    status, _, said = signalled(
        LOCKED
        + """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
ckpt = holdfast.Checkpointer(folder, every=1000)
def unlock():
    while not ckpt.preempted:
        time.sleep(0.01)
    print("seen", flush=True)
    libc.pthread_mutex_unlock(mutex)
threading.Thread(target=unlock).start()
told(3)
libc.pthread_mutex_lock(mutex)
ckpt.step(7, state)
ckpt.close()
print("stopped", stop, ckpt.counters.saved)
""",
        tmp_path,
    )
    assert status == 0, said
    assert [line for line in said.splitlines() if line.startswith(("seen", "stopped"))] == ["seen", "stopped [1] 1"]
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [7]


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
    """An event loop does, in the main thread: it hears of its signals while there is a checkpointer, and after it."""
    import asyncio

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
    """And a descriptor that is somebody else's by then gets no numbers of signals."""
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


def test_a_second_signal_is_not_kept_waiting(tmp_path: Path) -> None:
    """Whoever sends two is in a hurry."""
    status, took_s, said = signalled(
        """
        ckpt = holdfast.Checkpointer(folder, every=1, grace_s=50.0)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        told(3)
        for _ in range(600):
            time.sleep(0.1)  # a handler runs between two of them, at the latest
        """,
        tmp_path,
    )
    assert (status, took_s < 40) == (-signal.SIGTERM, True), said


def test_the_end_of_the_loop_ends_the_process_too(tmp_path: Path) -> None:
    """A signal that comes after the last step is not forgotten."""
    status, _, said = signalled(
        """
        with holdfast.Checkpointer(folder, every=1) as ckpt:
            ckpt.step(1, state)
            told(3)
            while not ckpt.preempted:
                time.sleep(0.01)
        print("not reached")
        """,
        tmp_path,
    )
    assert status == -signal.SIGTERM
    assert "not reached" not in said
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [1]


def test_a_save_that_takes_longer_than_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is given up, and what handled the signal before gets it; the previous checkpoint stays."""
    import asyncio

    plain, go = saving.commit, threading.Event()

    async def held(*args: Any) -> Any:
        await asyncio.to_thread(go.wait, 60)
        return await plain(*args)

    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        ckpt = holdfast.Checkpointer(fresh_uri(), grace_s=0.3)
        monkeypatch.setattr(saving, "commit", held)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.preempted
        assert ckpt.step(1, {"x": torch.ones(3)}) is None
        assert handled == [signal.SIGTERM]
        assert ckpt.counters.under_way == 1
        go.set()
        ckpt.close()
        assert handled == [signal.SIGTERM]
    finally:
        go.set()
        signal.signal(signal.SIGTERM, before)


def test_the_signal_is_as_it_was_when_the_checkpointer_is_closed() -> None:
    """Also when another handler was set meanwhile: then that one stays."""
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
