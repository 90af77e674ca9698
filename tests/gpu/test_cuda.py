"""Tensors on a CUDA device: saved from there, loaded to there."""

from __future__ import annotations

import pytest
import torch

import holdfast

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device on this machine"
)


def test_cuda_tensors_come_back_bit_for_bit(tmp_path):
    """A state on the device, contiguous or not, is saved, and fills tensors on the device."""
    state = {
        "w": torch.randn(1000, 301, device="cuda"),
        "t": torch.randn(64, 32, device="cuda").t(),
        "h": torch.randn(7).half().cuda(),
    }
    holdfast.save(tmp_path / "c", state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(tmp_path / "c", into=into)
    assert all(torch.equal(into[name], state[name]) and into[name].is_cuda for name in state)


def test_copies_from_and_to_the_device_are_timed(tmp_path):
    """They are a stage of the save and of the load, of as many bytes as were captured and read."""
    state = {"w": torch.zeros(1 << 24, device="cuda")}
    saved = holdfast.save(tmp_path / "c", state)
    reports = []
    holdfast.load(tmp_path / "c", into=state, on_report=reports.append)
    stages = saved.stages, reports[0].stages
    copied = [of["device_copy"].nbytes for of in stages]
    assert copied == [stages[0]["capture"].nbytes, stages[1]["read"].nbytes]


def test_an_asynchronous_save_keeps_the_values_of_the_call(tmp_path):
    """What the device writes after async_save has returned is not in the checkpoint."""
    tensor = torch.ones(1 << 24, device="cuda")
    handle = holdfast.async_save(tmp_path / "c", {"w": tensor})
    tensor.zero_()
    handle.wait(60)
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()


def test_random_generators_of_the_device_go_on_where_they_were(tmp_path):
    """RNGState brings back the CUDA generator."""
    holdfast.save(tmp_path / "c", {"rng": holdfast.RNGState()})
    expected = torch.randn(5, device="cuda")
    holdfast.load(tmp_path / "c", into={"rng": holdfast.RNGState()})
    assert torch.equal(torch.randn(5, device="cuda"), expected)
