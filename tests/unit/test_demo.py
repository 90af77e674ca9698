"""The parts of the demo. The whole of it, with its processes and its kill, is run by ``make demo``."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.demo import plan, text
from holdfast.cli.demo.incremental import space_nbytes
from holdfast.cli.demo.jobs import Job
from holdfast.cli.demo.journal import Event
from holdfast.cli.demo.weights import ENGINES, TRAINER, Outcome

pytestmark = pytest.mark.clocked


def test_ranks_share_a_batch_evenly() -> None:
    """The parts of all ranks, in order, are the batch; an uneven share is refused."""
    batch = text.batch(text.read_text(), 1)
    for world in (1, 4):
        parts = [text.part_of(batch, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), batch)
    with pytest.raises(holdfast.UsageError, match="16 sequences"):
        text.part_of(batch, 0, 3)


def test_only_what_a_demo_wrote_is_removed(tmp_path: Path) -> None:
    """A folder is emptied of an earlier demo's own files; somebody else's is refused."""
    made = plan.prepare(str(tmp_path / "demo"))
    for name in ("loss.svg", "notes.txt", "checkpoints/step-000001/manifest.safetensors"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("x")
    plan.prepare(str(made))
    assert sorted(p.name for p in made.iterdir()) == [".holdfast-demo", "notes.txt"]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "loss.svg").write_text("x")
    with pytest.raises(holdfast.UsageError, match="something other"):
        plan.prepare(str(tmp_path / "theirs"))
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["loss.svg"]


def test_given_uri_gets_a_fresh_place_below_it() -> None:
    """Two runs into one URI never meet, and its options are kept."""
    given = "file:///somewhere/runs?direct=off"
    uris = {plan.checkpoints_uri(given, Path("unused")) for _ in range(2)}
    assert len(uris) == 2
    assert all(re.fullmatch(r"file:///somewhere/runs/demo-.*\?direct=off", uri) for uri in uris)
    for uri in ("memory://x", "fsspec+memory://x"):
        with pytest.raises(holdfast.UsageError, match="memory"):
            plan.checkpoints_uri(uri, Path("unused"))


@pytest.mark.parametrize("linked", [True, False])
def test_space_of_an_incremental_save(tmp_path: Path, linked: bool) -> None:
    """A linked file counts once. Without links, borrowed bytes are clones and take no space."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "new").write_bytes(b"x" * 65536)
    if linked:
        os.link(tmp_path / "a" / "new", tmp_path / "b" / "old")
    seen: set[int] = set()
    first, second = (
        space_nbytes(f"file://{tmp_path}/{name}", seen, 1 << 20, borrowed)
        for name, borrowed in (("a", 0), ("b", 16384))
    )
    assert first - second == (0 if linked else 16384)
    assert space_nbytes("memory://a", seen, 1 << 20, 16384) == 1 << 20


def test_a_difference_fails_the_demo_of_weights() -> None:
    """Each rank of an engine must have the digest that the trainer reported for the version."""
    outcome = Outcome()
    for version, digest in ((1, "a"), (2, "b"), (3, "lost"), (3, "c")):
        told = {"version": version, "step": version, "digest": digest}
        outcome.add(TRAINER, Event("pushing", 0, 0.0, told))
    update = {"received_nbytes": 10, "prepare_s": 0.5, "pause_s": 0.25}
    for rank, version, digest in ((0, 1, "a"), (1, 1, "a"), (0, 3, "c")):
        told = {**update, "version": version, "digest": digest}
        outcome.add(ENGINES[0], Event("updated", rank, 0.0, told))
    assert outcome.differing() == []
    assert outcome.row(1, 100)[6:] == ["20 B", "500.0 ms", "250.0 ms", "-", "-", "-"]
    assert not outcome.is_up_to_date(ENGINES[0])
    told = {**update, "version": 3, "digest": "lost"}
    outcome.add(ENGINES[0], Event("updated", 1, 0.0, told))
    assert outcome.differing() == ["version 3 differs on two ranks"]


@pytest.mark.parametrize(
    "change", [{"steps": 4}, {"before": 1}, {"before": 3}, {"after": 0}], ids=str
)
def test_impossible_plan_is_refused(change: dict[str, int]) -> None:
    """Too few steps for a save to resume from; ranks that share unevenly."""
    good = {"steps": 40, "before": 4, "after": 2}
    made = plan.Plan(**good)
    assert (made.every, made.kill_at, made.victim) == (8, 24, 2)
    with pytest.raises(holdfast.UsageError):
        plan.Plan(**(good | change))


def python(code: str) -> list[str]:
    """Return a program for a job to run. Its first argument is the folder for journals."""
    return [sys.executable, "-c", code]


def test_failed_job_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """The error has the last output of the ranks. A job that should fail raises none."""
    failing = python("print('out of luck'); raise SystemExit(3)")
    with pytest.raises(holdfast.RankFailedError, match="status 3") as caught:
        Job(tmp_path / "a", 2, [], program=failing).run(lambda event: None)
    assert "out of luck" in str(caught.value)
    Job(tmp_path / "b", 2, [], program=failing).run(lambda event: None, survives=False)


def test_hanging_job_is_ended_at_its_deadline(tmp_path: Path) -> None:
    """The error names the deadline. Earlier events are delivered."""
    line = '{"kind": "ready", "rank": 0, "time_s": 1.0, "told": {}}'
    hanging = python(
        f"import sys, time; open(sys.argv[1] + '/rank-0.jsonl', 'w').write('{line}\\n'); "
        f"time.sleep(60)"
    )
    heard: list[Event] = []
    with pytest.raises(holdfast.DeadlineError, match="1 s"):
        Job(tmp_path / "a", 1, [], deadline_s=1.0, program=hanging).run(heard.append)
    assert [event.kind for event in heard] == ["ready"]


def test_terminated_demo_ends_its_job(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` and schedulers send it, leaves no torchrun behind."""
    told = tmp_path / "pid"
    ending = python(
        f"import os, signal, time; open({str(told)!r}, 'w').write(str(os.getpid())); "
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)",
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        Job(tmp_path / "a", 1, [], program=ending).run(lambda event: None)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
