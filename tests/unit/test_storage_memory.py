"""Test saves of memory that others write to, or that is full, misaligned or on a device."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri
from support.forked import in_a_fork
from support.inside import around_copies

import holdfast
from holdfast.storage.runtime.buffers import HostBuffer, host_pool
from holdfast.storage.state.bits import as_bits, pack
from holdfast.storage.state.capture import host_snapshot, lazy, process_memory
from holdfast.storage.state.capture.device_snapshot import BlockSums, DeviceSnapshot
from holdfast.storage.state.capture.host_snapshot import ChangedError, HostSnapshot, Region
from holdfast.storage.state.capture.write_tracking import (
    PAGE_NBYTES,
    listed_files,
    mapped_files,
    write_tracker,
)
from holdfast.storage.state.capture.write_watch import Watch, Watched, WriteHistory
from holdfast.storage.state.device import copied_to_host, pack_windows, refuse_capture

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
    """Return a mapping of a file whose middle is mapped a second time."""
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


def test_memory_is_read_without_calls_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read from the process's file instead; unmapped memory is noticed."""
    monkeypatch.setattr(process_memory, "_write_to", None)
    source = np.arange(100_000, dtype=np.uint8)
    to = np.zeros_like(source)
    ends = np.array([10, 90_010])
    process_memory.gather(source.ctypes.data + ends, np.array([5, 9_000]), to.ctypes.data)
    assert (to[:9_005] == np.concatenate([source[10:15], source[90_010:99_010]])).all()
    with pytest.raises(process_memory.GoneError):
        process_memory.read(4096, to.ctypes.data, 8)


def test_memory_is_read_into_memory_that_the_kernel_cannot_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device's pinned memory may be such: it is no reason to take the source for gone."""

    def refused(*_: object) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    monkeypatch.setattr(process_memory, "_write_to", refused)
    source = np.arange(100_000, dtype=np.uint8)
    to = np.zeros_like(source)
    process_memory.read(source.ctypes.data, to.ctypes.data, len(to))
    assert (to == source).all()
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
    assert not before.has_segments(0)
    before.close()
    tensor.add_(1)
    after = HostSnapshot([region], write_tracker())
    assert after.has_segments(0)
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


NBYTES = 256 << 20
COMPACT = "/proc/sys/vm/compact_memory"


def in_small_pages() -> mmap.mmap:
    """Return written memory in pages of 4 KiB."""
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(bytes([7]) * NBYTES)
    return memory


def compact_until(over: threading.Event) -> None:
    """Fragment memory, and make the kernel move pages together, again and again."""
    while not over.is_set():
        with in_small_pages() as memory:
            for at in range(0, NBYTES, 16 * PAGE_NBYTES):
                memory.madvise(mmap.MADV_DONTNEED, at, 8 * PAGE_NBYTES)
            with open(COMPACT, "w") as file:
                file.write("1")


@pytest.mark.drill
@pytest.mark.skipif(write_tracker() is None, reason="writes cannot be tracked on this machine")
@pytest.mark.skipif(not os.access(COMPACT, os.W_OK), reason="only root may compact memory")
def test_pages_that_the_kernel_moves_stay_clean() -> None:
    """A page that is armed while the kernel moves it must not lose its mark."""
    tracker = write_tracker()
    assert tracker is not None
    memory = in_small_pages()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = start, start + NBYTES
    over = threading.Event()
    compacting = threading.Thread(target=compact_until, args=(over,))
    compacting.start()
    try:
        ends_s = time.monotonic() + 30
        while time.monotonic() < ends_s:
            tracker.arm(*pages)
            assert tracker.is_clean(*pages)
            time.sleep(0.02)
            assert tracker.is_clean(*pages)
            tracker.disarm(*pages)
    finally:
        over.set()
        compacting.join()


@pytest.mark.parametrize("begin", range(8))
def test_sums_are_of_words_that_are_aligned_in_memory(begin):
    """A tensor from another library has offset 0 in a storage that may begin anywhere."""
    memory = bytearray(20_000 + begin)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
    assert data.storage_offset() == 0
    sums = BlockSums.of(data)
    assert data.data_ptr() % sums.word_nbytes == 0
    assert bool(sums.same(0, data.clone()))
    whole[begin + 4100] += 1
    assert not bool(sums.same(0, data.clone()))


def test_a_save_within_a_capture_is_refused():
    """A save during a capture is refused, and the error says when to save."""
    refuse_capture(lambda: False)
    with pytest.raises(holdfast.UsageError, match="capture of a CUDA graph"):
        refuse_capture(lambda: True)


def test_a_chunk_that_the_device_has_no_room_for_is_copied_to_the_host():
    """A chunk without room on the device is copied to the host and compared with its sums there."""
    tensor = torch.arange(5_000_000)
    refused = []

    def empty(nbytes: int, **options: object) -> torch.Tensor:
        if not refused:
            refused.append(nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(nbytes, **options)

    snapshot = DeviceSnapshot({0: tensor}, empty)
    copied, doubt = snapshot.staged(0, 4096, 9_000_000)
    assert refused
    assert bool(doubt.same)
    assert torch.equal(copied, tensor.view(torch.uint8)[4096:9_000_000])
    tensor[1000] += 1
    assert not bool(snapshot.staged(0, 4096, 9_000_000)[1].same)


def test_cuda_is_not_asked_about_captures_where_it_does_not_run(monkeypatch, tmp_path):
    """A forked child does not ask CUDA about captures: the question itself raises there."""

    def ask() -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask)
    refuse_capture()
    holdfast.fence()
    holdfast.save(tmp_path / "c", {"w": torch.ones(3)})


BASE = torch.randn(40, 30)
LAYOUTS = {
    "plain": BASE,
    "transposed": BASE.t(),
    "strided": BASE[1::3, ::7],
    "expanded": BASE[0].expand(5, 30),
    "one element": BASE[3:4, 2:3],
    "scalar": BASE[1, 1],
    "empty": BASE[:0].t(),
    "conjugated": torch.randn(4, 6, dtype=torch.complex64).t().conj(),
    "negated": torch.randn(7, dtype=torch.complex64).conj().imag,
    "eight bits": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(16, 16).t(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_memory_is_copied_where_a_device_has_no_room_to_pack(name):
    """The copy has the bits of every layout, whether they are resolved or not."""
    tensor = LAYOUTS[name]
    copied = copied_to_host(tensor)
    assert not copied.is_conj()
    assert not copied.is_neg()
    assert torch.equal(as_bits(copied), as_bits(tensor.contiguous()))


def test_windows_of_a_full_device_are_packed_on_the_host():
    """Windows are packed on the host when the device is full, even between two windows."""
    windows = [BASE[:20].t(), BASE[20:, ::2]]
    refused = []

    def pack_once(parts: Iterable[torch.Tensor], to: torch.Tensor) -> None:
        if not refused:
            pack([next(iter(parts))], to[: windows[0].nbytes])
            refused.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        pack(parts, to)

    into = torch.zeros(sum(window.nbytes for window in windows), dtype=torch.uint8)
    pack_windows(windows, into, pack_once)
    expected = torch.cat([window.flatten() for window in windows])
    assert torch.equal(into.view(torch.float32), expected)


def test_a_watch_that_finds_no_room_for_sums_learns_nothing():
    """A watch without room for sums ends quietly, since the optimizer's step must not fail."""

    class Full(Watched):
        def bytes(self) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    history = WriteHistory()
    known_as = ("w", BASE.nbytes)
    full = Full(known_as, BASE, BlockSums.of(BASE.view(torch.uint8).flatten()))
    Watch({0: full}, HostSnapshot([], None), history).end()
    assert history.is_early(known_as) is None


@pytest.fixture
def forked_after_cuda(monkeypatch):
    """Make torch report a child that was forked after CUDA started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)


@pytest.mark.usefixtures("forked_after_cuda")
def test_random_generators_of_a_device_are_refused_in_a_forked_child(tmp_path):
    """A forked child refuses device generators before it sets any generator."""
    stored = holdfast.RNGState()
    with pytest.raises(holdfast.UsageError, match=r"the state needs CUDA.*forked subprocess"):
        holdfast.save(tmp_path / "c", {"rng": stored})
    before = torch.get_rng_state()
    other = {"torch": torch.zeros_like(before), "cuda": [before]}
    with pytest.raises(holdfast.UsageError, match="rather than fork"):
        stored.load_state_dict(other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("forked_after_cuda")
def test_host_memory_is_saved_in_a_forked_child(tmp_path):
    """Host memory is saved and loaded in a forked child without CUDA."""
    holdfast.save(tmp_path / "c", {"w": torch.ones(3)})
    into = {"w": torch.zeros(3)}
    holdfast.load(tmp_path / "c", into=into)
    assert into["w"].eq(1).all()


def test_a_forked_child_does_not_free_its_parents_pinned_buffers():
    """A forked child keeps its parent's pinned buffers: freeing them could crash it in CUDA."""
    freed = []

    def allocate(nbytes: int) -> HostBuffer:
        memory = np.zeros(nbytes, np.uint8)
        weakref.finalize(memory, freed.append, nbytes)
        return HostBuffer(memory.data, memory.ctypes.data)

    pool = host_pool(4096, allocate)
    pool.give(pool.take())
    del pool

    def child() -> None:
        assert host_pool(4096, allocate).free_nbytes == 0
        assert not freed

    assert in_a_fork(child) == ""
