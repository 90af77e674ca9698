"""Steps of tensors on a CUDA device, kept in memory that CUDA knows."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.storage.arenas.client import stop
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE, keeper_folders
from holdfast.storage.arenas.memory import reserved_memory
from holdfast.storage.state.pinned import pin

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device on this machine"
)


def test_memory_of_a_slot_is_pinned_until_it_is_unmapped():
    """Torch sees that it is pinned, and registers the memory of the next slot again."""
    torch.zeros(1, device="cuda")
    for _ in range(2):
        memory = reserved_memory(8 << 20)
        host = torch.frombuffer(memory.buffer(0, 8 << 20).view, dtype=torch.uint8)
        assert not host.is_pinned()
        assert pin(memory)
        assert host.is_pinned()
        host.copy_(torch.arange(8 << 20, device="cuda").to(torch.uint8), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(host, torch.arange(8 << 20).to(torch.uint8))
        del host, memory


def test_a_failure_to_register_is_not_raised_by_later_calls():
    """CUDA remembers the error of a thread. Here the memory is already registered."""
    torch.zeros(1, device="cuda")
    memory = reserved_memory(8 << 20)
    assert pin(memory)
    assert not pin(memory)
    assert torch.ones(1 << 20, device="cuda").add_(1).sum().item() == 2 << 20


def test_a_step_of_the_device_is_gone_on_with(tmp_path, monkeypatch):
    """It is captured into pinned memory, and comes back bit for bit."""
    monkeypatch.setenv(KEEPER_DIR_VARIABLE, str(tmp_path / "k"))
    state = {"w": torch.randn(3_000_001, device="cuda"), "b": torch.ones(7, device="cuda")}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    try:
        with holdfast.Checkpointer(tmp_path / "run", keeper="auto", grace_s=None) as run:
            for step in (1, 2, 3):
                handle = run.step(step, state)
                assert handle is not None
                handle.agreed.wait(60)
        for tensor in state.values():
            tensor.zero_()
        with holdfast.Checkpointer(tmp_path / "run", keeper="auto", grace_s=None) as run:
            assert run.resume(state) == 3
            assert run.resumed.tier == "memory"
    finally:
        for folder in keeper_folders(tmp_path / "k"):
            stop(folder)
    assert all(torch.equal(state[name], expected[name]) for name in state)
