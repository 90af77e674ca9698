"""Full devices, misaligned memory and captures, with stand-ins that behave as CUDA does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from support.forked import in_a_fork

import holdfast
from holdfast.storage.runtime.buffers import HostBuffer, host_pool
from holdfast.storage.state.bits import as_bits, pack
from holdfast.storage.state.capture.device_snapshot import BlockSums, DeviceSnapshot
from holdfast.storage.state.capture.write_watch import Watch, Watched, WriteHistory
from holdfast.storage.state.device import copied_to_host, pack_windows, refuse_capture


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
    Watch({0: full}, None, history).end()
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
