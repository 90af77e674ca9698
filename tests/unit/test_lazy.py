"""A lazy save stores the state as of the call, or fails and says why."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from support.inside import around_copies, around_image_writes
from torch import nn

import holdfast
from holdfast.storage.state.capture import process_memory
from holdfast.storage.state.capture.lazy import LazyCapture, hook_optimizers
from holdfast.storage.state.capture.switch_interval import SWITCH_INTERVAL_S

pytestmark = pytest.mark.usefixtures("no_write_history")


class Gate:
    """Open until it is closed; then it holds back all copying."""

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
    """Copying passes through it."""
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
    """Save it for the first time. Later saves copy in the background."""
    holdfast.async_save(fresh_uri(), state, lazy=True).wait(60)
    holdfast.fence()


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
    """One forward and backward pass."""
    net(
        torch.randn(16, 100, generator=torch.Generator().manual_seed(seed))
    ).square().mean().backward()


KINDS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "AdamW foreach": lambda n: [torch.optim.AdamW(n.parameters(), foreach=True)],
    "SGD fused": lambda n: [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9, fused=True)],
    "one a parameter": lambda n: [torch.optim.Adam([p]) for p in n.parameters()],
}


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """What an eager save of the state gives back."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    return holdfast.load(uri)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_and_the_save_is_of_the_call(kind: str, gate: Gate) -> None:
    """Gradients accumulate and batch norm counts; steps of any optimizer wait for the copies."""
    net = Net()
    optims = KINDS[kind](net)
    state = {"net": net, "step": 3, **{f"optim{i}": o for i, o in enumerate(optims)}}
    backward(net, 0)
    for optim in optims:
        optim.step()
    expected, uri = snapshot(state), fresh_uri()
    introduce(state)
    gate.close()
    handle = holdfast.async_save(uri, state, lazy=True)
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


def test_an_optimizer_that_is_not_in_the_state_waits_too(gate: Gate) -> None:
    """The state may be given as plain dicts."""
    weight = nn.Parameter(torch.zeros(100_000))
    introduce({"weight": weight.detach()})
    gate.close()
    optim = torch.optim.SGD([weight], 1.0)
    handle = holdfast.async_save(uri := fresh_uri(), {"weight": weight.detach()}, lazy=True)
    weight.grad = torch.ones_like(weight)
    gate.open_at_fence()
    optim.step()
    handle.wait(60)
    assert not holdfast.load(uri)["weight"].any()
    assert weight.eq(-1).all()


def test_the_call_returns_before_anything_is_copied(gate: Gate) -> None:
    """Buffers, arrays and small tensors are copied at the call; nothing large is."""
    state = {
        "norm": nn.BatchNorm1d(50_000),
        "array": np.arange(50_000),
        "small": torch.ones(100),
        "large": torch.ones(100_000),
    }
    introduce(state)
    gate.close()
    handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
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


def test_a_write_before_the_fence_fails_the_save_and_names_the_tensor(gate: Gate) -> None:
    """Nothing is committed, and training goes on: the next optimizer step is not kept waiting."""
    ema = {"shadow": torch.ones(100_000)}
    introduce({"ema": ema})
    gate.close()
    handle = holdfast.async_save(uri := fresh_uri(), {"ema": ema}, lazy=True)
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


def test_what_is_tracked_is_read_by_a_few_calls_however_many_tensors_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retaking the interpreter's lock for each tensor would take longer than the reads."""
    state = {f"t{i}": torch.full((20_000 + i,), float(i)) for i in range(300)}
    introduce(state)
    reads: list[int] = []
    plain = process_memory._readv

    def counted(local: bytes, remote: bytes, segments: int) -> int:
        reads.append(segments)
        return plain(local, remote, segments)

    monkeypatch.setattr(process_memory, "_readv", counted)
    holdfast.async_save(uri := fresh_uri(), state, lazy=True).wait(60)
    assert len(reads) < 20
    assert sum(reads) > 300
    found = holdfast.load(uri)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)


def test_captured_is_told_when_the_last_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it has begun: one chunk is still being copied, the others are done."""
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


def test_threads_take_short_turns_while_anything_is_copied(gate: Gate) -> None:
    """The switch interval is short until the last capture has ended, well or not."""
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
def test_the_collector_of_garbage_rests_while_a_state_is_looked_at(gate: Gate) -> None:
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
def test_after_the_trainer_has_been_told_it_may_write(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the fence, or ``captured`` in any form, the state may be written to."""
    import asyncio

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
    """Master copies that an optimizer trains, and inference tensors, are stored as of the call."""
    net, master = nn.Linear(300, 300).bfloat16(), torch.randn(300, 300)
    optim = torch.optim.AdamW([master], fused=True)
    with torch.inference_mode():
        frozen = torch.ones(100_000)
    state = {"net": net, "optim": optim, "master": master, "frozen": frozen}
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


def test_loading_waits_for_what_is_being_copied(gate: Gate) -> None:
    """Else it would overwrite it."""
    state = {"x": torch.zeros(100_000)}
    holdfast.save(other := fresh_uri(), {"x": torch.ones(100_000)})
    introduce(state)
    gate.close()
    handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
    gate.open_at_fence()
    holdfast.load(other, into=state)
    handle.wait(60)
    assert not holdfast.load(uri)["x"].any()
    assert state["x"].all()


def test_a_save_that_fails_early_holds_nobody_up(tmp_path: Any) -> None:
    """The storage is not there: the fence returns, training goes on, and the handle knows."""
    (tmp_path / "file").write_text("in the way")
    state = {"x": torch.zeros(100_000)}
    handle = holdfast.async_save(tmp_path / "file" / "c", state, lazy=True)
    holdfast.fence()
    state["x"].add_(1)
    with pytest.raises(holdfast.StorageError):
        handle.wait(60)


def test_a_forked_child_waits_for_none_of_its_parents_copies(gate: Gate) -> None:
    """They never end there."""
    state = {"x": torch.zeros(100_000)}
    introduce(state)
    gate.close()
    before_s = sys.getswitchinterval()
    handle = holdfast.async_save(fresh_uri(), state, lazy=True)
    assert gate.reached.wait(60)
    child = os.fork()
    if child == 0:
        holdfast.fence()
        os._exit(0 if sys.getswitchinterval() == before_s else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    gate.open.set()
    handle.wait(60)


def test_copies_of_optimizers_and_the_hook_go_together(gate: Gate) -> None:
    """An optimizer that is copied, as some EMA helpers do, is none the worse for the hook."""
    net = Net()
    optim = torch.optim.AdamW(net.parameters())
    holdfast.async_save(fresh_uri(), {"net": net, "optim": optim}, lazy=True).wait(60)
    twin = copy.deepcopy(optim)
    backward(net, 0)
    optim.step()
    twin.step()
    assert len(optim.state) == 6


@pytest.mark.nightly(4)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own
def test_a_compiled_step_waits_too(gate: Gate) -> None:
    """A step compiled after the first lazy save calls the hook."""
    hook_optimizers()
    net = Net()
    optim = torch.optim.AdamW(net.parameters())
    step = torch.compile(optim.step, backend="eager")
    for seed in (0, 1):
        backward(net, seed)
        step()
    for seed in (2, 3):
        expected, uri = snapshot({"net": net, "optim": optim}), fresh_uri()
        introduce({"net": net, "optim": optim})
        gate.close()
        handle = holdfast.async_save(uri, {"net": net, "optim": optim}, lazy=True)
        net.zero_grad()
        backward(net, seed)
        gate.open_at_fence()
        step()
        assert handle.captured.done()
        handle.wait(60)
        found = holdfast.load(uri)
        assert torch.equal(found["net"]["first.weight"], expected["net"]["first.weight"])
        assert not torch.equal(found["net"]["first.weight"], net.first.weight)
