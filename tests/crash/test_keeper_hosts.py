"""Lost hosts, with their trainers and keepers: real jobs under torchrun.

Each host has a keeper, an address and a failure domain of its own. Whichever host is lost, the run
resumes from a whole step and reaches the losses of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from support.kept_job import Accident, Job
from support.kept_runs import KeptRun, wait_until

from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE
from holdfast.storage.keeper.process import TOKEN_VARIABLE

pytestmark = pytest.mark.timeout(400)

HOSTS = ("a", "b", "c", "d")
DELAY_S = 0.12


def killed_at(step: int, **options: object) -> Job:
    """Return a job whose trainers are all killed once that step is protected."""
    return Job(step, accident=Accident(step, "kill"), guards=True, **options)  # type: ignore[arg-type]


@pytest.mark.nightly(22)
def test_a_host_is_lost_and_an_empty_one_takes_its_place(run: KeptRun) -> None:
    """The image of the lost host is rebuilt there from parity."""
    hosts = HOSTS[:3]
    run.train(killed_at(5, every=4, hosts=hosts), 3)
    assert run.steps() == [4]
    run.lose("b")
    found = run.train(Job(9, every=4, hosts=("a", "new", "c"), guards=True), 3)
    found.check(5, "memory", 9)
    assert run.status_of("new")["counters"]["rebuilt"] == 1
    assert run.steps() == [4, 8]
    assert run.status_of("a")["protected_step"] == 9
    run.verify()


@pytest.mark.nightly(33)
def test_a_spare_host_has_the_lost_images_before_the_job_restarts(run: KeptRun) -> None:
    """Its keeper rebuilds them ahead, so the resume rebuilds none, and reads them on that host."""
    run.environment[TOKEN_VARIABLE] = "0123456789abcdef" * 2
    run.train(killed_at(5, hosts=HOSTS[:3]), 3)
    lost = run.status_of("b")["address"]
    base = run.base / "new"
    base.mkdir(mode=0o700)
    command = [sys.executable, "-c", "import sys, holdfast.cli as c; sys.exit(c.main())", "keeper"]
    command += ["run", str(run.uri), "--domain", "new", "--serve", "127.0.0.9", "--linger", "60s"]
    command += ["--spare-of", f"{lost},{run.status_of('a')['address']}"]
    environment = os.environ | run.environment | {KEEPER_DIR_VARIABLE: str(base)}
    with subprocess.Popen(command, env=environment) as spare:
        wait_until(lambda: bool(run.status_of("new")["ready"]))
        time.sleep(5)
        assert run.status_of("new")["generations"] == []  # nothing is lost
        run.lose("b")
        wait_until(lambda: run.status_of("new")["counters"]["rebuilt"] == 1, 60)
        (held,) = run.status_of("new")["generations"]
        assert (held["step"], held["ranks"], held["agreed"]) == (5, [1], True)
        found = run.train(Job(9, hosts=("a", "new", "c"), guards=True), 3)
        found.check(5, "memory", 9)
        assert run.status_of("new")["counters"]["rebuilt"] == 1
        assert found.resumed["tiers"]["parity"] == 0
        run.end_keepers()
        assert spare.wait(60) == 0


@pytest.mark.nightly(8)
def test_trainers_and_keepers_are_told_to_end_at_once(run: KeptRun) -> None:
    """When all get SIGTERM together, as from a scheduler, the current step is durable."""
    accident = Accident(3, "sigterm")
    found = run.train(Job(30, hosts=HOSTS[:2], accident=accident, pause_s=0.05), 2)
    assert found.code != 0
    (step,) = run.steps()
    assert step in range(3, 7)  # one rank gets the signal a step or two earlier
    run.verify()


@pytest.mark.nightly(30)
def test_ranks_wait_for_an_image_that_takes_long_to_make_again(run: KeptRun) -> None:
    """Ranks wait for a slow rebuild as long as its keeper needs, beyond their usual patience."""
    run.train(killed_at(3, hosts=HOSTS[:3]), 3)
    run.lose("b")
    found = run.train(Job(5, hosts=("a", "new", "c"), patience_s=4, rate="20KiB"), 3)
    found.check(3, "memory", 5)
    assert found.resumed["seconds"] > 4  # otherwise it took no longer than their usual patience


@pytest.mark.nightly(12)
def test_keepers_are_asked_again_once_all_have_offered_what_they_hold(run: KeptRun) -> None:
    """Earlier answers may be inconsistent, because keepers still dropped images in between."""
    found = run.train(Job(1, hosts=HOSTS[:2], late_s=1.0), 2)
    assert found.code == 0, found.stderr
    looks = [
        [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
        for path in sorted(run.folder.glob("job 1/looks *"))
    ]
    assert len(looks) == 2
    offered_s = max(of[0][1] for of in looks)
    assert min(of[-1][0] for of in looks) > offered_s


@pytest.mark.nightly(15)
def test_a_job_goes_on_with_fewer_hosts_and_ranks(run: KeptRun) -> None:
    """A job resumes on fewer hosts, and reads images from the keeper of the unused host."""
    run.train(killed_at(5, hosts=HOSTS[:2]), 4)
    found = run.train(Job(8, hosts=("a",)), 2)
    found.check(5, "memory", 8)
    assert found.resumed["tiers"]["peer"] > 0


@pytest.mark.nightly(25)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_waits_for_a_host_that_does_not_answer(run: KeptRun, ranks: int) -> None:
    """The host holds images of a newer step. It belongs to this job, or to the previous one."""
    run.train(Job(5, every=4, hosts=HOSTS[:2], protect="off", accident=Accident(5, "kill")), 2)
    assert run.steps() == [4]
    job = Job(8, every=4, hosts=HOSTS[:ranks], protect="off", deadline_s=2.0)
    found = run.train_beside_stopped_keeper(job, 2, "b", until="resuming", pause_s=8)
    found.check(5, "memory", 8)
    assert "waiting for these keepers" in found.stderr


@pytest.mark.nightly(20)
def test_all_ranks_join_once_the_last_keeper_answers(run: KeptRun) -> None:
    """They agree on the step, although only one of them waits for its keeper."""
    run.train(Job(2, hosts=HOSTS[:2], accident=Accident(2, "kill")), 2)
    job = Job(100, hosts=HOSTS[:2], deadline_s=2.0, pause_s=0.1, gives_up_after="0")
    found = run.train_beside_stopped_keeper(job, 2, "b", until="resumed")
    assert found.code == 0, found.stderr
    assert "1 ranks have no keeper, including rank 1" in found.resumed["problem"]
    assert found.counters["kept"] > 0
    assert found.counters["not_kept"] > 0
    assert found.counters["kept"] + found.counters["not_kept"] == 100 - (found.resumed["step"] or 0)
    assert found.stderr.count("steps are kept in memory from") == 1


@pytest.mark.nightly(20)
def test_a_resume_does_not_wait_for_a_host_whose_images_can_be_rebuilt(run: KeptRun) -> None:
    """No step depends on the answer of that host."""
    run.train(killed_at(5, every=4, hosts=HOSTS[:3]), 3)
    with run.stopped_keeper("b"):
        found = run.train(Job(6, every=4, hosts=("a", "c")), 2)
    found.check(5, "memory", 6)
    assert "waiting for these keepers" not in found.stderr


@pytest.mark.nightly(30)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_keeper_dies_while_it_writes_to_storage(run: KeptRun, name: str) -> None:
    """The keeper that replaces the leader, or another one, gets the images and flushes again, even
    if it learns that the step is agreed before it has an image of it."""
    run.environment["HOLDFAST_FILE_FAULTS"] = f"delay:1,delay_s:{DELAY_S}"
    process, _ = run.begin(Job(8, every=4, hosts=HOSTS[:2], enter_s=1), 2)
    wait_until((run.uri / "step-00000008" / "data").exists, 90)
    time.sleep(5 * DELAY_S)
    os.kill(run.status_of(name)["pid"], signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    run.verify()
    assert run.steps() == [4, 8], stderr


@pytest.mark.nightly(9)
def test_hosts_that_are_too_few_for_what_is_asked_are_refused_by_name(run: KeptRun) -> None:
    """Too few hosts for the requested protection are refused before the first step."""
    found = run.train(Job(3, hosts=HOSTS[:2], protect="pq"), 2)
    assert found.code != 0
    assert "2 hosts cannot guard against the loss of 2: 3 or more are needed" in found.stderr


@pytest.mark.nightly(40)
def test_keepers_cannot_reach_each_other(run: KeptRun) -> None:
    """Training continues. Steps are protected and durable again once the network is back."""
    probe = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], check=False)
    if os.geteuid() or probe.returncode:
        pytest.skip("this user may not create network namespaces")
    job = Job(81, every=40, hosts=HOSTS[:3], pause_s=0.2, waits=False)
    process, out = run.begin(job, 3, isolated=True)
    wait_until(lambda: (run.status_of("a")["protected_step"] or 0) >= 5, 120)
    network = ["nsenter", "--net", "--target", str(process.pid), "ip", "route"]
    cut = [("unreachable", f"127.0.0.{number}/32", "table", "local") for number in (2, 3, 4)]
    for route in cut:
        subprocess.run([*network, "add", *route], check=True)
    before = len((out / "losses 0").read_text().splitlines())
    time.sleep(8)
    during = len((out / "losses 0").read_text().splitlines())
    for route in cut:
        subprocess.run([*network, "del", *route], check=True)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert during > before + 5  # nobody waited for the network
    assert run.steps() == [40, 80], stderr
    assert run.status_of("a")["protected_step"] > during


@pytest.mark.nightly(40)
def test_storage_is_away(run: KeptRun) -> None:
    """Keepers retry until it is back. Meanwhile, steps stay in memory."""
    process, out = run.begin(Job(60, every=4, hosts=HOSTS[:2], pause_s=0.3), 2)
    wait_until(lambda: 4 in run.steps(), 120)
    away = run.uri.with_name("away")
    os.rename(run.uri, away)
    run.uri.touch()  # prevents a new folder
    time.sleep(5)
    assert process.poll() is None
    run.uri.unlink()
    os.rename(away, run.uri)
    began = len((out / "losses 0").read_text().splitlines())
    wait_until(lambda: (run.steps() or [0])[-1] > began, 120)  # type: ignore[operator]
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert run.steps()[-1] == 60, stderr
    run.verify()
