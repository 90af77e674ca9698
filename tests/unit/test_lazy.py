"""Test lazy saves: each stores the state as of the call, or fails and names a tensor."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, raw
from support.inside import around_copies, around_image_writes
from torch import nn

import holdfast
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.capture import lazy, process_memory
from holdfast.storage.state.capture.lazy import LazyCapture, hook_optimizers
from holdfast.storage.state.capture.switch_interval import SWITCH_INTERVAL_S
from holdfast.storage.state.capture.write_tracking import write_tracker
from holdfast.storage.state.capture.write_watch import write_history

pytestmark = pytest.mark.usefixtures("no_write_history")
needs_tracking = pytest.mark.skipif(
    write_tracker() is None, reason="writes cannot be tracked on this machine"
)


class Gate:
    """Holds back all copying while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.at_fence = False

    def close(self) -> None:
        self.at_fence = False
        self.open.clear()
        self.reached.clear()

    def open_at_fence(self) -> None:
        self.at_fence = True

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return a gate through which all copying passes."""
    made, wait = Gate(), LazyCapture.wait

    def waiting(self: LazyCapture) -> None:
        if made.at_fence:
            made.open.set()
        wait(self)

    def gated(copy: Callable[[], None], start: int) -> None:
        made.pass_through()
        copy()

    around_copies(monkeypatch, gated)
    monkeypatch.setattr(LazyCapture, "wait", waiting)
    yield made
    made.open.set()
    holdfast.fence()


def introduce(state: Any) -> None:
    """Save a state for the first time. Later saves copy it in the background."""
    holdfast.async_save(fresh_uri(), state, lazy=True).wait(60)
    holdfast.fence()


def save_halted(gate: Gate, state: Any) -> tuple[str, holdfast.SaveHandle]:
    """Begin a save that cannot copy yet, of a state that was saved before."""
    introduce(state)
    gate.close()
    uri = fresh_uri()
    return uri, holdfast.async_save(uri, state, lazy=True)


class Net(nn.Module):
    """Parameters, and buffers that a forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 300)
        self.norm = nn.BatchNorm1d(300)
        self.last = nn.Linear(300, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def backward(net: nn.Module, seed: int) -> None:
    """Run a forward and a backward pass."""
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(seed))
    net(x).square().mean().backward()


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that a load of an eager save gives."""
    holdfast.save(uri := fresh_uri(), state)
    return holdfast.load(uri)


KINDS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "foreach": lambda n: [torch.optim.AdamW(n.parameters(), foreach=True)],
    "one a parameter": lambda n: [torch.optim.Adam([p]) for p in n.parameters()],
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_and_the_save_is_of_the_call(kind: str, gate: Gate) -> None:
    """Gradients accumulate and batch norm counts; steps of any optimizer wait for the copies."""
    net = Net()
    optims = KINDS[kind](net)
    state = {"net": net, "step": 3, **{f"optim{i}": o for i, o in enumerate(optims)}}
    backward(net, 0)
    for optim in optims:
        optim.step()
    expected = snapshot(state)
    uri, handle = save_halted(gate, state)
    state["step"] = 4
    backward(net, 1)
    backward(net, 2)
    assert not handle.captured.done()
    gate.open_at_fence()
    for optim in optims:
        optim.step()
    assert handle.captured.done()
    handle.wait(60)
    assert difference(expected, holdfast.load(uri)) is None
    assert difference(expected, snapshot(state)) is not None


def test_call_returns_before_large_tensors_are_copied(gate: Gate) -> None:
    """Buffers, arrays and small tensors are copied at the call; nothing large is."""
    state = {
        "norm": nn.BatchNorm1d(50_000),
        "array": np.arange(50_000),
        "small": torch.ones(100),
        "large": torch.ones(100_000),
    }
    uri, handle = save_halted(gate, state)
    state["norm"].running_mean.fill_(7)
    state["array"][:] = 7
    state["small"].fill_(7)
    assert not handle.captured.done()
    gate.open.set()
    handle.wait(60)
    found = holdfast.load(uri)
    assert not found["norm"]["running_mean"].any()
    assert found["large"].eq(1).all()
    assert (found["array"] == np.arange(50_000)).all()
    assert found["small"].eq(1).all()


def test_write_before_the_fence_fails_the_save(gate: Gate) -> None:
    """The error names the tensor, nothing is committed, and the next fence does not wait."""
    ema = {"shadow": torch.ones(100_000)}
    uri, handle = save_halted(gate, {"ema": ema})
    ema["shadow"].mul_(0.9)
    gate.open.set()
    with pytest.raises(
        holdfast.SaveError,
        match=r"state\[.ema.\]\[.shadow.\] changed while it was being copied.*fence",
    ):
        handle.wait(60)
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(uri)
    holdfast.fence()


def test_many_tensors_are_read_by_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retaking the interpreter's lock for each tensor would take longer than the reads."""
    state = {f"t{i}": torch.full((20_000 + i,), float(i)) for i in range(300)}
    introduce(state)
    reads: list[int] = []
    plain = process_memory._copy

    def counted(local: bytes, remote: bytes, segments: int) -> int:
        reads.append(segments)
        return plain(local, remote, segments)

    monkeypatch.setattr(process_memory, "_copy", counted)
    holdfast.async_save(uri := fresh_uri(), state, lazy=True).wait(60)
    assert len(reads) < 20
    assert sum(reads) > 300
    assert difference(state, holdfast.load(uri)) is None


def test_captured_is_done_when_the_last_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of three chunks is still being copied, ``captured`` is not done."""
    state = {"x": torch.zeros(10 << 20)}  # three chunks
    introduce(state)
    may_end, others = threading.Event(), threading.Semaphore(0)

    def held(copy: Callable[[], None], start: int) -> None:
        copy()
        if start == 0:
            assert may_end.wait(60)
        else:
            others.release()

    around_copies(monkeypatch, held)
    handle = holdfast.async_save(fresh_uri(), state, lazy=True)
    for _ in range(2):
        assert others.acquire(timeout=60)
    with pytest.raises(holdfast.DeadlineError):
        handle.captured.wait(0.2)
    may_end.set()
    handle.captured.wait(60)
    handle.wait(60)


def test_threads_take_short_turns_while_copying(gate: Gate) -> None:
    """The switch interval is short until the last capture has ended, also if one fails."""
    before_s, states = sys.getswitchinterval(), [{"x": torch.zeros(100_000)} for _ in range(2)]
    introduce(states[0])
    gate.close()
    handles = [holdfast.async_save(fresh_uri(), state, lazy=True) for state in states]
    assert gate.reached.wait(60)
    assert pytest.approx(sys.getswitchinterval()) == SWITCH_INTERVAL_S
    assert before_s > SWITCH_INTERVAL_S
    states[0]["x"].add_(1)
    gate.open.set()
    with pytest.raises(holdfast.SaveError, match="changed while"):
        handles[0].wait(60)
    handles[1].wait(60)
    holdfast.fence()
    assert sys.getswitchinterval() == pytest.approx(before_s)


@pytest.mark.nightly(4)
def test_garbage_collector_rests_during_the_call(gate: Gate) -> None:
    """The garbage collector would scan all objects again and again, and find nothing."""
    state = {str(i): torch.zeros(1) for i in range(5_000)}
    introduce(state)
    gate.close()
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.current_thread() is threading.main_thread():
            collections.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        handle = holdfast.async_save(fresh_uri(), state, lazy=True)
    finally:
        gc.callbacks.remove(note)
    assert len(collections) <= 2  # one before and one after, if at all
    assert gc.isenabled()
    gate.open.set()
    handle.wait(60)


@pytest.mark.parametrize("how", ["fence", "wait", "done", "await"])
def test_state_may_be_written_to_once_captured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the fence, or ``captured`` in any form, writes do not reach the checkpoint."""
    state = {"x": torch.zeros(100_000)}
    written = threading.Event()

    async def held(write: Callable[[], Awaitable[Any]], writer: object) -> Any:
        digests = await write()
        await asyncio.to_thread(written.wait, 60)
        return digests

    around_image_writes(monkeypatch, held)
    handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
    if how == "fence":
        holdfast.fence()
    elif how == "wait":
        handle.captured.wait(60)
    elif how == "await":

        async def ask() -> None:
            await handle.captured

        asyncio.run(ask())
    else:
        while not handle.captured.done():
            pass
    state["x"].add_(1)
    written.set()
    handle.wait(60)
    assert not holdfast.load(uri)["x"].any()


def test_offloaded_and_inference_tensors(gate: Gate) -> None:
    """Master copies and inference tensors are stored as of the call.

    The optimizer of the masters waits although it is not in the state.
    """
    net, master = nn.Linear(300, 300).bfloat16(), torch.randn(300, 300)
    optim = torch.optim.AdamW([master], fused=True)
    with torch.inference_mode():
        frozen = torch.ones(100_000)
    state = {"net": net, "master": master, "frozen": frozen}
    introduce(state)
    with torch.inference_mode():
        frozen.fill_(1)
    gate.close()
    handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
    before = master.clone()
    with torch.inference_mode():
        frozen.zero_()
    master.grad = torch.ones_like(master)
    gate.open_at_fence()
    optim.step()
    with torch.no_grad():
        net.weight.copy_(master)
    handle.wait(60)
    found = holdfast.load(uri)
    assert torch.equal(found["master"], before)
    assert found["frozen"].eq(1).all()


def test_load_waits_for_copies(gate: Gate) -> None:
    """A load into the state waits, so that it does not overwrite data that is being copied."""
    state = {"x": torch.zeros(100_000)}
    holdfast.save(other := fresh_uri(), {"x": torch.ones(100_000)})
    uri, handle = save_halted(gate, state)
    gate.open_at_fence()
    holdfast.load(other, into=state)
    handle.wait(60)
    assert not holdfast.load(uri)["x"].any()
    assert state["x"].all()


def test_forked_child_does_not_wait_for_copies(gate: Gate) -> None:
    """Copies of the parent never end in a child."""
    state = {"x": torch.zeros(100_000)}
    before_s = sys.getswitchinterval()
    _, handle = save_halted(gate, state)
    assert gate.reached.wait(60)
    child = os.fork()
    if child == 0:
        holdfast.fence()
        os._exit(0 if sys.getswitchinterval() == before_s else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    gate.open.set()
    handle.wait(60)


def test_hooked_optimizer_can_be_copied() -> None:
    """An optimizer can be copied after a lazy save, as some EMA helpers do."""
    net = Net()
    optim = torch.optim.AdamW(net.parameters())
    introduce({"net": net, "optim": optim})
    twin = copy.deepcopy(optim)
    backward(net, 0)
    optim.step()
    twin.step()
    assert len(optim.state) == 6


@pytest.mark.nightly(4)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own
def test_compiled_step_waits(gate: Gate) -> None:
    """A step compiled after the first lazy save calls the hook."""
    hook_optimizers()
    net = Net()
    optim = torch.optim.AdamW(net.parameters())
    step = torch.compile(optim.step, backend="eager")
    for seed in (0, 1):
        backward(net, seed)
        step()
    for seed in (2, 3):
        state = {"net": net, "optim": optim}
        expected = snapshot(state)
        uri, handle = save_halted(gate, state)
        net.zero_grad()
        backward(net, seed)
        gate.open_at_fence()
        step()
        assert handle.captured.done()
        handle.wait(60)
        found = holdfast.load(uri)["net"]["first.weight"]
        assert torch.equal(found, expected["net"]["first.weight"])
        assert not torch.equal(found, net.first.weight)


class Averaged:
    """Weights that are swapped in for an evaluation, through ``.data``."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))

    def state(self) -> dict[str, Any]:
        return dict(self.net.state_dict())

    def train(self) -> None:
        kept = [p.detach().clone() for p in self.net.parameters()]
        for p in self.net.parameters():
            p.data.copy_(torch.full_like(p, -7))
        self.net(torch.ones(1, 200))
        for p, k in zip(self.net.parameters(), kept, strict=True):
            p.data.copy_(k)


def bits(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of tensors by name."""
    return {name: raw(tensor.clone()) for name, tensor in state.items()}


def test_early_writes_do_not_reach_the_save(gate: Gate) -> None:
    """A tensor that is written to from the first save on is copied at the call."""
    training = Averaged()
    for _ in range(3):
        expected = bits(training.state())
        gate.close()
        handle = holdfast.async_save(uri := fresh_uri(), training.state(), lazy=True)
        training.train()
        gate.open.set()
        handle.wait(60)
        assert bits(holdfast.load(uri)) == expected


@needs_tracking
def test_first_early_write_costs_one_save(gate: Gate) -> None:
    """One save fails; later ones copy at the call all that was written to."""
    training = Averaged()
    introduce(training.state())
    outcomes = []
    for _ in range(3):
        gate.close()
        expected = bits(training.state())
        handle = holdfast.async_save(uri := fresh_uri(), training.state(), lazy=True)
        training.train()
        gate.open.set()
        try:
            handle.wait(60)
            assert bits(holdfast.load(uri)) == expected
            outcomes.append("saved")
        except holdfast.SaveError as error:
            assert "changed while it was being copied" in str(error)
            outcomes.append("failed")
        training.train()
    assert outcomes == ["failed", "saved", "saved"]


def test_without_tracking_host_memory_is_copied_at_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small states are cloned, large ones make the call wait; both may be written to at once."""
    monkeypatch.setattr(lazy, "write_tracker", lambda: None)
    for numel in (100_000, 12 << 20):
        state = {"x": torch.zeros(numel)}
        for expected in range(2):
            handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
            state["x"].data.add_(1)
            handle.wait(60)
            assert holdfast.load(uri)["x"].eq(expected).all()


@needs_tracking
def test_optimizer_steps_are_not_early_writes() -> None:
    """After an optimizer's step, the next save copies in the background."""
    weight = nn.Parameter(torch.zeros(100_000))
    optim = torch.optim.SGD([weight], 1.0)
    weight.grad = torch.ones_like(weight)
    for _ in range(2):
        holdfast.async_save(fresh_uri(), {"weight": weight}, lazy=True).wait(60)
        optim.step()
    assert write_history.is_early(("weight", 400_000)) is False


@needs_tracking
def test_early_writes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The message names a tensor, at level INFO."""
    caplog.set_level(logging.INFO, "holdfast")
    state = {"average": torch.zeros(100_000)}
    for _ in range(3):
        start(holdfast.async_save(fresh_uri(), state, lazy=True).captured.reached()).result(60)
        state["average"].add_(1)
    holdfast.fence()
    assert caplog.text.count("copied at the call") == caplog.text.count("(average") == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", [False, True, "prove"])
def test_handle_of_an_ended_save_holds_no_tensor(how: Any, fails: bool, tmp_path: Path) -> None:
    """Neither the report nor a frame of the error keeps the state; a failure blocks no fence."""
    (tmp_path / "file").write_text("in the way")

    def save() -> tuple[holdfast.SaveHandle, weakref.ref[torch.Tensor]]:
        state = {"w": torch.zeros(100_000)}
        uri = tmp_path / "file" / "c" if fails else fresh_uri()
        handle = holdfast.async_save(uri, state, lazy=how)
        holdfast.fence()
        if fails:
            with pytest.raises(holdfast.StorageError):
                handle.wait(60)
        else:
            handle.wait(60)
        return handle, weakref.ref(state["w"])

    handle, seen = save()
    gc.collect()
    assert seen() is None
    assert (handle.report is None) is fails


@needs_tracking
def test_no_page_stays_marked_after_a_save() -> None:
    """A mark would slow down the next write to the page."""
    tracker = write_tracker()
    assert tracker is not None
    state = {"x": torch.zeros(1_000_000)}
    for _ in range(2):
        introduce(state)
    first = -(-state["x"].data_ptr() // 4096) * 4096
    assert not any(
        tracker.is_clean(page, page + 4096) for page in range(first, first + 3_900_000, 4096)
    )
