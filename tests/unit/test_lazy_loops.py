"""Lazy saves in training loops that write to their state between optimizer steps."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bits import fresh_uri, raw
from support.inside import around_copies
from torch import nn

import holdfast
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.capture import lazy
from holdfast.storage.state.capture.write_tracking import write_tracker
from holdfast.storage.state.capture.write_watch import write_history

pytestmark = pytest.mark.usefixtures("no_write_history")
needs_tracking = pytest.mark.skipif(
    write_tracker() is None, reason="writes cannot be tracked on this machine"
)
SAVES = 3


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copying in the background waits for this."""
    event = threading.Event()

    def held(copy: Callable[[], None], start: int) -> None:
        assert event.wait(60)
        copy()

    around_copies(monkeypatch, held)
    yield event
    event.set()


class Averaged:
    """Weights that are swapped in for an evaluation, through ``.data``."""

    def __init__(self) -> None:
        self.net = nn.Linear(200, 200)

    def state(self) -> dict[str, Any]:
        return {"net": self.net}

    def go_on(self) -> None:
        kept = [p.detach().clone() for p in self.net.parameters()]
        for p in self.net.parameters():
            p.data.copy_(torch.full_like(p, -7))
        self.net(torch.ones(1, 200))
        for p, k in zip(self.net.parameters(), kept, strict=True):
            p.data.copy_(k)


class Fused:
    """Parameters are updated within the backward pass, and no optimizer steps."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self._update)

    def _update(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    def state(self) -> dict[str, Any]:
        return {"net": self.net}

    def go_on(self) -> None:
        self.net(torch.ones(2, 200)).square().sum().backward()


class PlainStatistics:
    """Running statistics of a batch norm, given as a dict of tensors."""

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(20_000)

    def state(self) -> dict[str, Any]:
        return {"model": self.norm.state_dict()}

    def go_on(self) -> None:
        self.norm(torch.randn(2, 20_000) + 5)


class Offloaded:
    """A shard is freed after use, and filled again."""

    def __init__(self) -> None:
        self.shard = torch.arange(300_000.0)

    def state(self) -> dict[str, Any]:
        return {"shard": self.shard}

    def go_on(self) -> None:
        nbytes = self.shard.untyped_storage().nbytes()
        self.shard.untyped_storage().resize_(0)
        self.shard.untyped_storage().resize_(nbytes)
        self.shard.copy_(torch.arange(300_000.0) + 1)


LOOPS: list[Callable[[], Any]] = [Averaged, Fused, PlainStatistics, Offloaded]


def bits(found: Any) -> dict[str, bytes]:
    """The tensors in nested dicts."""
    if isinstance(found, torch.Tensor):
        return {"": raw(found.clone())}
    if hasattr(found, "state_dict"):
        found = found.state_dict()
    return {f"{k}.{name}": data for k, v in found.items() for name, data in bits(v).items()}


@pytest.mark.parametrize("loop", LOOPS)
def test_each_save_is_of_its_step(loop: Callable[[], Any], may_copy: threading.Event) -> None:
    """Each save stores its step, even if nothing is copied before the next forward pass ends."""
    training = loop()
    for _ in range(SAVES):
        state = training.state()
        expected = bits(state)
        may_copy.clear()
        handle = holdfast.async_save(uri := fresh_uri(), state, lazy=True)
        training.go_on()
        may_copy.set()
        handle.wait(60)
        assert bits(holdfast.load(uri)) == expected


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
@pytest.mark.parametrize(
    "loop", [loop for loop in LOOPS if loop is not Offloaded]
)  # freed memory may stay as it was
def test_who_begins_to_write_later_costs_one_save(
    loop: Callable[[], Any], may_copy: threading.Event
) -> None:
    """One save fails and names a tensor; later ones copy at the call what was written to."""
    training = loop()
    may_copy.set()
    holdfast.async_save(fresh_uri(), training.state(), lazy=True).wait(60)
    holdfast.fence()
    outcomes = []
    for _ in range(SAVES):
        may_copy.clear()
        expected = bits(training.state())
        handle = holdfast.async_save(uri := fresh_uri(), training.state(), lazy=True)
        training.go_on()
        may_copy.set()
        try:
            handle.wait(60)
            assert bits(holdfast.load(uri)) == expected
            outcomes.append("saved")
        except holdfast.SaveError as error:
            assert "changed while it was being copied" in str(error)
            outcomes.append("failed")
        training.go_on()
    assert outcomes[1:] == ["saved"] * (SAVES - 1)


@needs_tracking
def test_an_optimizers_step_is_no_haste(may_copy: threading.Event) -> None:
    """Writes of an optimizer's step are expected: the next save copies in the background."""
    weight = nn.Parameter(torch.zeros(100_000))
    optim = torch.optim.SGD([weight], 1.0)
    weight.grad = torch.ones_like(weight)
    may_copy.set()
    for _ in range(2):
        holdfast.async_save(fresh_uri(), {"weight": weight}, lazy=True).wait(60)
        optim.step()
    assert write_history.is_early(("weight", 400_000)) is False


@needs_tracking
def test_what_is_learned_is_said_once(
    may_copy: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """At level INFO, with the name of a tensor."""
    caplog.set_level(logging.INFO, "holdfast")
    may_copy.set()
    state = {"average": torch.zeros(100_000)}
    for _ in range(SAVES):
        start(holdfast.async_save(fresh_uri(), state, lazy=True).captured.reached()).result(60)
        state["average"].add_(1)
    holdfast.fence()
    assert caplog.text.count("copied at the call") == caplog.text.count("(average") == 1


FREED = """
import sys, torch, holdfast
torch.set_num_threads(1)
state = {"v": torch.ones(16 << 20), "w": torch.ones(16 << 20)}
holdfast.async_save(sys.argv[1] + "/first", state, lazy=True).wait()
holdfast.fence()
handle = holdfast.async_save(sys.argv[1] + "/c", state, lazy=True)
for tensor in state.values():
    tensor.untyped_storage().resize_(0)
try:
    handle.wait()
except holdfast.SaveError as error:
    assert "changed while it was being copied" in str(error)
    print("failed")
else:
    found = holdfast.load(sys.argv[1] + "/c")
    print("saved" if all(bool((t == 1).all()) for t in found.values()) else "garbage")
"""


@pytest.mark.nightly(7)
def test_memory_that_is_freed_after_the_call_is_not_read(tmp_path: Any) -> None:
    """The save fails by name, or had copied it before. The process lives."""
    child = subprocess.run(
        [sys.executable, "-c", FREED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (child.returncode, child.stdout.strip() in ("failed", "saved")) == (0, True), (
        child.stderr
    )


@pytest.mark.parametrize("how", [False, True, "prove"])
def test_a_handle_holds_nothing_of_the_state(how: Any) -> None:
    """Once the save has ended: who keeps the handle, for its report, keeps no tensor."""
    state = {"w": torch.zeros(100_000)}
    seen = weakref.ref(state["w"])
    handle = holdfast.async_save(fresh_uri(), state, lazy=how)
    handle.wait(60)
    del state
    gc.collect()
    assert seen() is None
    assert handle.report is not None


def test_a_handle_of_a_save_that_failed_holds_nothing_of_the_state(tmp_path: Any) -> None:
    """No frame in the error's traceback keeps a tensor alive."""
    (tmp_path / "file").write_text("in the way")

    def save() -> tuple[holdfast.SaveHandle, weakref.ref[torch.Tensor]]:
        state = {"w": torch.zeros(100_000)}
        handle = holdfast.async_save(tmp_path / "file" / "c", state, lazy=True)
        with pytest.raises(holdfast.StorageError):
            handle.wait(60)
        return handle, weakref.ref(state["w"])

    handle, seen = save()
    gc.collect()
    assert seen() is None
    with pytest.raises(holdfast.StorageError):
        handle.wait()


@needs_tracking
def test_no_page_stays_marked_after_a_save() -> None:
    """A mark would cost whoever writes there next."""
    tracker = write_tracker()
    assert tracker is not None
    state = {"x": torch.zeros(1_000_000)}
    for _ in range(2):
        holdfast.async_save(fresh_uri(), state, lazy=True).wait(60)
        holdfast.fence()
    first = -(-state["x"].data_ptr() // 4096) * 4096
    assert not any(
        tracker.is_clean(page, page + 4096) for page in range(first, first + 3_900_000, 4096)
    )
