"""Failures of keepers and trainers, with real processes, alone and under torchrun.

After every failure a run resumes from a complete step and reaches the losses of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.kept_job import POINTS, Accident, Job
from support.kept_runs import KeptRun, wait_until

from holdfast.storage.arenas.client import status_of
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.drill), 2])
def test_all_trainers_are_killed_between_two_steps(run: KeptRun, world: int) -> None:
    """The job resumes from the last step in memory; storage has only an older one."""
    run.train(Job(9, every=4, accident=Accident(6, "kill")), world)
    assert run.steps() == [4]
    found = run.train(Job(9, every=4), world)
    found.check(6, "memory", 9)


@pytest.mark.nightly(13)
@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[pytest.mark.drill] * (point != "copy")) for point in POINTS],
)
def test_a_trainer_is_killed_while_a_step_is_captured(run: KeptRun, point: str) -> None:
    """The job resumes from the previous step and reuses the slots of the unfinished one."""
    run.train(Job(5, accident=Accident(5, f"kill before {point}")))
    found = run.train(Job(9))
    found.check(4, "memory", 9)
    assert found.counters["kept"] == 5
    assert len(run.status_of()["generations"]) <= 3


@pytest.mark.nightly(11)
@pytest.mark.clocked
def test_a_killed_trainer_whose_children_live_on_is_noticed(run: KeptRun) -> None:
    """Workers of a data loader can outlive the trainer in the same way and keep its connection open."""
    process, _ = run.begin(Job(5, forks=True, accident=Accident(5, "kill")))
    process.wait(60)
    assert process.stderr is not None
    process.stderr.close()  # its child has it, too
    found = run.train(Job(9))
    assert found.resumed == {"step": 5, "tier": "memory"}
    assert found.seconds < 30
    assert found.counters["not_kept"] == 0


@pytest.mark.nightly(23)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.drill), 2])
def test_a_keeper_that_dies_is_replaced_and_nothing_sealed_is_lost(
    run: KeptRun, world: int
) -> None:
    """Trainers start a new keeper and pass it the memory that they have mapped."""
    job = Job(9, every=100, accident=Accident(5, "kill keeper", rank=0), pause_s=1.0)
    found = run.train(job, world)
    assert found.code == 0, found.stderr
    found.check_losses(9)
    status = run.status_of()
    assert status["counters"]["agreed"] >= 1
    after = run.train(Job(11), world)
    assert after.resumed["tier"] == "memory"
    assert after.resumed["step"] >= 5
    after.check_losses(11)


@pytest.mark.nightly(9)
def test_survivors_of_a_dead_rank_end_at_once(run: KeptRun) -> None:
    """The launcher sends them SIGTERM. No save can complete without the dead rank, so they do not
    use their grace period."""
    grace_s = 25
    process, out = run.begin(Job(9, accident=Accident(5, "die", rank=1), grace_s=grace_s), 2)
    wait_until(lambda: (out / "losses 1").read_text().count("\n") == 5, 90)
    began_s = time.monotonic()
    _, stderr = process.communicate(timeout=110)
    assert process.returncode != 0
    assert time.monotonic() - began_s < grace_s, stderr
    after = run.train(Job(9), 2)
    assert after.resumed["tier"] == "memory"
    after.check_losses(9)


@pytest.mark.nightly(9)
def test_a_keeper_ends_with_the_training(run: KeptRun) -> None:
    """If the last step is in storage, its memory is no longer needed, unlike after a kill."""
    run.train(Job(4, every=4, accident=Accident(4, "kill")), 2)
    keeper = run.keeper_of()
    time.sleep(2)
    assert status_of(keeper) is not None
    found = run.train(Job(8, every=4), 2)
    assert found.code == 0, found.stderr
    wait_until(lambda: status_of(keeper) is None, 20)
    assert run.steps() == [4, 8]


@pytest.mark.nightly(14)
def test_a_keeper_serves_ranks_of_another_pid_namespace(run: KeptRun) -> None:
    """In a sidecar, the keeper sees none of their process ids, but still notices their end."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this user may not create PID namespaces")
    holdfast = Path(sys.executable).with_name("holdfast")
    sidecar = subprocess.Popen(
        [*command, str(holdfast), "keeper", "run", str(run.uri)],
        env=os.environ | {KEEPER_DIR_VARIABLE: str(run.base)},
    )
    try:
        wait_until(lambda: run.status_of()["pid"] == 1, 60)
        run.train(Job(6, starts=False, accident=Accident(4, "kill")), 2)
        found = run.train(Job(6, starts=False), 2)
        found.check(4, "memory", 6)
        assert run.status_of()["ranks"] == []
    finally:
        run.end_keepers()
        sidecar.wait(60)


@pytest.mark.nightly(16)
def test_a_keeper_that_hangs_holds_up_training_for_its_deadline_only(run: KeptRun) -> None:
    """The run skips steps in memory, and the trainer itself writes the step due in storage."""
    job = Job(8, every=8, accident=Accident(3, "stop keeper"), deadline_s=6.0)
    found = run.train(job)
    assert found.code == 0, found.stderr
    assert found.counters["saved"] == 1
    assert found.counters["not_kept"] >= 1
    assert run.steps() == [8]
    found.check_losses(8)


@pytest.mark.nightly(18)
def test_what_is_on_storage_of_the_host_is_in_memory_again_after_it_has_rebooted(
    run: KeptRun,
) -> None:
    """No process of the host is left. The newest step written there counts. Older ones go."""
    nvme = run.folder / "nvme"
    local = {"local": str(nvme), "local_every": 3}
    run.train(Job(8, **local, accident=Accident(8, "kill"), pause_s=0.2))
    run.end_keepers()
    found = run.train(Job(9, **local))
    found.check(6, "memory", 9)
    (kept,) = nvme.iterdir()
    assert len(list(kept.iterdir())) == 2


@pytest.mark.nightly(14)
def test_a_user_can_choose_not_to_wait_for_a_keeper_that_does_not_answer(run: KeptRun) -> None:
    """The job resumes from storage, and says what may be lost."""
    run.train(Job(6, every=4, accident=Accident(6, "kill")))
    with run.stopped_keeper():
        found = run.train(Job(9, every=4, deadline_s=2.0, gives_up_after="0"))
    assert (found.resumed["step"], found.resumed["tier"]) == (4, "storage")
    assert "newer steps may be lost" in found.resumed["problem"]


@pytest.mark.nightly(15)
def test_steps_of_a_new_layout_are_kept_at_once(run: KeptRun) -> None:
    """All ranks see it at the same step, and agree on another plan there."""
    found = run.train(Job(8, grows_at=4), 2)
    assert found.code == 0, found.stderr
    assert (found.counters["kept"], found.counters["not_kept"]) == (8, 0)
    found.check_losses(8)


@pytest.mark.nightly(70)
def test_a_new_layout_of_one_rank_does_not_end_steps_in_memory(run: KeptRun) -> None:
    """The other ranks notice that steps are no longer kept, and agree on a plan with it."""
    found = run.train(Job(250, every=1000, grows_at=4, grows_on=1, pause_s=0.1), 2)
    assert found.code == 0, found.stderr
    assert "is new, but not on all ranks" in found.stderr
    assert found.counters["kept"] > 50, found.stderr
    assert run.steps() == []
    found.check_losses(250)


@pytest.mark.drill
def test_a_trainer_that_wakes_in_another_epoch_is_refused_and_harms_nothing(run: KeptRun) -> None:
    """It was stopped, and a new job has taken its place. It still maps memory of the keeper, which
    cannot be taken from it."""
    process, out = run.begin(Job(2000, pause_s=0.02))
    wait_until(lambda: (out / "resumed 0").exists() and run.status_of()["counters"]["agreed"] > 5)
    process.send_signal(signal.SIGSTOP)
    first = run.train(Job(300, pause_s=0.005, accident=Accident(60, "kill")))
    begun = first.resumed["step"]
    process.send_signal(signal.SIGCONT)
    found = run.train(Job(80))
    process.kill()
    _, stderr = process.communicate()
    assert "is over" in stderr or "this is epoch" in stderr
    assert first.resumed["tier"] == "memory"
    assert begun >= 5
    found.check(60, "memory", 80)
