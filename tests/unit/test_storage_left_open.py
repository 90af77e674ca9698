"""Test unclosed objects: they are closed when collected, with a warning, on any thread."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.storage.integrations.fsspec import HoldfastFileSystem
from holdfast.storage.runtime.engine import start

pytestmark = pytest.mark.clocked

WAIT_S = 20.0


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    """A checkpoint of a few tensors."""
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


def dropped(uri: Path, times: int) -> None:
    """Open the checkpoint, read it and drop it without closing, ``times`` times."""
    for _ in range(times):
        assert holdfast.open(uri).read("w").sum() == 1000
        gc.collect()


def io_threads() -> int:
    """Return the number of driver I/O threads."""
    return sum(thread.name.startswith("holdfast-io") for thread in threading.enumerate())


def soon(holds: Callable[[], bool]) -> bool:
    """Return whether ``holds`` becomes true in time: garbage collection does not wait."""
    end_s = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.005)
    return holds()


@pytest.mark.nightly(29)
def test_an_open_checkpoint_that_is_dropped_is_closed_with_a_warning(uri: Path) -> None:
    """Its descriptors are given back, and its threads end; the warning names it."""
    threads = io_threads()
    with pytest.warns(ResourceWarning, match=f"unclosed checkpoint file://{uri}"):
        dropped(uri, 5)
    assert soon(lambda: open_below(uri) == 0 and io_threads() <= threads)


@pytest.mark.nightly(7)
def test_what_could_not_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    """No checkpoint, no descriptor, no warning."""
    (tmp_path / "manifest.safetensors").write_bytes(b"rubbish")
    with pytest.raises(holdfast.DamagedError):
        holdfast.open(tmp_path)
    gc.collect()
    assert open_below(tmp_path) == 0


@pytest.mark.nightly(18)
@pytest.mark.parametrize("where", ["engine", "thread", "cycle"])
def test_it_may_be_collected_on_any_thread(uri: Path, where: str) -> None:
    """On the engine's, which cannot wait for itself, on another one, or by the collector of cycles."""
    held: list[object] = [holdfast.open(uri)]
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

    with pytest.warns(ResourceWarning, match="unclosed checkpoint"):
        drop_there()
    assert soon(lambda: open_below(uri) == 0)
    holdfast.save(uri, {"w": torch.ones(10)})


@pytest.mark.nightly(6)
def test_a_file_system_is_closed_when_it_is_collected(uri: Path) -> None:
    """Without a warning: nobody closes a file system of fsspec."""
    files = HoldfastFileSystem(str(uri))
    assert files.cat_file("w.npy", -4) == torch.ones(1).numpy().tobytes()
    assert open_below(uri) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del files
        gc.collect()
    assert soon(lambda: open_below(uri) == 0)
