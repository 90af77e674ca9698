"""Devices without room, memory that begins anywhere, and captures: what stands in for them here
behaves as CUDA does."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.storage.state.block_sums import BlockSums
from holdfast.storage.state.device import refuse_capture
from holdfast.storage.state.device_snapshot import DeviceSnapshot


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
    """By an error that says when to save."""
    refuse_capture(lambda: False)
    with pytest.raises(holdfast.UsageError, match="capture of a CUDA graph"):
        refuse_capture(lambda: True)


def test_a_chunk_that_the_device_has_no_room_for_is_copied_to_the_host():
    """And is compared there with the sums of the call."""
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
