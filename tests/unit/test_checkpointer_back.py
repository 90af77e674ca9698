"""Test which checkpoint a run resumes: the newest, an earlier one, or one of another branch."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import flip, fresh_uri, image_in
from support.drivers import Fault, HookedDriver
from support.given import Serve

import holdfast
from holdfast.drivers import registry
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.lineage import ROOT, Lineage

Keep = holdfast.Keep


def state(step: int, mark: float = 0.0) -> dict[str, Any]:
    """Return a state that contains its step; ``mark`` tells branches apart."""
    return {"x": torch.full((1000,), step + mark), "step": step}


def run_of(uri: str | Path, *steps: int, mark: float = 0.0, **options: Any) -> None:
    """Save these steps."""
    with holdfast.Checkpointer(uri, when_busy="wait", grace_s=None, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state(step, mark))


def there(uri: str | Path) -> tuple[list[int | None], list[int | None]]:
    """Return the steps that lead to the current state of training, and the abandoned ones."""
    listed = holdfast.list_checkpoints(uri)
    return [c.step for c in listed if not c.abandoned], [c.step for c in listed if c.abandoned]


def resumed(uri: str | Path, **back: Any) -> tuple[int, float]:
    """Return the step that a new process resumes from, and the value that it loads."""
    into = state(0)
    with holdfast.Checkpointer(uri, grace_s=None) as ckpt:
        step = ckpt.resume(into, **back)
    assert into["step"] == step
    return step, float(into["x"].unique())


def damage(folder: Path, step: int) -> None:
    """Flip a bit in the image of a step."""
    flip(image_in(folder / f"step-{step:08d}"), 5000)


def test_going_back_abandons_later_checkpoints(tmp_path: Path) -> None:
    """Abandoned checkpoints are neither resumed nor counted, and deleted once passed."""
    run_of(tmp_path, 100, 200, 300, 400)
    into = state(0)
    with holdfast.Checkpointer(tmp_path, keep=3, when_busy="wait") as ckpt:
        assert ckpt.resume(into, step=200) == 200
        assert there(tmp_path) == ([100, 200], [300, 400])
        ckpt.save(250, state(250, 0.5))
        ckpt.wait()
        assert there(tmp_path) == ([100, 200, 250], [300, 400])
    assert resumed(tmp_path) == (250, 250.5)
    with holdfast.Checkpointer(tmp_path, keep=3, when_busy="wait") as ckpt:
        assert ckpt.resume(into) == 250
        ckpt.save(350, state(350, 0.5))
        ckpt.wait()
        assert there(tmp_path) == ([200, 250, 350], [400])
        ckpt.save(450, state(450, 0.5))
    assert there(tmp_path) == ([250, 350, 450], [])


def test_abandoned_checkpoints_stay_if_asked() -> None:
    """With ``Keep(abandoned=True)`` abandoned checkpoints stay until they are pruned by hand."""
    uri = fresh_uri()
    run_of(uri, 1, 2, 3)
    with holdfast.Checkpointer(uri, keep=Keep(last=1, abandoned=True), when_busy="wait") as ckpt:
        ckpt.resume(state(0), step=1)
        ckpt.save(9, state(9))
    assert there(uri) == ([9], [2, 3])
    assert holdfast.prune(uri, keep_last=1).checkpoints == ()
    report = holdfast.prune(uri, abandoned=True)
    assert [(c.step, c.abandoned) for c in report.checkpoints] == [(2, True), (3, True)]
    assert there(uri) == ([9], [])


def test_save_replaces_an_abandoned_step(tmp_path: Path) -> None:
    """A save at an abandoned step replaces it with a checkpoint of the new branch."""
    run_of(tmp_path, 1, 2, 3)
    with holdfast.Checkpointer(tmp_path, when_busy="wait") as ckpt:
        ckpt.resume(state(0), step=1)
        record = json.loads((tmp_path / "lineage.json").read_text())
        (name,) = record["branches"]
        branches = {name: {"from": "", "step": 1}}
        assert record == {"version": 1, "current": name, "branches": branches}
        ckpt.save(2, state(2, 0.5))
    assert there(tmp_path) == ([1, 2], [3])
    assert resumed(tmp_path) == (2, 2.5)
    with holdfast.open(tmp_path / "step-00000002") as checkpoint:
        assert checkpoint.verify().ok


def test_before_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``before`` resumes the newest whole checkpoint before a step."""
    run_of(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 3)
    assert resumed(tmp_path, before=4) == (2, 2.0)
    assert "step 3 is damaged" in caplog.text
    assert there(tmp_path) == ([1, 2], [3, 4])
    assert resumed(tmp_path) == (2, 2.0)


def test_same_process_may_go_back(tmp_path: Path) -> None:
    """A running job can go back; its saves in flight end first."""
    with holdfast.Checkpointer(tmp_path, every=1, keep=2, when_busy="queue") as ckpt:
        for step in range(1, 5):
            ckpt.step(step, state(step))
        assert ckpt.resume(state(0), step=3) == 3
        assert ckpt.step(3, state(3)) is None
        for step in (4, 5):
            ckpt.step(step, state(step, 0.5))
    assert there(tmp_path) == ([4, 5], [])
    assert resumed(tmp_path) == (5, 5.5)


@pytest.mark.parametrize("call", ["step", "save"])
def test_step_below_the_newest_is_refused(call: str, tmp_path: Path) -> None:
    """The error says what to call; nothing is written or deleted."""
    with holdfast.Checkpointer(tmp_path, every=100, keep=1) as ckpt:
        ckpt.save(200, state(200))
        ckpt.save(400, state(400))
        ckpt.wait()
        with pytest.raises(
            holdfast.UsageError, match=r"step 250 is below step 400.*resume\(state, step="
        ):
            getattr(ckpt, call)(250, state(250))
        ckpt.step(400, state(400))
        ckpt.save(400, state(400, 0.5))
    assert there(tmp_path) == ([400], [])
    assert resumed(tmp_path) == (400, 400.5)


def test_first_save_below_the_newest_is_refused(tmp_path: Path) -> None:
    """Loading an earlier checkpoint by hand does not go back: nothing is deleted."""
    run_of(tmp_path, 100, 200, 400)
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        into = state(0)
        holdfast.load(tmp_path / "step-00000200", into=into)
        for step in (250, 260):
            ckpt.save(step, into)
            with pytest.raises(
                holdfast.UsageError, match=rf"step {step} is below step 400.*resume\(state, step="
            ):
                ckpt.wait()
        assert there(tmp_path) == ([100, 200, 400], [])
        ckpt.resume(into, step=200)
        ckpt.save(250, into)
        ckpt.wait()
    assert there(tmp_path) == ([250], [400])
    assert not list(tmp_path.glob("step-00000260"))
    (tmp_path / "step-00000400" / "manifest.safetensors").write_bytes(b"torn")
    with pytest.raises(holdfast.UsageError, match="below step 400"):
        run_of(tmp_path, 300)


def test_skipped_checkpoints_are_abandoned_by_the_next_save(tmp_path: Path) -> None:
    """A resume that skips damaged checkpoints writes nothing; the next save abandons them."""
    run_of(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 3)
    damage(tmp_path, 4)
    before = sorted(tmp_path.rglob("*"))
    with holdfast.Checkpointer(tmp_path, keep=2, when_busy="wait") as ckpt:
        assert ckpt.resume(state(0)) == 2
        assert sorted(tmp_path.rglob("*")) == before
        ckpt.save(3, state(3, 0.5))
        ckpt.wait()
        assert there(tmp_path) == ([2, 3], [4])
    assert resumed(tmp_path) == (3, 3.5)


def test_requested_step_is_loaded_or_an_error(tmp_path: Path) -> None:
    """Without the requested step nothing else is loaded, and nothing is abandoned."""
    run_of(tmp_path, 1, 2, 3)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        for wrong, message in (
            ({"step": 7}, r"no checkpoint of step 7.*these steps: 3, 2, 1"),
            ({"before": 1}, "no checkpoint before step 1"),
            ({"step": 1, "before": 2}, "both given"),
            ({"step": "1"}, "not a whole number"),
            ({"before": 1.5}, "not a whole number"),
        ):
            with pytest.raises(holdfast.UsageError, match=message):
                ckpt.resume(state(0), **wrong)
        damage(tmp_path, 2)
        with pytest.raises(holdfast.DamagedError, match="step 2 is damaged"):
            ckpt.resume(state(0), step=2)
        with pytest.raises(holdfast.MismatchError):
            ckpt.resume({"y": torch.zeros(3)}, step=1)
    assert there(tmp_path) == ([1, 2, 3], [])
    assert not (tmp_path / "lineage.json").exists()


def test_resuming_the_newest_writes_nothing(tmp_path: Path) -> None:
    """A run that never went back has no lineage record."""
    run_of(tmp_path, 1, 2)
    assert resumed(tmp_path, step=2) == (2, 2.0)
    assert resumed(tmp_path, before=9) == (2, 2.0)
    run_of(tmp_path, 3)
    assert not (tmp_path / "lineage.json").exists()
    assert b'"branch"' not in (tmp_path / "step-00000003" / "manifest.safetensors").read_bytes()


def test_training_does_not_start_anew_if_all_is_abandoned(tmp_path: Path) -> None:
    """If the checkpoint that the run went back to is lost, a resume is an error."""
    run_of(tmp_path, 1, 2)
    resumed(tmp_path, step=1)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(holdfast.UsageError, match=r"2 \(abandoned\)"):
        resumed(tmp_path)
    assert resumed(tmp_path, step=2) == (2, 2.0)


@pytest.mark.parametrize(
    "data", [b"{", b'{"version": 2}', b'{"version": 1, "current": "x", "branches": {}}']
)
def test_damaged_lineage_is_an_error(data: bytes, tmp_path: Path) -> None:
    """Without a readable lineage, nothing is resumed, saved or deleted."""
    run_of(tmp_path, 1, 2)
    (tmp_path / "lineage.json").write_bytes(data)
    with pytest.raises(holdfast.DamagedError, match=r"lineage\.json"):
        resumed(tmp_path)
    with pytest.raises(holdfast.DamagedError, match=r"lineage\.json"):
        run_of(tmp_path, 3)
    assert holdfast.prune(tmp_path, keep_last=1).checkpoints == ()


def test_going_back_is_durable(tmp_path: Path) -> None:
    """A run that is killed right after it went back stays there."""
    run_of(tmp_path, 1, 2, 3)
    dead = holdfast.Checkpointer(tmp_path, grace_s=None)
    assert dead.resume(state(0), step=2) == 2
    assert resumed(tmp_path) == (2, 2.0)
    assert there(tmp_path) == ([1, 2], [3])


def test_late_save_of_a_dead_job_is_abandoned(serve: Serve) -> None:
    """A save of the branch that was left does not become current."""
    go = threading.Event()

    def hold_the_fourth(path: str) -> HookedDriver:
        async def hold(operation: str, key: str) -> None:
            if operation == "commit" and path.endswith("step-00000004"):
                await asyncio.to_thread(go.wait, 60)

        return HookedDriver(MemoryDriver(path), before=hold)

    uri = serve(hold_the_fourth)
    run_of(uri, 1, 2, 3)
    dead = holdfast.Checkpointer(uri, grace_s=None)
    dead.resume(state(0))
    late = dead.save(4, state(4))
    assert late is not None
    resumed(uri, step=2)
    go.set()
    late.wait(60)
    dead.close()
    assert there(uri) == ([1, 2], [3, 4])
    assert resumed(uri) == (2, 2.0)


def went_back(uri: str, fault: Fault) -> None:
    """Go back and save, on storage that fails as ``fault`` says."""
    opened = registry.open_driver

    def hooked(uri: str, *_: Any, **options: Any) -> HookedDriver:
        return HookedDriver(opened(uri), fault.on_before, fault.on_after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "open_driver", hooked)
        with holdfast.Checkpointer(uri, keep=2, when_busy="wait", grace_s=None) as ckpt:
            ckpt.resume(state(0), step=2)
            ckpt.save(5, state(5, 0.5))


@pytest.mark.nightly(7)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_storage_that_dies_at_any_access_leaves_one_branch_or_the_other(after: bool) -> None:
    """The next run resumes the newest of either branch, whole."""
    n = 0
    while True:
        uri, fault = fresh_uri(), Fault(n, after=after, for_good=True)
        run_of(uri, 1, 2, 3)
        try:
            went_back(uri, fault)
        except (holdfast.StorageError, holdfast.RankFailedError):
            assert fault.hit
        step, value = resumed(uri)
        assert (step, value) in ((3, 3.0), (2, 2.0), (5, 5.5))
        live, _ = there(uri)
        assert set(live) >= {2, step} if step != 3 else set(live) == {1, 2, 3}
        assert not (step != 3 and 3 in live), (n, live)
        if not fault.hit:
            assert step == 5
            return
        n += 1


def test_metrics_of_abandoned_steps_do_not_count(tmp_path: Path) -> None:
    """The new branch saves the same step without a metric, and the old one is forgotten."""
    with holdfast.Checkpointer(tmp_path, keep=Keep(last=9, best=1), when_busy="wait") as ckpt:
        for step, metric in ((1, 5.0), (2, 4.0), (3, 0.1), (4, 0.2)):
            ckpt.save(step, state(step), metric=metric)
    with holdfast.Checkpointer(tmp_path, keep=Keep(best=1), when_busy="wait") as ckpt:
        ckpt.resume(state(0), step=2)
        ckpt.save(3, state(3, 0.5))
        ckpt.wait()
        ckpt.save(4, state(4, 0.5), metric=9.0)
        ckpt.wait()
        assert there(tmp_path) == ([2, 4], [])
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"1": 5.0, "2": 4.0, "4": 9.0}


def test_copy_of_a_run_keeps_its_branches(tmp_path: Path) -> None:
    """A recursive copy copies the lineage."""
    run_of(tmp_path / "a", 1, 2, 3)
    resumed(tmp_path / "a", step=2)
    holdfast.copy(tmp_path / "a", tmp_path / "b", recursive=True)
    assert there(tmp_path / "b") == there(tmp_path / "a") == ([1, 2], [3])


def test_any_checkpoint_directly_in_the_folder_counts(tmp_path: Path) -> None:
    """Any name counts; only names given by the Checkpointer are deleted."""
    for step in (5, 10):
        holdfast.save(tmp_path / f"epoch={step}", state(step))
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        assert ckpt.resume(state(0)) == 10
        for step in (11, 12):
            ckpt.save(step, state(step))
    assert there(tmp_path)[0] == [5, 10, 12]
    assert resumed(tmp_path, step=5) == (5, 5.0)
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        ckpt.resume(state(0))
        ckpt.save(20, state(20))
    assert there(tmp_path) == ([5, 20], [10])


def test_foreign_checkpoint_that_does_not_fit_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exported weights are skipped, unless nothing else is there."""
    holdfast.save(tmp_path / "export", {"weights": torch.zeros(3)}, step=9)
    with pytest.raises(holdfast.MismatchError):
        resumed(tmp_path)
    (tmp_path / "export").rename(tmp_path.parent / "export")
    run_of(tmp_path, 5)
    (tmp_path.parent / "export").rename(tmp_path / "export")
    assert resumed(tmp_path) == (5, 5.0)
    assert "export does not fit" in caplog.text


def test_checkpoints_that_cannot_be_resumed_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names checkpoints without a step, and those in deeper folders."""
    holdfast.save(tmp_path / "plain", {"x": torch.zeros(3)})
    holdfast.save(tmp_path / "run" / "step-1", state(1))
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(state(0)) == 0
    assert "plain, run/step-1" in caplog.text


Walk = list[tuple[str, int]]


@given(st.lists(st.tuples(st.sampled_from(["save", "back"]), st.integers(0, 20)), max_size=30))
def test_lineage_acts_like_a_list_of_steps(walk: Walk) -> None:
    """The live checkpoints are those in a list that is cut whenever training goes back."""
    lineage, saved = Lineage(), dict[int, str]()  # step -> branch
    histories: dict[int, list[int]] = {}
    line: list[int] = []
    for n, (what, at) in enumerate(walk):
        if what == "save":
            step = (line[-1] if line else 0) + 1 + at
            line = [*line, step]
            saved[step] = lineage.current
            histories = {s: h for s, h in histories.items() if step not in h} | {step: line}
        elif histories:
            step = sorted(histories)[at % len(histories)]
            line = histories[step]
            lineage = lineage.gone_back(saved[step], step, f"{n:016x}")
            lineage = Lineage.decode(lineage.encode())
        live = {step for step, branch in saved.items() if lineage.is_live(branch, step)}
        assert live >= set(line)
        assert max(live, default=0) == max(line, default=0)
    assert lineage.is_live("unknown", None)


def test_unknown_branch_counts_as_the_root() -> None:
    """A checkpoint copied from another run counts as an ancestor."""
    assert Lineage().is_live("0123456789abcdef", 10**9)
    gone = Lineage().gone_back("fedcba9876543210", 5, "0123456789abcdef")
    assert gone.parents == {"0123456789abcdef": (ROOT, 5)}
    assert [gone.is_live("fedcba9876543210", step) for step in (5, 6)] == [True, False]
