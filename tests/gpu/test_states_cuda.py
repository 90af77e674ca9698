"""Test states of jobs on a GPU. Tests that need no CUDA of their own run on the host as well."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.forked import in_a_fork

import holdfast

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device on this machine"
)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
LAZY = [False, True, "prove"]
NUMEL = 1 << 18
"""1 MiB in fp32: large enough to be summed on the device."""


def save(path, state, lazy) -> None:
    """Save, or save twice if lazily, because unknown tensors are copied at the call."""
    for _ in range(2 if lazy else 1):
        holdfast.async_save(path, state, lazy=lazy).wait(60)
        holdfast.fence()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` as bytes in host memory, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def layouts(device: str) -> dict[str, torch.Tensor]:
    """Return tensors with unusual layouts."""
    base = torch.randn(NUMEL, device=device)
    square = base.view(512, 512)
    image = torch.randn(4, 8, 32, 32, device=device)
    return {
        "plain": base,
        "same storage": base[: NUMEL // 2],
        "transposed": square.t(),
        "strided": square[::2, ::3],
        "expanded": base[:512].expand(300, 512),
        "offset": base[1:],
        "channels last": image.to(memory_format=torch.channels_last),
        "conjugated": torch.randn(700, 300, dtype=torch.complex64, device=device).conj(),
        "negated": torch.randn(700, dtype=torch.complex64, device=device).conj().imag,
        "empty": torch.empty(0, 3, device=device),
        "scalar": torch.tensor(2.5, device=device),
        "bf16": base.bfloat16(),
        "bool": base > 0,
    }


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("device", DEVICES)
def test_every_layout_comes_back_bit_for_bit(device, lazy, tmp_path):
    """Loads fill tensors on the device and tensors on the host."""
    state = layouts(device)
    save(tmp_path / "c", state, lazy)
    for where in {device, "cpu"}:
        into = {
            name: torch.zeros(t.shape, dtype=t.dtype, device=where) for name, t in state.items()
        }
        holdfast.load(tmp_path / "c", into=into)
        differing = [name for name in state if not torch.equal(bits(into[name]), bits(state[name]))]
        assert differing == []


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
@pytest.mark.parametrize("device", DEVICES)
def test_elements_of_eight_bits_come_back(device, name, lazy, tmp_path):
    """All 256 bit patterns come back, NaN included."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    tensor = (torch.arange(NUMEL, device=device) % 256).to(torch.uint8).view(dtype)
    save(tmp_path / "c", {"w": tensor}, lazy)
    into = {"w": torch.zeros(NUMEL, dtype=torch.uint8, device=device).view(dtype)}
    holdfast.load(tmp_path / "c", into=into)
    assert torch.equal(bits(into["w"]), bits(tensor))


@pytest.mark.parametrize("kind", [{"fused": True}, {"capturable": True}, {"foreach": True}])
@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(device, kind, tmp_path):
    """The steps after a load equal the steps after the save."""
    if device == "cpu" and "capturable" in kind:
        pytest.skip("capturable optimizers are for accelerators")
    net = torch.nn.Linear(64, 64, device=device)
    optim = torch.optim.AdamW(net.parameters(), **kind)

    def train() -> None:
        for _ in range(2):
            net(torch.ones(8, 64, device=device)).square().mean().backward()
            optim.step()
            optim.zero_grad()

    train()
    holdfast.save(tmp_path / "c", {"net": net, "optim": optim})
    train()
    expected = net.weight.detach().clone()
    holdfast.load(tmp_path / "c", into={"net": net, "optim": optim})
    train()
    assert torch.equal(net.weight, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_generators_go_on_where_they_were(device, tmp_path):
    """A generator in the state, and the default one in RNGState, continue their sequences."""
    generator = torch.Generator(device).manual_seed(7)
    holdfast.save(tmp_path / "c", {"g": generator, "rng": holdfast.RNGState()})

    def drawn():
        own = torch.rand(5, device=device, generator=generator)
        return torch.cat([own, torch.rand(5, device=device)])

    expected = drawn()
    holdfast.load(tmp_path / "c", into={"g": generator, "rng": holdfast.RNGState()})
    assert torch.equal(drawn(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_scaler_comes_back(device, tmp_path):
    """Its scale and the steps that it has grown for."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    scaler.scale(torch.ones(1, device=device))
    expected = scaler.state_dict()
    holdfast.save(tmp_path / "c", {"scaler": scaler})
    again = torch.amp.GradScaler(device)
    holdfast.load(tmp_path / "c", into={"scaler": again})
    assert again.state_dict() == expected


@needs_cuda
def test_copies_from_and_to_the_device_are_timed(tmp_path):
    """They are a stage of the save and of the load, of as many bytes as were captured and read."""
    state = {"w": torch.zeros(1 << 24, device="cuda")}
    saved = holdfast.save(tmp_path / "c", state)
    reports = []
    holdfast.load(tmp_path / "c", into=state, on_report=reports.append)
    stages = saved.stages, reports[0].stages
    copied = [of["device_copy"].nbytes for of in stages]
    assert copied == [stages[0]["capture"].nbytes, stages[1]["read"].nbytes]


@needs_cuda
def test_an_asynchronous_save_keeps_the_values_of_the_call(tmp_path):
    """Writes by the device after async_save has returned are not in the checkpoint."""
    tensor = torch.ones(1 << 24, device="cuda")
    handle = holdfast.async_save(tmp_path / "c", {"w": tensor})
    tensor.zero_()
    handle.wait(60)
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture ``work`` in a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@needs_cuda
@pytest.mark.parametrize("lazy", LAZY)
def test_replays_of_a_graph_are_saved_and_loads_reach_the_graph(lazy, tmp_path):
    """Saves between capture and replays store the tensor; a replay continues from a load."""
    tensor = torch.zeros(NUMEL, device="cuda")
    graph = graph_of(lambda: tensor.add_(1))
    tensor.zero_()
    save(tmp_path / "before", {"w": tensor}, lazy)
    for _ in range(3):
        graph.replay()
    save(tmp_path / "after", {"w": tensor}, lazy)
    graph.replay()
    assert holdfast.load(tmp_path / "before")["w"].eq(0).all()
    assert holdfast.load(tmp_path / "after")["w"].eq(3).all()
    holdfast.load(tmp_path / "after", into={"w": tensor})
    graph.replay()
    assert tensor.eq(4).all()


@needs_cuda
@pytest.mark.parametrize("lazy", LAZY)
def test_a_save_within_a_capture_is_refused_and_the_capture_goes_on(lazy, tmp_path):
    """The error says when to save; the graph is whole."""
    tensor = torch.zeros(NUMEL, device="cuda")
    tensor.add_(1)  # its kernel is loaded before the capture
    tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(holdfast.UsageError, match="capture of a CUDA graph"):
            holdfast.async_save(tmp_path / "c", {"w": tensor}, lazy=lazy)
    graph.replay()
    assert tensor.eq(1).all()


@needs_cuda
@pytest.mark.parametrize("fenced", [True, False])
def test_an_optimizer_is_captured_beside_a_lazy_save(fenced, tmp_path):
    """In the usual mode this requires a fence. In the mode that leaves other threads alone, it
    works at any time. Within the capture, the optimizer's hook does not call the device."""
    net = torch.nn.Linear(1024, 1024, device="cuda")
    optim = torch.optim.AdamW(net.parameters(), capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net(torch.ones(8, 1024, device="cuda")).square().mean().backward()
        for _ in range(3):
            optim.step()
    torch.cuda.current_stream().wait_stream(side)
    save(tmp_path / "warm", {"net": net, "optim": optim}, True)
    expected = net.weight.detach().clone()
    handle = holdfast.async_save(tmp_path / "c", {"net": net, "optim": optim}, lazy=True)
    if fenced:
        holdfast.fence()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global" if fenced else "thread_local"):
        optim.step()
    holdfast.fence()
    graph.replay()
    handle.wait(60)
    assert torch.equal(holdfast.load(tmp_path / "c")["net"]["weight"], expected.cpu())
    assert not torch.equal(net.weight, expected)


def missing_for_compile() -> str:
    """Return what torch.compile needs for a GPU and this machine lacks, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "a C compiler"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else str(header)


@needs_cuda
@pytest.mark.skipif(bool(missing_for_compile()), reason=f"no {missing_for_compile()}")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_module_is_saved_under_the_names_of_its_own(mode, tmp_path):
    """After a load, it trains on as the plain module does."""
    net = torch.nn.Linear(128, 128, device="cuda")
    compiled = torch.compile(net, mode=mode)
    for _ in range(3):
        net.zero_grad()  # a gradient may lie in memory of a graph, which the next step reuses
        compiled(torch.ones(4, 128, device="cuda")).sum().backward()
    save(tmp_path / "c", {"net": compiled}, True)
    expected = net.weight.detach().clone()
    plain = torch.nn.Linear(128, 128, device="cuda")
    holdfast.load(tmp_path / "c", into={"net": plain})
    assert torch.equal(plain.weight, expected)


@needs_cuda
@pytest.mark.parametrize("lazy", LAZY)
def test_pinned_host_memory_that_the_device_fills_is_saved_as_filled(lazy, tmp_path):
    """Offloaded optimizers do this: the copy to the host is still queued at the call."""
    device = torch.ones(NUMEL, device="cuda")
    pinned = torch.zeros(NUMEL, pin_memory=True)
    save(tmp_path / "warm", {"w": pinned}, lazy)
    torch.cuda._sleep(200_000_000)
    pinned.copy_(device, non_blocking=True)
    holdfast.async_save(tmp_path / "c", {"w": pinned}, lazy=lazy).wait(60)
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()


@pytest.fixture
def filled():
    """Leave torch's allocator without device memory: it gets no more, and all its memory is in use.
    The driver keeps some of its own, which it needs to load kernels."""
    hoard = []

    def fill() -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        nbytes = 1 << 30
        while nbytes >= 512:
            try:
                hoard.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                nbytes //= 2

    try:
        yield fill
    finally:
        hoard.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@needs_cuda
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("when", ["before the call", "after the call"])
def test_a_save_succeeds_on_a_device_without_memory(when, lazy, filled, tmp_path):
    """Sums, packing and conjugation on the device are replaced by copies in host memory."""
    tensor = torch.arange(NUMEL * 64, device="cuda", dtype=torch.int32)
    complex_ = torch.randn(512, 512, dtype=torch.complex64, device="cuda")
    state = {"w": tensor, "t": tensor[:NUMEL].clone().view(512, 512).t(), "c": complex_.t().conj()}
    save(tmp_path / "warm", state, lazy)
    expected = {name: bits(value) for name, value in state.items()}
    if when == "before the call":
        filled()
    handle = holdfast.async_save(tmp_path / "c", state, lazy=lazy)
    if when == "after the call":
        filled()
    handle.wait(60)
    holdfast.fence()
    found = holdfast.load(tmp_path / "c")
    assert [name for name in state if not torch.equal(bits(found[name]), expected[name])] == []
    tensor.add_(1)
    torch.cuda.synchronize()


@needs_cuda
def test_segments_that_expand_are_read(tmp_path):
    """They belong to the allocator of a process that asks for them."""
    code = (
        "import sys, torch, holdfast\n"
        "t = torch.arange(1 << 22, device='cuda')\n"
        "for n in range(2):\n"
        "    holdfast.async_save(sys.argv[1], {'w': t}, lazy=True).wait(60)\n"
        "    holdfast.fence()\n"
        "assert torch.equal(holdfast.load(sys.argv[1])['w'], t.cpu())\n"
    )
    conf = "expandable_segments:True"
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}
    command = [sys.executable, "-c", code, tmp_path / "c"]
    subprocess.run(command, env=environment, check=True, timeout=60)


@needs_cuda
def test_a_child_that_was_forked_after_cuda_began_saves_host_memory(tmp_path):
    """Workers of data loaders cannot use CUDA, and a save of host memory does not need it."""
    tensor = torch.ones(NUMEL, device="cuda")
    save(tmp_path / "before", {"w": tensor}, True)

    def refused(state: object) -> bool:
        try:
            holdfast.save(tmp_path / "refused", state)
        except holdfast.UsageError as error:
            return "needs CUDA" in str(error)
        return False

    def child() -> None:
        holdfast.save(tmp_path / "c", {"w": torch.ones(NUMEL)})
        assert refused({"w": tensor})
        assert refused({"rng": holdfast.RNGState()})

    assert in_a_fork(child) == ""
    assert holdfast.load(tmp_path / "c")["w"].eq(1).all()
