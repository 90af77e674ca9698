"""Test the Checkpointer in one process: schedules, retention, resuming and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.drivers import HookedDriver
from support.given import Serve
from torch import nn

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import join
from holdfast.errors import UriError
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations.maintenance.choice import choose
from holdfast.storage.operations.maintenance.listing import ListedCheckpoint
from holdfast.storage.training.decisions import Decisions
from holdfast.storage.training.schedule import schedule_of


def state(step: int) -> dict[str, Any]:
    """A state that says which step it is of."""
    return {"x": torch.full((100_000,), float(step)), "step": step}


def steps(uri: str | Path) -> list[int | None]:
    """The steps that are there."""
    return [c.step for c in holdfast.list_checkpoints(uri)]


class Commits:
    """Storage in memory, open until it is closed; then no save is committed."""

    def __init__(self, serve: Serve) -> None:
        self.open = threading.Event()
        self.open.set()
        self.uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=self._before))

    async def _before(self, operation: str, key: str) -> None:
        if (operation, key) == ("put", MANIFEST_KEY):
            await asyncio.to_thread(self.open.wait, 60)


@pytest.fixture
def commits(serve: Serve) -> Iterator[Commits]:
    """What lets saves below its URI end."""
    made = Commits(serve)
    yield made
    made.open.set()


class Run:
    """A small training run, which tells its losses."""

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

    def train(self, step: int) -> float:
        loss = torch.tensor(0.0)
        for _ in range(2):  # gradients accumulate
            x = torch.randn(16, 20)
            loss = (self.net(x).squeeze() - x.sum(1)).square().mean()
            loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.rate.step()
        return float(loss.detach())


def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    """A resumed run has the same losses, to the last bit."""
    whole = Run()
    losses = [whole.train(step) for step in range(1, 21)]
    first = Run()
    with holdfast.Checkpointer(tmp_path, every=5, keep=2, when_busy="wait", lazy="prove") as ckpt:
        assert ckpt.resume(first.state) == 0
        for step in range(1, 14):
            first.train(step)
            ckpt.step(step, first.state)
    assert steps(tmp_path) == [5, 10]
    second = Run(seed=9)
    with holdfast.Checkpointer(tmp_path, every=5, keep=2, when_busy="wait") as ckpt:
        begin = ckpt.resume(second.state)
        assert begin == 10
        again = []
        for step in range(begin + 1, 21):
            again.append(second.train(step))
            ckpt.step(step, second.state)
    assert again == losses[10:]
    assert steps(tmp_path) == [15, 20]
    assert (ckpt.counters.saved, ckpt.counters.pruned, ckpt.counters.in_flight) == (2, 2, 0)


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume skips damaged images and manifests with a warning; a new save replaces them."""
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        for step in range(1, 5):
            ckpt.step(step, state(step))
    (image,) = (tmp_path / "step-00000003").glob("data/*/0.safetensors")
    data = bytearray(image.read_bytes())
    data[70_000] ^= 1
    image.write_bytes(data)
    (tmp_path / "step-00000004" / "manifest.safetensors").write_bytes(b"torn")
    into = state(0)
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
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


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    """That would throw away what may still be saved from it."""
    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    (tmp_path / "step-00000001" / "manifest.safetensors").write_bytes(b"torn")
    with (
        holdfast.Checkpointer(tmp_path) as ckpt,
        pytest.raises(holdfast.DamagedError, match="none of the 1"),
    ):
        ckpt.resume(state(0))


def test_a_state_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Going on from an older checkpoint, which fits no better, would hide it."""
    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    with holdfast.Checkpointer(tmp_path) as ckpt, pytest.raises(holdfast.MismatchError):
        ckpt.resume({"y": torch.zeros(3)})


def test_a_save_that_is_due_while_another_is_under_way_is_skipped(
    commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, and logged; training is not held up."""
    uri = commits.uri
    with holdfast.Checkpointer(uri, every=2) as ckpt:
        commits.open.clear()
        handles = [ckpt.step(step, state(step)) for step in range(1, 7)]
        assert [h is not None for h in handles] == [False, True, False, False, False, False]
        assert (ckpt.counters.due, ckpt.counters.skipped, ckpt.counters.in_flight) == (3, 2, 1)
        commits.open.set()
        ckpt.wait()
        assert ckpt.step(8, state(8)) is not None
    assert (ckpt.counters.due, ckpt.counters.skipped, ckpt.counters.saved) == (4, 2, 2)
    assert steps(uri) == [2, 8]
    assert "step 4: skipped, another save is in flight" in caplog.text


def test_a_save_that_is_due_while_another_is_under_way_waits(commits: Commits) -> None:
    """All are saved; what that took is counted."""
    uri = commits.uri
    with holdfast.Checkpointer(uri, every=1, when_busy="wait") as ckpt:
        commits.open.clear()
        ckpt.step(1, state(1))
        threading.Timer(0.1, commits.open.set).start()
        ckpt.step(2, state(2))
        assert ckpt.counters.saved + ckpt.counters.in_flight == 2
    assert (ckpt.counters.saved, ckpt.counters.waited, ckpt.counters.skipped) == (2, 1, 0)
    assert ckpt.counters.stalled_s > 0
    assert steps(uri) == [1, 2]


def test_a_save_that_is_due_while_another_is_under_way_is_queued(commits: Commits) -> None:
    """The queued save stores the state of its own step; a third one waits."""
    uri = commits.uri
    values = state(0)
    with holdfast.Checkpointer(uri, every=1, when_busy="queue") as ckpt:
        commits.open.clear()
        for step in (1, 2):
            values["x"].fill_(step)
            handle = ckpt.step(step, values)
            assert handle is not None
            ckpt.fence()
            assert handle.captured.done()
        assert (ckpt.counters.queued, ckpt.counters.waited, ckpt.counters.in_flight) == (1, 0, 2)
        assert steps(uri) == []
        values["x"].fill_(3)
        threading.Timer(0.1, commits.open.set).start()
        ckpt.step(3, values)
        assert ckpt.counters.waited == 1
    assert ckpt.counters.saved == 3
    assert [holdfast.load(f"{uri}/step-0000000{s}")["x"].unique().tolist() for s in (1, 2, 3)] == [
        [1],
        [2],
        [3],
    ]


def test_a_failed_save_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures at the call and later are logged and counted; the next save succeeds."""
    folder = tmp_path / "step-00000002"
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        ckpt.step(1, state(1))
        folder.write_text("in the way")
        ckpt.step(2, state(2))
        ckpt.wait()
        folder.unlink()
        assert ckpt.step(3, {"f": print}) is None
        ckpt.step(4, state(4))
    assert (ckpt.counters.due, ckpt.counters.saved, ckpt.counters.failed) == (4, 2, 2)
    assert steps(tmp_path) == [1, 4]
    assert "step 2: not saved" in caplog.text
    assert "step 3: not saved" in caplog.text


def test_a_failed_save_is_raised_where_that_is_asked_for(tmp_path: Path) -> None:
    """By the next call, once; or at the end."""
    (tmp_path / "step-00000001").write_text("in the way")
    (tmp_path / "step-00000003").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=1, on_error="raise", when_busy="wait")
    handle = ckpt.step(1, state(1))
    assert handle is not None
    with pytest.raises(holdfast.StorageError):
        ckpt.wait()
    ckpt.step(2, state(2))
    with pytest.raises(holdfast.StateError):
        ckpt.save(4, {"f": print})
    ckpt.step(3, state(3))
    with pytest.raises(holdfast.StorageError):
        ckpt.close()
    ckpt.close()
    with pytest.raises(holdfast.UsageError, match="closed"):
        ckpt.step(5, state(5))


def test_an_error_of_the_loop_is_not_hidden_by_one_of_a_save(tmp_path: Path) -> None:
    """The save is logged; the loop's error is what is raised."""
    (tmp_path / "step-00000001").write_text("in the way")

    def loop() -> None:
        with holdfast.Checkpointer(tmp_path, every=1, on_error="raise") as ckpt:
            ckpt.step(1, state(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


def keeping(uri: str, keep: Any, metrics: dict[int, float]) -> list[int | None]:
    """A run with these metrics; what is left of it."""
    with holdfast.Checkpointer(uri, every=1, keep=keep, when_busy="wait") as ckpt:
        for step, metric in metrics.items():
            ckpt.step(step, state(step), metric=metric)
    return steps(uri)


METRICS = {1: 5.0, 2: 1.0, 3: 3.0, 4: 2.0, 5: 9.0, 6: 4.0}


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (1, [6]),
        (2, [5, 6]),
        (holdfast.Keep(every=2), [2, 4, 6]),
        (holdfast.Keep(last=1, every=3), [3, 6]),
        (holdfast.Keep(best=2), [2, 4, 6]),
        (holdfast.Keep(best=1, highest=True), [5, 6]),
        (holdfast.Keep(last=1, every=3, best=1), [2, 3, 6]),
    ],
)
def test_what_is_kept(keep: Any, left: list[int]) -> None:
    """The last ones, every n-th, the best; and always the one that was saved last."""
    assert keeping(fresh_uri(), keep, METRICS) == left


def test_what_was_best_is_known_to_a_run_that_goes_on() -> None:
    """Also where a metric is no number, which is none."""
    uri, keep = fresh_uri(), holdfast.Keep(best=2)
    assert keeping(uri, keep, {1: 1.0, 2: 5.0, 3: 2.0}) == [1, 3]
    assert keeping(uri, keep, {4: 3.0, 5: float("nan"), 6: 1.5}) == [1, 6]


def test_damaged_metrics_are_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning; the run goes on."""
    for text in ("[1]", '{"1": "x"}', "[" * 100_000, '{"1": 1e400, "x": 1}'):
        (tmp_path / "metrics.json").write_text(text)
        caplog.clear()
        keeping(str(tmp_path), holdfast.Keep(best=1), {1: 1.0})
        assert "metrics.json is damaged" in caplog.text


def test_only_what_the_run_has_saved_is_deleted(tmp_path: Path) -> None:
    """Other folders of checkpoints below the same root, and other names, are not its business."""
    for path in ("other/step-00000001", "other/step-00000002", "mine", "step-1"):
        holdfast.save(tmp_path / path, state(1))
    assert keeping(str(tmp_path / "."), 1, {5: 0.0, 6: 0.0}) == [1, 1, 1, 1, 6]


def test_equal_metrics_keep_the_later() -> None:
    """Of two that are as good."""
    keep = holdfast.Keep(best=1)
    assert keep.best_of({1: 2.0, 2: 2.0, 3: 3.0}, {1, 2, 3}) == [2]
    listed = [ListedCheckpoint(f"s{s}", s, 1, 1, 1, s) for s in (1, 2, 3)]
    assert [c.step for c in choose(listed, 1, None, ["s2"])] == [1]


class Ranks(Decisions):
    """Counts how often all ranks were asked."""

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
def test_time_is_due_within_a_step_or_a_few_seconds_and_seldom_asked(step_s: float) -> None:
    """Whatever the pace; and most steps ask nobody."""
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


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10", "min", "10 parsecs", "0s", "-3min"])
def test_what_is_no_schedule_is_said_at_once(every: Any) -> None:
    """With what would be one."""
    with pytest.raises(holdfast.UsageError, match="10min"):
        holdfast.Checkpointer(fresh_uri(), every=every)


def test_times_are_read() -> None:
    """In the units that people write."""
    for every, seconds in (("10min", 600), ("90s", 90), ("1.5h", 5400), (" 2 min ", 120)):
        now, ranks = [0.0], Ranks(1.0)
        schedule = schedule_of(every, lambda now=now: now[0])
        now[0] = seconds - 1
        assert not schedule.due(1, ranks)
        now[0] = seconds
        assert schedule.due(2, ranks)


@pytest.mark.parametrize(
    "wrong",
    [
        {"when_busy": "later"},
        {"on_error": "ignore"},
        {"lazy": "yes"},
        {"keep": 0},
        {"storage_options": {"thredas": 3}},
    ],
)
def test_what_is_misspelled_is_said_at_once(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Not by a warning at the first save."""
    with pytest.raises(holdfast.UsageError):
        holdfast.Checkpointer(tmp_path, **wrong)
    with pytest.raises(holdfast.UsageError):
        holdfast.Keep()


@pytest.mark.parametrize("root", ["memory://a b/run", "{}//run/", "file://{}/r%20?threads=2"])
def test_a_save_is_known_by_the_uri_that_its_driver_prints(root: str, tmp_path: Path) -> None:
    """Saves to the same place under other spellings wait for each other."""
    root = root.format(tmp_path)
    with holdfast.Checkpointer(root, every=1) as ckpt:
        handle = ckpt.step(1, {"x": torch.zeros(3)})
    assert handle is not None
    assert handle.report is not None
    driver = open_driver(join(root, "step-00000001"))
    asyncio.run(driver.close())
    assert driver.uri == handle.uri == handle.report.uri


def test_a_save_whose_storage_cannot_be_opened_any_more_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its handle, as any failure after the call; training goes on."""
    with holdfast.Checkpointer(tmp_path, every=1, when_busy="wait") as ckpt:
        ckpt.save(0, {"x": torch.zeros(100_000)})
        ckpt.wait()
        monkeypatch.setenv("HOLDFAST_FILE_THREADS", "none")
        handle = ckpt.step(1, {"x": torch.zeros(100_000)})
        assert handle is not None
        with pytest.raises(UriError, match="HOLDFAST_FILE_THREADS"):
            handle.wait(60)
        holdfast.fence()
        monkeypatch.delenv("HOLDFAST_FILE_THREADS")
        assert ckpt.step(2, {"x": torch.zeros(100_000)}) is not None
    assert (ckpt.counters.failed, ckpt.counters.saved) == (1, 2)
