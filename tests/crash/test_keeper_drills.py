"""Accidents that coincide, with real processes: a host is lost while a step is being protected, or
while another one is rebuilt; keepers cannot reach each other; storage is away.

A run resumes from the last protected step, or goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from support.kept_job import Accident, Job
from support.kept_runs import KeptRun, trainers_of, wait_until

import holdfast

pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly(40)]

HOSTS = ("a", "b", "c", "d")
SLOWLY = "20KiB"
"""Rate of reading from other keepers. At this rate, encoding or rebuilding a step takes seconds."""


def protected_at(run: KeptRun, step: int, hosts: tuple[str, ...], **options: str) -> None:
    """Run a job that is killed once this step is protected."""
    job = Job(step, hosts=hosts, guards=True, accident=Accident(step, "kill"), **options)  # type: ignore[arg-type]
    run.train(job, len(hosts))


def test_a_host_is_lost_while_a_step_is_being_protected(run: KeptRun) -> None:
    """The step before it stays protected until the new one is."""
    hosts = HOSTS[:3]
    protected_at(run, 4, hosts)
    slow = Job(7, hosts=hosts, rate=SLOWLY, accident=Accident(6, "kill"))
    assert run.train(slow, 3).resumed["step"] == 4
    assert run.status_of("a")["protected_step"] == 4
    run.lose("b")
    run.train(Job(8, hosts=("a", "new", "c")), 3).check(4, "memory", 8)


def test_another_host_is_lost_while_one_is_rebuilt(run: KeptRun) -> None:
    """Two losses are within what the parity covers, whenever the second one happens."""
    protected_at(run, 5, HOSTS, protect="pq")
    run.lose("b")
    hosts = ("a", "new", "c", "d")
    process, out = run.begin(Job(8, hosts=hosts, protect="pq", rate=SLOWLY), 4)
    wait_until(lambda: run.status_of("new")["pid"] > 0, 90)
    time.sleep(2)
    assert not (out / "resumed 0").exists()
    run.lose("d")
    os.kill(trainers_of(process)[3], signal.SIGKILL)
    process.communicate(timeout=200)
    assert process.returncode != 0
    run.train(Job(8, hosts=("a", "new", "c", "newer"), protect="pq"), 4).check(5, "memory", 8)


def test_keepers_cannot_reach_each_other(run: KeptRun) -> None:
    """Training goes on, and steps are protected and durable again once the network is back."""
    hosts = HOSTS[:3]
    probe = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], check=False)
    if os.geteuid() or probe.returncode:
        pytest.skip("this user may not create network namespaces")
    job = Job(81, every=40, hosts=hosts, pause_s=0.2, waits=False)
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


def test_storage_is_away(run: KeptRun) -> None:
    """Keepers retry until it is back. Meanwhile, steps stay in memory."""
    process, out = run.begin(Job(60, every=4, hosts=HOSTS[:2], pause_s=0.3), 2)
    wait_until(lambda: 4 in run.steps(), 120)
    away = run.uri.with_name("away")
    os.rename(run.uri, away)
    run.uri.touch()  # so that nobody makes a new folder
    time.sleep(5)
    assert process.poll() is None
    run.uri.unlink()
    os.rename(away, run.uri)
    began = len((out / "losses 0").read_text().splitlines())
    wait_until(lambda: (run.steps() or [0])[-1] > began, 120)  # type: ignore[operator]
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert run.steps()[-1] == 60, stderr
    for step in run.steps():
        with holdfast.open(run.uri / f"step-{step:08d}") as checkpoint:
            checkpoint.verify()
