"""Test saves of memory that others may write to unseen, and how such writes are found."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri
from support.inside import around_copies

import holdfast
from holdfast.storage.state.capture import host_snapshot, lazy, process_memory
from holdfast.storage.state.capture.host_snapshot import ChangedError, HostSnapshot, Region
from holdfast.storage.state.capture.write_tracking import listed_files, mapped_files, write_tracker

pytestmark = pytest.mark.usefixtures("no_write_history")
NUMEL = 40_000
needs_tracking = pytest.mark.skipif(
    write_tracker() is None, reason="writes cannot be tracked on this machine"
)


def in_memory(memory: Any, numel: int = NUMEL, offset: int = 0) -> torch.Tensor:
    """Return a tensor in ``memory``."""
    return torch.frombuffer(memory, dtype=torch.float32, count=numel, offset=offset)


def private(path: Path) -> torch.Tensor:
    """Return ordinary memory."""
    return torch.ones(NUMEL)


def shared(path: Path) -> torch.Tensor:
    """Return a file in /dev/shm."""
    return torch.ones(NUMEL).share_memory_()


def anonymous_shared(path: Path) -> torch.Tensor:
    """Return memory that is shared with children."""
    return in_memory(mmap.mmap(-1, 4 * NUMEL))


def of_a_file(path: Path, access: int = mmap.ACCESS_COPY) -> torch.Tensor:
    """Return a mapping of a file of ones, private by default."""
    np.ones(NUMEL, np.float32).tofile(path)
    with open(path, "r+b") as file:
        return in_memory(mmap.mmap(file.fileno(), 0, access=access))


def of_a_file_shared(path: Path) -> torch.Tensor:
    """Return a mapping whose writes go to the file."""
    return of_a_file(path, mmap.ACCESS_WRITE)


def half_written(path: Path) -> torch.Tensor:
    """Return a private mapping, half of whose pages are still the file's."""
    tensor = of_a_file(path)
    tensor[: NUMEL // 2] = 2
    return tensor


def at_an_odd_offset(path: Path) -> torch.Tensor:
    """Return a mapping that begins and ends within pages."""
    np.ones(NUMEL + 64, np.float32).tofile(path)
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return in_memory(memory, offset=4 * 13)


def across_mappings(path: Path) -> torch.Tensor:
    """Return a mapping of a file whose middle is mapped anew."""
    tensor = of_a_file(path)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) + 5
    map_memory(4 * mmap.PAGESIZE, first * mmap.PAGESIZE)
    return tensor


def map_memory(nbytes: int, address: int = 0) -> int:
    """Map private memory, at ``address`` if given, until munmap."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    flags = (0x10 if address else 0) | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert got == (address or got)
    return int(got)


KINDS: list[Callable[[Path], torch.Tensor]] = [
    private,
    shared,
    anonymous_shared,
    of_a_file,
    of_a_file_shared,
    half_written,
    at_an_odd_offset,
    across_mappings,
]
LAZY: list[Any] = [True, False, "prove"]
CASES = [(kind, how) for how in LAZY for kind in (KINDS if how is True else (private, shared))]


@pytest.fixture
def write_before_copy(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Functions that run before a save copies its first chunk."""
    acts: list[Callable[[], None]] = []

    def writing(copy: Callable[[], None], start: int) -> None:
        while acts:
            acts.pop()()
        copy()

    around_copies(monkeypatch, writing)
    return acts


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_write_during_a_save_fails_it_once(
    kind: Callable[[Path], torch.Tensor],
    how: Any,
    tmp_path: Path,
    write_before_copy: list[Callable[[], None]],
) -> None:
    """A save fails by name if others write meanwhile, and only then.

    From then on a lazy save copies the tensor at the call.
    """
    state = {"x": kind(tmp_path / "file"), "rest": torch.ones(4 * NUMEL)}

    def save_and_check() -> None:
        expected = state["x"].clone()
        holdfast.async_save(uri := fresh_uri(), state, lazy=how).wait(60)
        holdfast.fence()
        assert torch.equal(holdfast.load(uri)["x"], expected)

    for _ in range(3):
        save_and_check()
    write_before_copy.append(lambda: state["x"][20_000:20_010].add_(1))
    with pytest.raises(holdfast.SaveError, match=r"state\[.x.\] changed while"):
        holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)
    holdfast.fence()
    if how:
        write_before_copy.append(lambda: state["x"][20_000:20_010].add_(1))
        save_and_check()


@pytest.mark.parametrize("how", LAZY)
def test_memory_may_become_shared_between_saves(how: Any) -> None:
    """A tensor known as private memory may move to shared memory."""
    state = {"x": torch.ones(NUMEL), "rest": torch.ones(4 * NUMEL)}
    for step in range(4):
        if step == 2:
            state["x"].share_memory_()
        holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)
        holdfast.fence()


@pytest.mark.parametrize("how", LAZY)
def test_truncated_file_fails_the_save(
    how: Any, tmp_path: Path, write_before_copy: list[Callable[[], None]]
) -> None:
    """A plain read of the mapping would end the process with SIGBUS."""
    path = tmp_path / "file"
    state = {"x": of_a_file_shared(path), "rest": torch.ones(4 * NUMEL)}
    holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)
    holdfast.fence()
    write_before_copy.append(lambda: os.truncate(path, 0))
    for _ in range(2):
        with pytest.raises(holdfast.SaveError, match=r"state\[.x.\] changed while"):
            holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)


def test_eager_save_survives_a_thread_that_frees_the_memory(
    write_before_copy: list[Callable[[], None]],
) -> None:
    """A plain read would be a segmentation fault."""
    address = map_memory(4 * NUMEL)
    state = {"x": in_memory((ctypes.c_char * (4 * NUMEL)).from_address(address)).fill_(1)}
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    write_before_copy.append(lambda: libc.munmap(address, 4 * NUMEL) and None)
    with pytest.raises(holdfast.SaveError, match=r"state\[.x.\] changed while"):
        holdfast.save(fresh_uri(), state)


@pytest.mark.parametrize("how", LAZY)
def test_write_is_found_without_tracking(
    how: Any, monkeypatch: pytest.MonkeyPatch, write_before_copy: list[Callable[[], None]]
) -> None:
    """Older kernels, and sandboxes that refuse userfaultfd, cannot track writes."""
    monkeypatch.setattr(lazy, "write_tracker", lambda: None)
    state = {"x": torch.ones(NUMEL), "y": torch.ones(NUMEL)}
    for _ in range(2):
        holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)
        holdfast.fence()
    write_before_copy.append(lambda: state["y"][7:8].add_(1))
    with pytest.raises(holdfast.SaveError, match=r"state\[.y.\] changed while"):
        holdfast.async_save(fresh_uri(), state, lazy=how).wait(60)
    if how:
        write_before_copy.append(lambda: state["y"][7:8].add_(1))
        holdfast.async_save(uri := fresh_uri(), state, lazy=how).wait(60)
        assert holdfast.load(uri)["y"][7] == 2


def test_memory_is_read_without_process_vm_readv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read from the process's file instead; unmapped memory is noticed."""
    monkeypatch.setattr(process_memory, "_process_vm_readv", None)
    source = np.arange(100_000, dtype=np.uint8)
    to = np.zeros_like(source)
    ends = np.array([10, 90_010])
    process_memory.gather(source.ctypes.data + ends, np.array([5, 9_000]), to.ctypes.data)
    assert (to[:9_005] == np.concatenate([source[10:15], source[90_010:99_010]])).all()
    with pytest.raises(process_memory.GoneError):
        process_memory.read(4096, to.ctypes.data, 8)


def test_memory_that_changes_between_two_reads_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stored value is one that two reads found; after a few attempts the capture fails."""
    tensor = torch.zeros(NUMEL)
    monkeypatch.setattr(host_snapshot, "PAUSE_S", 0)
    region = Region(3, tensor.data_ptr(), tensor.nbytes, at_once=True, untracked=True)
    taken = HostSnapshot([region], None)
    tensor.fill_(1)
    taken.confirm()
    tensor.fill_(2)
    found = torch.empty(NUMEL)
    taken.copy(3, 0, tensor.nbytes, found.data_ptr())
    assert found.eq(1).all()
    taken.close()
    plain = host_snapshot.digests_of

    def written(memory: Any, to: int | None = None) -> list[list[bytes]]:
        tensor.add_(1)
        return plain(memory, to)

    monkeypatch.setattr(host_snapshot, "digests_of", written)
    restless = HostSnapshot([region], None)
    with pytest.raises(ChangedError):
        restless.confirm()
    restless.close()


def test_list_of_mappings_equals_the_answers_of_the_kernel(tmp_path: Path) -> None:
    """Older kernels offer only the list."""
    kept = [kind(tmp_path / kind.__name__) for kind in KINDS]
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in kept)
    maps = Path("/proc/self/maps").read_bytes()
    assert listed_files(places, maps) == mapped_files(places)
    assert len(mapped_files(places)) == len(KINDS)  # one is private, one is in two parts


@needs_tracking
def test_mapping_whose_pages_were_all_replaced_is_tracked(tmp_path: Path) -> None:
    """Once all pages of a private mapping are written to, the file no longer matters."""
    tensor = of_a_file(tmp_path / "file")
    region = Region(0, tensor.data_ptr(), tensor.nbytes)
    before = HostSnapshot([region], write_tracker())
    assert before.compares(0)
    before.close()
    tensor.add_(1)
    after = HostSnapshot([region], write_tracker())
    assert not after.compares(0)
    after.close()


def test_threads_read_large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread finds the same digests as several."""
    data = torch.arange(10 << 20, dtype=torch.int32)
    memory = [(data.data_ptr(), data.nbytes - 5), (data.data_ptr(), 3)]
    threaded = process_memory.digests_of(memory)
    monkeypatch.setattr(process_memory, "ALONE", 1 << 30)
    assert process_memory.digests_of(memory) == threaded
    assert [len(part) for part in threaded] == [40, 1]


@pytest.mark.parametrize("how", LAZY)
def test_strided_bools_keep_their_bits(how: Any) -> None:
    """Any byte but 0 is true; a copy by torch would turn it into 1."""
    stored = torch.tensor([[0, 2], [3, 1]], dtype=torch.uint8).view(torch.bool).t()
    holdfast.async_save(uri := fresh_uri(), {"x": stored}, lazy=how).wait(60)
    loaded = holdfast.load(uri)["x"].contiguous().view(torch.uint8)
    assert loaded.tolist() == [[0, 3], [2, 1]]
