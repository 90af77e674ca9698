"""Test going back in a run: later checkpoints are abandoned, and no ancestor is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from support.bits import fresh_uri
from support.branches import resumed, run_of, state, there
from support.drivers import Fault, HookedDriver
from support.given import Serve

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations import location

Keep = holdfast.Keep


def test_going_back_sets_aside_what_is_later(tmp_path: Path) -> None:
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


def test_abandoned_checkpoints_stay_where_that_is_asked_for() -> None:
    """Until they are pruned by hand; beside the rules for the others."""
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


def test_a_save_at_an_abandoned_step_replaces_it(tmp_path: Path) -> None:
    """And leads to where training is."""
    run_of(tmp_path, 1, 2, 3)
    with holdfast.Checkpointer(tmp_path, when_busy="wait") as ckpt:
        ckpt.resume(state(0), step=1)
        ckpt.save(2, state(2, 0.5))
    assert there(tmp_path) == ([1, 2], [3])
    assert resumed(tmp_path) == (2, 2.5)
    with holdfast.open(tmp_path / "step-00000002") as checkpoint:
        assert checkpoint.verify().ok


def test_before_a_step_is_the_newest_good_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is damaged is passed over."""
    run_of(tmp_path, 1, 2, 3, 4)
    (image,) = (tmp_path / "step-00000003").glob("data/*/0.safetensors")
    data = bytearray(image.read_bytes())
    data[5000] ^= 1
    image.write_bytes(data)
    assert resumed(tmp_path, before=4) == (2, 2.0)
    assert "step 3 is damaged" in caplog.text
    assert there(tmp_path) == ([1, 2], [3, 4])
    assert resumed(tmp_path) == (2, 2.0)


def test_going_back_twice_and_forth() -> None:
    """A run can return to an earlier branch and to an abandoned checkpoint."""
    uri = fresh_uri()
    run_of(uri, 1, 2, 3, 4)
    assert resumed(uri, step=2) == (2, 2.0)
    with holdfast.Checkpointer(uri, when_busy="wait") as ckpt:
        ckpt.resume(state(0))
        ckpt.save(5, state(5, 0.5))
        ckpt.save(6, state(6, 0.5))
    assert there(uri) == ([1, 2, 5, 6], [3, 4])
    assert resumed(uri, step=5) == (5, 5.5)
    assert there(uri) == ([1, 2, 5], [3, 4, 6])
    assert resumed(uri, step=1) == (1, 1.0)
    assert there(uri) == ([1], [2, 3, 4, 5, 6])
    assert resumed(uri, step=4) == (4, 4.0)
    assert there(uri) == ([1, 2, 3, 4], [5, 6])
    assert resumed(uri, step=6) == (6, 6.5)
    assert there(uri) == ([1, 2, 5, 6], [3, 4])
    assert resumed(uri) == (6, 6.5)


def test_the_same_process_may_go_back(tmp_path: Path) -> None:
    """From a divergence that it has seen: saves under way end first."""
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
def test_a_step_below_the_newest_is_an_error(call: str, tmp_path: Path) -> None:
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


def test_a_first_save_below_the_newest_is_an_error(tmp_path: Path) -> None:
    """Loading an earlier checkpoint by hand does not go back: nothing is deleted."""
    run_of(tmp_path, 100, 200, 300, 400)
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        into = state(0)
        holdfast.load(tmp_path / "step-00000200", into=into)
        ckpt.save(250, into)
        with pytest.raises(
            holdfast.UsageError, match=r"step 250 is below step 400.*resume\(state, step="
        ):
            ckpt.wait()
        assert there(tmp_path) == ([100, 200, 300, 400], [])
        ckpt.save(260, into)
        with pytest.raises(holdfast.UsageError, match="step 260 is below"):
            ckpt.wait()
        ckpt.resume(into, step=200)
        ckpt.save(250, into)
        ckpt.wait()
    assert there(tmp_path) == ([250], [300, 400])
    assert not list(tmp_path.glob("step-00000260"))


def test_a_first_save_above_the_newest_goes_on_with_the_branch_that_is_there(
    tmp_path: Path,
) -> None:
    """Though nobody has resumed."""
    run_of(tmp_path, 1, 2, 3)
    resumed(tmp_path, step=2)
    run_of(tmp_path, 4, mark=0.5)
    assert there(tmp_path) == ([1, 2, 4], [3])


def test_a_first_save_below_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """Its name tells its step: whether the run has come so far is not known."""
    run_of(tmp_path, 1, 4)
    (tmp_path / "step-00000004" / "manifest.safetensors").write_bytes(b"torn")
    with pytest.raises(holdfast.UsageError, match="below step 4"):
        run_of(tmp_path, 3)


def test_what_is_passed_over_is_abandoned_once_training_saves_again(tmp_path: Path) -> None:
    """Skipped damaged checkpoints are abandoned by the next save."""
    run_of(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        (image,) = (tmp_path / f"step-{step:08d}").glob("data/*/0.safetensors")
        data = bytearray(image.read_bytes())
        data[5000] ^= 1
        image.write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    into = state(0)
    with holdfast.Checkpointer(tmp_path, keep=2, when_busy="wait") as ckpt:
        assert ckpt.resume(into) == 2
        assert sorted(tmp_path.rglob("*")) == before
        ckpt.save(3, state(3, 0.5))
        ckpt.wait()
        assert there(tmp_path) == ([2, 3], [4])
    assert resumed(tmp_path) == (3, 3.5)


def test_a_step_that_was_asked_for_is_loaded_or_an_error(tmp_path: Path) -> None:
    """Never another one; and nothing is set aside then."""
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
        (image,) = (tmp_path / "step-00000002").glob("data/*/0.safetensors")
        image.unlink()
        with pytest.raises(holdfast.DamagedError, match="step 2 is damaged"):
            ckpt.resume(state(0), step=2)
        with pytest.raises(holdfast.MismatchError):
            ckpt.resume({"y": torch.zeros(3)}, step=1)
    assert there(tmp_path) == ([1, 2, 3], [])
    assert not (tmp_path / "lineage.json").exists()


def test_going_on_from_the_newest_writes_nothing(tmp_path: Path) -> None:
    """A run that never went back has no record of it."""
    run_of(tmp_path, 1, 2)
    assert resumed(tmp_path, step=2) == (2, 2.0)
    assert resumed(tmp_path, before=9) == (2, 2.0)
    run_of(tmp_path, 3)
    assert not (tmp_path / "lineage.json").exists()
    assert b'"branch"' not in (tmp_path / "step-00000003" / "manifest.safetensors").read_bytes()


def test_where_all_is_abandoned_training_does_not_begin_anew(tmp_path: Path) -> None:
    """Somebody has deleted what the run went back to."""
    run_of(tmp_path, 1, 2)
    resumed(tmp_path, step=1)
    for path in sorted((tmp_path / "step-00000001").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(holdfast.UsageError, match=r"2 \(abandoned\)"):
        resumed(tmp_path)
    assert resumed(tmp_path, step=2) == (2, 2.0)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1, "current": "x", "branches": {}}']
)
def test_a_damaged_record_is_an_error(data: bytes, tmp_path: Path) -> None:
    """Without a readable lineage, nothing is resumed, saved or deleted."""
    run_of(tmp_path, 1, 2)
    (tmp_path / "lineage.json").write_bytes(data)
    with pytest.raises(holdfast.DamagedError, match=r"lineage\.json"):
        resumed(tmp_path)
    with pytest.raises(holdfast.DamagedError, match=r"lineage\.json"):
        run_of(tmp_path, 3)
    assert holdfast.prune(tmp_path, keep_last=1).checkpoints == ()


@pytest.mark.nightly(4)
def test_a_run_goes_on_after_a_kill_right_after_it_went_back(tmp_path: Path) -> None:
    """Going back is durable when ``resume`` returns."""
    run_of(tmp_path, 1, 2, 3)
    dead = holdfast.Checkpointer(tmp_path, grace_s=None)
    assert dead.resume(state(0), step=2) == 2
    assert resumed(tmp_path) == (2, 2.0)
    assert there(tmp_path) == ([1, 2], [3])


def test_a_save_of_a_dead_job_that_lands_late_is_abandoned(serve: Serve) -> None:
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


def accesses(back: dict[str, int]) -> int:
    """How often going back, and the next save, access the storage."""
    uri, fault = fresh_uri(), Fault(1 << 30, after=False, for_good=False)
    run_of(uri, 1, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        hooked(patch, fault)
        went_back(uri, back)
    return fault.seen + 1


def hooked(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Whatever the run's leader opens fails as ``fault`` says."""
    opened = location.open_driver
    patch.setattr(
        location,
        "open_driver",
        lambda uri, **options: HookedDriver(opened(uri), fault.on_before, fault.on_after),
    )


def went_back(uri: str, back: dict[str, int]) -> None:
    """Go back, and save."""
    with holdfast.Checkpointer(uri, keep=2, when_busy="wait", grace_s=None) as ckpt:
        ckpt.resume(state(0), **back)
        ckpt.save(5, state(5, 0.5))


@pytest.mark.nightly(7)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_storage_that_dies_at_any_access_leaves_one_line_or_the_other(after: bool) -> None:
    """The next run resumes the newest of either branch, whole."""
    back = {"step": 2}
    for n in range(accesses(back)):
        uri, fault = fresh_uri(), Fault(n, after=after, for_good=True)
        run_of(uri, 1, 2, 3)
        with pytest.MonkeyPatch.context() as patch:
            hooked(patch, fault)
            try:
                went_back(uri, back)
            except (holdfast.StorageError, holdfast.RankFailedError):
                assert fault.hit
        step, value = resumed(uri)
        assert (step, value) in ((3, 3.0), (2, 2.0), (5, 5.5))
        live, abandoned = there(uri)
        assert set(live) >= {2, step} if step != 3 else set(live) == {1, 2, 3}
        assert not (step != 3 and 3 in live), (n, live, abandoned)


def test_metrics_of_abandoned_steps_do_not_count(tmp_path: Path) -> None:
    """Though the new branch saves the same step without a metric."""
    keep = Keep(best=1)
    with holdfast.Checkpointer(tmp_path, keep=Keep(last=9, best=1), when_busy="wait") as ckpt:
        for step, metric in ((1, 5.0), (2, 4.0), (3, 0.1), (4, 0.2)):
            ckpt.save(step, state(step), metric=metric)
    with holdfast.Checkpointer(tmp_path, keep=keep, when_busy="wait") as ckpt:
        ckpt.resume(state(0), step=2)
        ckpt.save(3, state(3, 0.5))
        ckpt.wait()
        ckpt.save(4, state(4, 0.5), metric=9.0)
        ckpt.wait()
        assert there(tmp_path) == ([2, 4], [])
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"1": 5.0, "2": 4.0, "4": 9.0}


def test_a_copy_of_a_run_keeps_its_branches(tmp_path: Path) -> None:
    """What was abandoned there is abandoned here."""
    run_of(tmp_path / "a", 1, 2, 3)
    resumed(tmp_path / "a", step=2)
    run_of(tmp_path / "a", 4, mark=0.5)
    holdfast.copy(tmp_path / "a", tmp_path / "b", recursive=True)
    assert there(tmp_path / "b") == there(tmp_path / "a") == ([1, 2, 4], [3])


def test_memory_holds_the_same(tmp_path: Path) -> None:
    """The record lies beside the checkpoints, on any storage."""
    uri = fresh_uri()
    run_of(uri, 1, 2)
    resumed(uri, step=1)
    driver = MemoryDriver(uri.removeprefix("memory://"))
    record = json.loads(asyncio.run(driver.get("lineage.json")))
    (name,) = record["branches"]
    assert record == {"version": 1, "current": name, "branches": {name: {"from": "", "step": 1}}}
