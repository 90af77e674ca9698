"""Test the Checkpointer in one process: schedules, retention, resuming and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import flip, fresh_uri, image_in
from support.copies import steps_at
from support.drivers import Halting
from support.given import Serve
from torch import nn

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import join
from holdfast.errors import UriError
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.training.decisions import Decisions
from holdfast.storage.training.schedule import schedule_of


def state(step: int) -> dict[str, Any]:
    """Return a state that contains its step."""
    return {"x": torch.full((100_000,), float(step)), "step": step}


@pytest.fixture
def commits(serve: Serve) -> Iterator[Halting]:
    """Return storage whose commits a test can hold up."""
    made = Halting(serve, "put", MANIFEST_KEY)
    made.go.set()
    yield made
    made.go.set()


class Run:
    """A small training run with dropout, batch norm and a schedule."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.Linear(40, 1)
        )
        self.optim = torch.optim.AdamW(self.net.parameters(), 0.01)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 50)
        self.state = {
            "net": self.net,
            "optim": self.optim,
            "rate": self.rate,
            "rng": holdfast.RNGState(),
        }

    def train(self) -> float:
        x = torch.randn(16, 20)
        loss = (self.net(x).squeeze() - x.sum(1)).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.rate.step()
        return float(loss.detach())


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """A resumed run computes the same losses to the last bit, and keeps the newest checkpoints."""
    whole = Run()
    losses = [whole.train() for _ in range(20)]
    first = Run()
    with holdfast.Checkpointer(tmp_path, every=5, keep=2, when_busy="wait", lazy="prove") as ckpt:
        assert ckpt.resume(first.state) == 0
        for step in range(1, 14):
            first.train()
            ckpt.step(step, first.state)
    assert steps_at(tmp_path) == [5, 10]
    second = Run(seed=9)
    with holdfast.Checkpointer(tmp_path, every=5, keep=2, when_busy="wait") as ckpt:
        assert ckpt.resume(second.state) == 10
        again = []
        for step in range(11, 21):
            again.append(second.train())
            ckpt.step(step, second.state)
    assert again == losses[10:]
    assert steps_at(tmp_path) == [15, 20]
    assert (ckpt.counters.saved, ckpt.counters.pruned, ckpt.counters.in_flight) == (2, 2, 0)


def test_resume_skips_damaged_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume skips damaged checkpoints with a warning, unless all are damaged."""
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        for step in range(1, 5):
            ckpt.step(step, state(step))
    flip(image_in(tmp_path / "step-00000003"), 70_000)
    (tmp_path / "step-00000004" / "manifest.safetensors").write_bytes(b"torn")
    into = state(0)
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        with pytest.raises(holdfast.MismatchError):  # an older one would fit no better
            ckpt.resume({"y": torch.zeros(3)})
        assert ckpt.resume(into) == 2
        assert into["step"] == 2
        assert into["x"].eq(2).all()
        assert "step 3 is damaged" in caplog.text
        assert "step-00000004 cannot be opened" in caplog.text
        for step in (3, 4):
            ckpt.step(step, state(step))
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(into) == 4
        assert into["x"].eq(4).all()
        for manifest in tmp_path.glob("*/manifest.safetensors"):
            manifest.write_bytes(b"torn")
        with pytest.raises(holdfast.DamagedError, match="none of the 4"):
            ckpt.resume(into)


def test_busy_save_is_skipped(commits: Halting, caplog: pytest.LogCaptureFixture) -> None:
    """With "skip", a save that is due while another is in flight is counted and logged."""
    with holdfast.Checkpointer(commits.uri, every=2) as ckpt:
        commits.go.clear()
        handles = [ckpt.step(step, state(step)) for step in range(1, 7)]
        assert [h is not None for h in handles] == [False, True, False, False, False, False]
        assert (ckpt.counters.due, ckpt.counters.skipped, ckpt.counters.in_flight) == (3, 2, 1)
        commits.go.set()
        ckpt.wait()
        assert ckpt.step(8, state(8)) is not None
    assert (ckpt.counters.due, ckpt.counters.skipped, ckpt.counters.saved) == (4, 2, 2)
    assert steps_at(commits.uri) == [2, 8]
    assert "step 4: skipped, another save is in flight" in caplog.text


@pytest.mark.parametrize("call", ["step", "save"])
def test_busy_save_waits(call: str, commits: Halting) -> None:
    """With "wait", a save blocks training until the previous one has ended."""
    with holdfast.Checkpointer(commits.uri, every=1, when_busy="wait") as ckpt:
        commits.go.clear()
        ckpt.step(1, state(1))
        threading.Timer(0.1, commits.go.set).start()
        getattr(ckpt, call)(2, state(2))
        assert ckpt.counters.saved + ckpt.counters.in_flight == 2
    assert (ckpt.counters.saved, ckpt.counters.waited, ckpt.counters.skipped) == (2, 1, 0)
    assert ckpt.counters.stalled_s > 0
    assert steps_at(commits.uri) == [1, 2]


def test_busy_save_is_queued(commits: Halting) -> None:
    """With "queue", one save stores the state of its own step later; another one waits."""
    values = state(0)
    with holdfast.Checkpointer(commits.uri, every=1, when_busy="queue") as ckpt:
        commits.go.clear()
        for step in (1, 2):
            values["x"].fill_(step)
            handle = ckpt.step(step, values)
            assert handle is not None
            ckpt.fence()
            assert handle.captured.done()
        assert (ckpt.counters.queued, ckpt.counters.waited, ckpt.counters.in_flight) == (1, 0, 2)
        assert steps_at(commits.uri) == []
        values["x"].fill_(3)
        threading.Timer(0.1, commits.go.set).start()
        ckpt.step(3, values)
        assert ckpt.counters.waited == 1
    assert ckpt.counters.saved == 3
    for step in (1, 2, 3):
        assert holdfast.load(f"{commits.uri}/step-0000000{step}")["x"].eq(step).all()


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (1, [6]),
        (2, [5, 6]),
        (holdfast.Keep(every=2), [2, 4, 6]),
        (holdfast.Keep(last=1, every=3), [3, 6]),
        (holdfast.Keep(best=1), [4, 6]),  # of two that are equal, the later
        (holdfast.Keep(best=2), [2, 4, 6]),
        (holdfast.Keep(best=1, highest=True), [5, 6]),
        (holdfast.Keep(last=1, every=3, best=1), [3, 4, 6]),
    ],
)
def test_retention(keep: Any, left: list[int]) -> None:
    """A run keeps the last, every n-th and the best checkpoints, and always the newest save."""
    metrics = {1: 5.0, 2: 1.0, 3: 3.0, 4: 1.0, 5: 9.0, 6: 4.0}
    assert keeping(fresh_uri(), keep, metrics) == left


def keeping(uri: str, keep: Any, metrics: dict[int, float]) -> list[int | None]:
    """Save steps with these metrics; return the steps that are left."""
    with holdfast.Checkpointer(uri, every=1, keep=keep, when_busy="wait") as ckpt:
        for step, metric in metrics.items():
            ckpt.step(step, state(step), metric=metric)
    return steps_at(uri)


def test_resumed_run_knows_the_best_steps() -> None:
    """Metrics survive a restart; a NaN is no metric."""
    uri, keep = fresh_uri(), holdfast.Keep(best=2)
    assert keeping(uri, keep, {1: 1.0, 2: 5.0, 3: 2.0}) == [1, 3]
    assert keeping(uri, keep, {4: 3.0, 5: float("nan"), 6: 1.5}) == [1, 6]


def test_damaged_metrics_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged table of metrics is ignored with a warning."""
    for text in ("[1]", '{"1": "x"}', "[" * 100_000, '{"1": 1e400, "x": 1}'):
        (tmp_path / "metrics.json").write_text(text)
        caplog.clear()
        keeping(str(tmp_path), holdfast.Keep(best=1), {1: 1.0})
        assert "metrics.json is damaged" in caplog.text


def test_retention_deletes_only_what_the_run_has_saved(tmp_path: Path) -> None:
    """Checkpoints in other folders, or with other names or steps, stay."""
    for path in ("other/step-00000001", "other/step-00000002", "mine", "step-1", "step-00000003"):
        holdfast.save(tmp_path / path, state(1))
    assert keeping(str(tmp_path / "."), 1, {5: 0.0, 6: 0.0}) == [1, 1, 1, 1, 1, 6]


class Ranks(Decisions):
    """Decisions that count how often the ranks ask."""

    asked = 0

    def ask(self, question: str, step: int, decide: Any) -> Any:
        self.asked += 1
        return decide()


def test_steps_are_due_at_multiples_or_when_one_is_passed() -> None:
    """Steps may skip multiples; a resumed run does not save at once."""
    ranks = Ranks(1.0)
    every = schedule_of(10)
    assert [s for s in range(1, 41) if every.due(s, ranks)] == [10, 20, 30, 40]
    every = schedule_of(10)
    assert [s for s in range(7, 60, 7) if every.due(s, ranks)] == [14, 21, 35, 42, 56]
    every = schedule_of(10)
    every.begin_at(12)
    assert [s for s in range(13, 25) if every.due(s, ranks)] == [20]
    assert [schedule_of(None).due(s, ranks) for s in (0, 1, 10)] == [False] * 3
    assert ranks.asked == 0


@pytest.mark.parametrize("step_s", [0.01, 1.0, 30.0, 700.0])
def test_saves_by_time_are_punctual_and_rarely_ask(step_s: float) -> None:
    """A save by time is at most a step or a few seconds late, and most steps ask nobody."""
    now = [0.0]
    every, ranks, saved = schedule_of("10min", lambda: now[0]), Ranks(1.0), []
    total = max(30, int(6500 / step_s))
    for step in range(1, total):
        now[0] += step_s
        if every.due(step, ranks):
            saved.append(now[0])
    gaps = [b - a for a, b in zip([0.0, *saved], saved, strict=False)]
    assert all(600 <= gap <= 600 + 7 + 2 * step_s for gap in gaps)
    assert len(gaps) >= 9
    assert ranks.asked < (total / 100 if step_s < 1 else total)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"every": every} for every in (0, -1, 1.5, True, "10", "10 parsecs", "0s", "-3min")),
        {"when_busy": "later"},
        {"on_error": "ignore"},
        {"lazy": "yes"},
        {"keep": 0},
        {"storage_options": {"thredas": 3}},
    ],
    ids=repr,
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """Wrong arguments are refused at once, not by a warning at the first save."""
    with pytest.raises(holdfast.UsageError):
        holdfast.Checkpointer(fresh_uri(), **wrong)
    with pytest.raises(holdfast.UsageError):
        holdfast.Keep()


@pytest.mark.parametrize("root", ["memory://a b/run", "{}//run/", "file://{}/r%20?threads=2"])
def test_handle_has_the_uri_that_the_driver_prints(root: str, tmp_path: Path) -> None:
    """Saves to one place under different spellings have one URI, so they wait for each other."""
    root = root.format(tmp_path)
    with holdfast.Checkpointer(root, every=1) as ckpt:
        handle = ckpt.step(1, {"x": torch.zeros(3)})
    assert handle is not None
    assert handle.report is not None
    driver = open_driver(join(root, "step-00000001"))
    asyncio.run(driver.close())
    assert driver.uri == handle.uri == handle.report.uri


def test_failed_saves_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures at the call and later do not stop training; the next save succeeds."""
    folder = tmp_path / "step-00000002"
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        ckpt.step(1, state(1))
        folder.write_text("in the way")
        ckpt.step(2, state(2))
        ckpt.wait()
        folder.unlink()
        assert ckpt.step(3, {"f": print}) is None
        ckpt.step(4, state(4))
        ckpt.wait()
        monkeypatch.setenv("HOLDFAST_FILE_THREADS", "none")
        unopened = ckpt.step(5, state(5))
        assert unopened is not None
        with pytest.raises(UriError, match="HOLDFAST_FILE_THREADS"):
            unopened.wait(60)
        holdfast.fence()
        monkeypatch.delenv("HOLDFAST_FILE_THREADS")
        ckpt.step(6, state(6))
    assert (ckpt.counters.due, ckpt.counters.saved, ckpt.counters.failed) == (6, 3, 3)
    assert steps_at(tmp_path) == [1, 4, 6]
    for step in (2, 3, 5):
        assert f"step {step}: not saved" in caplog.text


def test_failed_save_is_raised_if_asked(tmp_path: Path) -> None:
    """With "raise", the next call or close() raises the error of a failed save, once."""
    (tmp_path / "step-00000001").write_text("in the way")
    (tmp_path / "step-00000003").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=1, on_error="raise", when_busy="wait")
    ckpt.step(1, state(1))
    with pytest.raises(holdfast.StorageError):
        ckpt.wait()
    ckpt.step(2, state(2))
    with pytest.raises(holdfast.StateError):
        ckpt.save(4, {"f": print})
    ckpt.step(3, state(3))
    with pytest.raises(holdfast.StorageError):
        ckpt.close()
    ckpt.close()
    assert (ckpt.counters.saved, ckpt.counters.failed) == (1, 3)
    with pytest.raises(holdfast.UsageError, match="closed"):
        ckpt.step(5, state(5))


def test_error_of_the_loop_hides_one_of_a_save(tmp_path: Path) -> None:
    """An error that ends the loop is raised. The error of a failed save is only logged."""
    (tmp_path / "step-00000001").write_text("in the way")

    def loop() -> None:
        with holdfast.Checkpointer(tmp_path, every=1, on_error="raise") as ckpt:
            ckpt.step(1, state(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


@pytest.mark.parametrize("end", ["step", "wait", "close"])
def test_failed_first_save_is_raised(end: str, tmp_path: Path) -> None:
    """Until a save has succeeded, the next call raises its error, and close() raises it again."""
    (tmp_path / "step-00000001").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=100)
    handle = ckpt.save(1, state(1))
    assert handle is not None
    with pytest.raises(holdfast.StorageError):
        handle.wait(60)
    while ckpt.counters.failed == 0:  # it is counted in a moment
        threading.Event().wait(0.01)
    with pytest.raises(holdfast.StorageError):
        ckpt.step(2, state(2)) if end == "step" else getattr(ckpt, end)()
    if end == "close":
        return
    ckpt.wait()  # once
    if end == "step":
        ckpt.save(2, state(2))
        ckpt.close()
        assert steps_at(tmp_path) == [2]
        return
    with pytest.raises(holdfast.StorageError):
        ckpt.close()


def test_first_state_that_cannot_be_saved_is_raised_at_the_call() -> None:
    """A state that cannot be saved is an error of the first call."""
    with pytest.raises(holdfast.StateError), holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
        ckpt.step(1, {"f": print})


def test_unclosed_run_that_saved_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If nothing was saved and close() is never called, the error is logged at exit."""
    (tmp_path / "step-00000001").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=1, grace_s=None)
    ckpt.step(1, state(1))
    with pytest.raises(holdfast.StorageError):
        ckpt.wait()
    finish = ckpt._unclosed
    assert finish.atexit
    finish()
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "never closed" in said
    assert "0 saved, 1 failed" in said
