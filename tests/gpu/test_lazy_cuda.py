"""Lazy saves of tensors on a CUDA device, on their own stream."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.planner.image import CHUNK_NBYTES
from holdfast.storage.runtime.buffers import host_pool
from holdfast.storage.state.device import Queued, allocate_pinned, beside, devices_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device on this machine"
)

CYCLES = 2_000_000_000
"""Cycles that the device sleeps: about a second."""


@pytest.mark.parametrize(
    "kind", [{"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}]
)
def test_an_optimizer_on_the_device_waits_for_the_copy(kind, tmp_path):
    """The save stores the state of the call with any kernels of the optimizer."""
    net = torch.nn.Linear(2000, 2000, device="cuda")
    optim = torch.optim.AdamW(net.parameters(), **kind)
    for _ in range(2):
        net(torch.randn(8, 2000, device="cuda")).square().mean().backward()
        optim.step()
    expected = net.weight.detach().clone()
    handle = holdfast.async_save(tmp_path / "c", {"net": net, "optim": optim}, lazy=True)
    for _ in range(3):
        optim.step()
    handle.wait(60)
    assert torch.equal(holdfast.load(tmp_path / "c")["net"]["weight"], expected.cpu())
    assert not torch.equal(net.weight, expected)


def test_what_was_queued_before_the_call_is_in_the_save(tmp_path):
    """The trainer may use any stream, and the device may not have reached the write yet."""
    tensor = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES // 4)
        tensor.add_(1)
        handle = holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=True)
    handle.wait(60)
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()


def test_what_is_queued_after_the_call_is_not_waited_for(tmp_path):
    """The copy ends while the trainer's stream is still at work: it waits for its own only."""
    tensor = torch.ones(1 << 22, device="cuda")
    holdfast.save(tmp_path / "warm", {"w": tensor})
    torch.cuda.synchronize()
    handle = holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=True)
    torch.cuda._sleep(CYCLES * 5)
    after = torch.cuda.Event()
    after.record()
    handle.captured.wait(60)
    assert not after.query()
    handle.wait(60)
    after.synchronize()
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()


def test_copies_go_into_pinned_memory_that_is_kept(tmp_path):
    """Copies go straight to their place in the image, and the next save reuses the memory."""
    tensor = torch.ones(12 << 20, device="cuda")
    holdfast.release_memory()
    for _ in range(2):
        holdfast.async_save(tmp_path / "c", {"w": tensor}).wait(60)
    pool = host_pool(CHUNK_NBYTES, allocate_pinned)
    kept = [pool.take() for _ in range(pool.free_nbytes // CHUNK_NBYTES)]
    assert len(kept) in range(3, 6)
    assert all(torch.frombuffer(buffer.view, dtype=torch.uint8).is_pinned() for buffer in kept)
    assert all(buffer.address % 4096 == 0 for buffer in kept)
    holdfast.release_memory()


def test_our_work_is_on_a_stream_of_its_own():
    """There is one stream per device, and it is not the default one."""
    devices = devices_of([torch.zeros(3, device="cuda"), torch.zeros(3)])
    Queued.now(devices).wait()
    found = []
    for _ in range(2):
        with beside(devices):
            found.append(torch.cuda.current_stream())
    assert found[0] == found[1] != torch.cuda.default_stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_write_on_the_device_is_found(tmp_path):
    """A write through ``.data`` right after the call fails the save; later ones copy at the call."""
    tensor = torch.zeros(1 << 22, device="cuda")
    for _ in range(2):
        holdfast.async_save(tmp_path / "first", {"w": tensor}, lazy=True).wait(60)
        holdfast.fence()
    handle = holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=True)
    tensor.data.add_(1)
    try:
        handle.wait(60)
    except holdfast.SaveError as error:
        assert "changed while it was being copied" in str(error)
        holdfast.fence()
        handle = holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=True)
        tensor.data.add_(1)
        handle.wait(60)
        assert holdfast.load(tmp_path / "c")["w"].eq(1).all()
    else:
        assert holdfast.load(tmp_path / "c")["w"].eq(0).all()


def test_a_storage_on_the_device_that_is_freed_is_not_read(tmp_path):
    """The save fails by name, or has copied the tensor before; CUDA still works."""
    tensor = torch.ones(1 << 24, device="cuda")
    for _ in range(2):
        holdfast.async_save(tmp_path / "first", {"w": tensor}, lazy=True).wait(60)
        holdfast.fence()
    handle = holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=True)
    tensor.untyped_storage().resize_(0)
    try:
        handle.wait(60)
    except holdfast.SaveError as error:
        assert "changed while it was being copied" in str(error)
    else:
        assert holdfast.load(tmp_path / "c")["w"].eq(1).all()
    torch.cuda.synchronize()
