"""The parts of the demo. The whole of it, with its processes and its kill, is run by ``make demo``."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.cli.demo import data, folder, torn
from holdfast.cli.demo.account import Account
from holdfast.cli.demo.jobs import Job
from holdfast.cli.demo.journal import Event, Journal, Watcher
from holdfast.cli.demo.model import ModelConfig, Transformer
from holdfast.cli.demo.picture import draw
from holdfast.cli.demo.plan import Plan
from holdfast.cli.demo.record import Record

pytestmark = pytest.mark.clocked


def record_of(ranks: int, steps: range, saved: tuple[int, ...] = ()) -> Record:
    """A job whose loss at step s is 5 - s / 100."""
    record = Record(ranks)
    for step in steps:
        told = {"step": step, "loss": 5 - step / 100, "seconds": 0.5, "tokens": 1000}
        record.add(Event("step", 0, float(step), told))
    for step in saved:
        for rank in range(ranks):
            told = {"step": step, "nbytes": 1 << 20, "captured_s": 0.1 * rank, "durable_s": 0.5}
            record.add(Event("saved", rank, float(step), told))
    return record


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    """The same step of the same seed is the same batch, whatever was asked before; others differ."""
    text = data.read_text()
    batch = data.batch(text, 3, 17)
    data.batch(text, 3, 18)
    assert batch.shape == (data.SEQUENCES, data.LENGTH + 1)
    assert np.array_equal(batch, data.batch(text, 3, 17))
    assert not np.array_equal(batch, data.batch(text, 3, 18))
    assert not np.array_equal(batch, data.batch(text, 4, 17))


def test_windows_are_text() -> None:
    """Each row is a passage of the text, also the one that ends with its last byte."""
    text = np.frombuffer(bytes(range(data.LENGTH + 2)), np.uint8)  # room for two windows
    rows = {bytes(row.tolist()) for row in data.batch(text, 0, 1)}
    assert rows == {bytes(text[:-1]), bytes(text[1:])}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_share_a_batch_without_rest(world: int) -> None:
    """The parts of all ranks, in order of rank, are the batch."""
    batch = data.batch(data.read_text(), 0, 1)
    parts = [data.part_of(batch, rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate(parts), batch)


def test_an_uneven_share_is_refused() -> None:
    """Three ranks cannot take equally many of sixteen sequences, and the mean over ranks would be
    another."""
    with pytest.raises(holdfast.UsageError, match="16 sequences"):
        data.part_of(data.batch(data.read_text(), 0, 1), 0, 3)


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    """Where the standard library has no sources, the error says so and names the folder."""
    with pytest.raises(holdfast.UsageError, match=str(tmp_path)):
        data.read_text(tmp_path)


def test_the_model_does_not_look_ahead() -> None:
    """A changed token changes the logits from its place on, and none before."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=32, heads=2, layers=2))
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_the_model_knows_positions() -> None:
    """The same bytes in another order end in other logits: attention alone would not tell."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=32, heads=2, layers=2))
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    logits = model(tokens)
    assert not torch.allclose(logits[0, -1], logits[1, -1], atol=1e-6)


def test_the_model_learns() -> None:
    """A few steps downhill on one batch lower its loss, each of them."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=32, heads=2, layers=1))
    tokens = torch.from_numpy(data.batch(data.read_text(), 0, 1))
    weights, losses = list(model.parameters()), []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        losses.append(float(loss.detach()))
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data.sub_(slope, alpha=0.1)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05


def test_a_journal_is_followed_line_by_line(tmp_path: Path) -> None:
    """A watcher hears each event once, of all ranks, and nothing of a line that is not whole."""
    journals, watcher = [Journal(tmp_path, rank) for rank in (0, 1)], Watcher(tmp_path)
    journals[0].write("step", step=1)
    journals[1].write("step", step=1)
    assert [(e.rank, e.kind, e.told) for e in watcher.news()] == [
        (0, "step", {"step": 1}),
        (1, "step", {"step": 1}),
    ]
    with (tmp_path / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"kind": "sa')
    assert list(watcher.news()) == []
    for journal in journals:
        journal.close()


def test_a_save_counts_when_all_ranks_have_told(tmp_path: Path) -> None:
    """Bytes are added up over the ranks, and the slowest rank sets the time."""
    record = record_of(4, range(1, 9), saved=(8,))
    (saved,) = record.saves
    assert (saved.step, saved.nbytes, saved.captured_s) == (8, 4 << 20, pytest.approx(0.3))
    record.add(
        Event("saved", 0, 9.0, {"step": 16, "nbytes": 1, "captured_s": 0.0, "durable_s": 0.0})
    )
    assert len(record.saves) == 1


def test_runs_are_compared_over_their_common_steps() -> None:
    """The greatest difference counts, whichever way it points; steps that only one has trained do
    not."""
    ours, reference = record_of(2, range(5, 11)), record_of(4, range(1, 9))
    ours.losses[7] -= 0.25
    assert ours.difference(reference) == pytest.approx(0.25)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """An SVG that says what happened, the same each time, and a PNG of some size."""
    before, after, reference = (
        record_of(4, range(1, 9), (4,)),
        record_of(2, range(5, 13), (8, 12)),
        record_of(4, range(1, 13)),
    )
    for name in ("a", "b"):
        svg, png = draw(before, after, reference, killed_at=8, victim=2, path=tmp_path / name)
        assert "while saving step 8" in svg.read_text()
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 20_000
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_unfinished_files_are_seen_as_such(tmp_path: Path) -> None:
    """What lies under a checkpoint's URI is listed with its size, and an upload without a name is
    marked."""
    attempt = tmp_path / "data" / "20310203T040506-00000000"
    attempt.mkdir(parents=True)
    (attempt / "0.safetensors").write_bytes(bytes(10))
    assert not torn.image_is_begun(str(tmp_path), 2)
    (attempt / ".2.safetensors.0123456789abcdef.tmp").write_bytes(bytes(5000))
    found = [(Path(f.key).name, f.nbytes, f.finished) for f in torn.find(str(tmp_path))]
    assert found == [
        (".2.safetensors.0123456789abcdef.tmp", 5000, False),
        ("0.safetensors", 10, True),
    ]
    assert torn.image_is_begun(str(tmp_path), 2)
    assert torn.find(str(tmp_path / "nowhere")) == []


def test_other_storage_is_listed_by_its_driver() -> None:
    """Where there is no local folder, the driver says what is there."""
    holdfast.save("memory://torn-elsewhere", {"x": np.arange(4.0)})
    assert "manifest.safetensors" in [f.key for f in torn.find("memory://torn-elsewhere")]


def test_only_what_a_demo_wrote_is_removed(tmp_path: Path) -> None:
    """A folder of an earlier demo is emptied of the demo's own files; a folder of somebody else is
    refused, untouched."""
    made = folder.prepare(str(tmp_path / "demo"))
    for name in ("loss.svg", "notes.txt", "checkpoints/step-000001/manifest.safetensors"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("x")
    folder.prepare(str(made))
    assert sorted(p.name for p in made.iterdir()) == [".holdfast-demo", "notes.txt"]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "loss.svg").write_text("x")
    with pytest.raises(holdfast.UsageError, match="something other"):
        folder.prepare(str(tmp_path / "theirs"))
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["loss.svg"]


def test_a_given_uri_gets_a_fresh_place_below_it() -> None:
    """Two runs into one URI never meet, and its options are kept."""
    uris = [
        folder.checkpoints_uri("file:///somewhere/runs?direct=off", Path("unused"))
        for _ in range(2)
    ]
    assert all(
        u.startswith("file:///somewhere/runs/demo-") and u.endswith("?direct=off") for u in uris
    )
    assert uris[0] != uris[1]
    for uri in ("memory://x", "fsspec+memory://x"):
        with pytest.raises(holdfast.UsageError, match="memory"):
            folder.checkpoints_uri(uri, Path("unused"))


@pytest.mark.parametrize(
    "uri", ["file:///a/step-8", "s3://b/r/step-8?endpoint=http://127.0.0.1:80", "x://h/step-8/"]
)
def test_a_checkpoint_is_called_by_its_last_part(uri: str) -> None:
    """Whatever options its URI has."""
    assert folder.name_of(uri) == "step-8"


GOOD: dict[str, int] = {"steps": 40, "kill_at": 24, "every": 8, "before": 4, "after": 2, "seed": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"kill_at": 8},
        {"kill_at": 25},
        {"kill_at": 48},
        {"every": 0},
        {"before": 1},
        {"before": 3},
        {"after": 0},
        {"seed": -1},
    ],
    ids=str,
)
def test_a_plan_that_cannot_work_is_refused(change: dict[str, int]) -> None:
    """Before anything starts: a kill that hits no save, or none to resume from, and ranks that
    share unevenly."""
    assert Plan(**GOOD).victim == 2
    with pytest.raises(holdfast.UsageError):
        Plan(**(GOOD | change))


def test_the_account_is_plain_where_nobody_watches() -> None:
    """No colours, no bar, no markup, and what comes from elsewhere is printable."""
    file, record = io.StringIO(), record_of(4, range(1, 9), (8,))
    account = Account(file)
    account.chapter("[bold]Train[/bold]")
    account.say("a\x1b[31mb")
    with account.bar(record, 8) as bar:
        bar.look()
    account.saved(record.saves[0], record)
    lines = [line.strip() for line in file.getvalue().splitlines() if line.strip()]
    assert lines[:2] == ["1. [bold]Train[/bold]", "a\\x1b[31mb"]
    assert (
        lines[2]
        == "step  8  loss 4.920  2,000 bytes of text/s  saved 4.00 MiB in 0.50 s (8.00 MiB/s), training waited 0.30 s"
    )


def test_the_first_word_of_torch_and_of_holdfast_is_given() -> None:
    """Of all that the survivors said, the account gives the earliest of each; torch's without its
    line of C++."""
    events: list[Any] = [
        Event("failed", 0, 9.0, {"ours": True, "type": "DeadlineError", "message": "later"}),
        Event(
            "failed",
            1,
            7.0,
            {"ours": True, "type": "DeadlineError", "message": "rank 2 showed no sign of life"},
        ),
        Event(
            "failed",
            3,
            1.0,
            {
                "ours": False,
                "type": "RuntimeError",
                "message": "[/a/b.cc:5] Closed by peer. This is",
            },
        ),
    ]
    file = io.StringIO()
    Account(file).failures(events)
    said = [line.strip() for line in file.getvalue().splitlines()]
    assert said == [
        "torch, on rank 3: Closed by peer",
        "holdfast, on rank 1: rank 2 showed no sign of life",
    ]


def python(code: str) -> list[str]:
    """A program for a job to run. Its first argument is the folder for journals."""
    return [sys.executable, "-c", code]


def test_a_job_that_fails_shows_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    """The error carries what the ranks printed last; unless failing is what the job was to do."""
    failing = python("print('out of luck'); raise SystemExit(3)")
    with pytest.raises(holdfast.RankFailedError, match="status 3") as caught:
        Job(tmp_path / "a", 2, [], program=failing).run(lambda event: None)
    assert "out of luck" in str(caught.value)
    Job(tmp_path / "b", 2, [], program=failing).run(lambda event: None, survives=False)


def test_a_job_that_hangs_is_ended_at_its_deadline(
    tmp_path: Path,
) -> None:
    """The error says how long it was waited for; what was heard until then is heard."""
    line = '{"kind": "ready", "rank": 0, "time_s": 1.0, "told": {}}'
    hanging = python(
        f"import sys, time; open(sys.argv[1] + '/rank-0.jsonl', 'w').write('{line}\\n'); "
        f"time.sleep(60)"
    )
    heard: list[Event] = []
    with pytest.raises(holdfast.DeadlineError, match="1 s"):
        Job(tmp_path / "a", 1, [], deadline_s=1.0, program=hanging).run(heard.append)
    assert [event.kind for event in heard] == ["ready"]


def test_a_demo_that_is_ended_ends_its_job(tmp_path: Path) -> None:
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
