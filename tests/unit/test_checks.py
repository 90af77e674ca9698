"""Test ``holdfast drivers --check``: probes find each defect, and the command prints them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import liars
from support.broken import Healthy
from support.commands import run, run_json
from support.liars import LIARS, IgnoresExclusive, KeepsDeleted, RefusesBulk

import holdfast
from holdfast.drivers import registry
from holdfast.drivers.checks.course import check, quick_options
from holdfast.drivers.checks.findings import Report
from holdfast.drivers.checks.probes import PROBES
from holdfast.drivers.contract import Driver, Upload
from holdfast.drivers.memory import STORES
from holdfast.drivers.uri import Uri, parse


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets a class serve ``liar://``."""

    def opens(cls: type[Driver]) -> Uri:
        import importlib.metadata

        entry = importlib.metadata.EntryPoint("liar", f"{__name__}:_Served", registry.GROUP)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
        monkeypatch.setitem(globals(), "_Served", cls)
        return parse(f"liar://{cls.__name__}/run")

    return opens


def checked(uri: Uri, **options: Any) -> Report:
    """Return the report on a storage."""
    return asyncio.run(check(uri, **options))


def test_a_storage_that_keeps_everything_has_no_problem(opened: Any) -> None:
    """A correct storage has no problem, and the check leaves nothing there."""
    report = checked(opened(Healthy))
    assert [(finding.name, finding.detail) for finding in report.problems] == []
    assert [finding.name for finding in report.findings] == [probe.name for probe in PROBES]
    assert {finding.outcome for finding in report.findings} == {"kept"}
    assert (report.ok, report.may_save, report.left) == (True, True, None)
    assert STORES["Healthy"] == {}
    assert report.requests < 300


@pytest.mark.parametrize("what", LIARS)
def test_a_storage_that_lies_is_found_out(opened: Any, what: str) -> None:
    """The probe of the broken property finds it; the check completes and gives advice."""
    found_by, cls = LIARS[what]
    report = checked(opened(cls))
    problem = {finding.name: finding for finding in report.problems}[found_by]
    assert all((problem.detail, problem.follows, problem.advice))
    assert not report.ok
    assert len(report.findings) == len(PROBES)


@pytest.mark.parametrize("cls", [IgnoresExclusive, liars.RefusesWholeRanges, liars.ForgetsPuts])
def test_what_a_save_would_refuse_the_check_calls_unfit(opened: Any, cls: type[Driver]) -> None:
    """A problem that makes saves fail makes the storage unfit; a failing bulk delete does not."""
    assert checked(opened(cls)).may_save is False
    assert checked(opened(RefusesBulk)).may_save is True
    assert STORES["RefusesBulk"] == {}


def test_every_probe_finds_somebody_out() -> None:
    """Every probe is failed by some driver, so each of them can fail."""
    assert {found_by for found_by, _ in LIARS.values()} == {probe.name for probe in PROBES}


def test_what_is_not_promised_is_no_problem(opened: Any) -> None:
    """Exclusive puts that the traits rule out are reported, but are no problem."""

    class Weak(IgnoresExclusive):
        def __init__(self, location: str = "") -> None:
            super().__init__(location)
            self.traits = replace(self.traits, exclusive_is_atomic=False)

    report = checked(opened(Weak))
    told = {finding.name for finding in report.findings if finding.outcome == "not promised"}
    assert told == {"exclusive", "race", "again"}
    assert report.ok


@pytest.mark.nightly(5)
def test_a_clean_up_that_fails_is_told_with_the_place(opened: Any) -> None:
    """The report, and a callback, name the place of files that could not be removed."""

    class Sticky(KeepsDeleted):
        async def delete_all(self, prefix: str) -> None:
            return

    heard: list[Report] = []
    report = checked(opened(Sticky), warn=heard.append)
    assert heard == [report]
    assert str(report.left).startswith("liar://Sticky/run/holdfast-check-")
    assert "still listed" in report.why_left


def test_a_check_that_is_cancelled_cleans_up(opened: Any) -> None:
    """A cancelled check removes its files."""

    class Hangs(Healthy):
        async def get(self, key: str) -> bytes:
            if "replaced" in key:
                hanging.set()
                await asyncio.Event().wait()
            return await super().get(key)

    hanging = asyncio.Event()

    async def cancelled() -> None:
        task = asyncio.ensure_future(check(uri))
        await asyncio.wait_for(hanging.wait(), 20)
        assert STORES["Hangs"] != {}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    uri = opened(Hangs)
    asyncio.run(cancelled())
    assert STORES["Hangs"] == {}


def test_what_the_driver_warns_of_is_told_and_is_no_problem_by_itself(opened: Any) -> None:
    """Warnings of the driver are part of the finding, which may still be positive."""

    class Warns(Healthy):
        async def create(self, key: str, nbytes: int) -> Upload:
            logging.getLogger("holdfast.drivers").warning("no layout can be set")
            return await super().create(key, nbytes)

    report = checked(opened(Warns))
    assert report.ok
    warnings = {finding.name: finding.warnings for finding in report.findings}
    for name in ("unfinished", "aborted", "committed"):
        assert warnings[name] == ("no layout can be set",)


def test_where_nothing_can_be_put_nothing_else_is_tried(opened: Any) -> None:
    """If nothing can be put, the first finding has the driver's error, and the others none."""

    class ReadOnly(Healthy):
        async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
            raise holdfast.AccessError("403", uri=self.uri, key=key, advice="Look at the policies.")

        async def delete_all(self, prefix: str) -> None:
            raise holdfast.AccessError("403", uri=self.uri, key=prefix)

    report = checked(opened(ReadOnly))
    assert report.left is None  # nothing was stored
    assert {finding.outcome for finding in report.findings[1:]} == {"not tried"}
    assert "403" in report.findings[0].detail
    assert "Look at the policies." in report.findings[0].advice


def test_options_that_somebody_has_chosen_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that are set nowhere get quick defaults; others are kept."""
    monkeypatch.setenv("HOLDFAST_S3_DEADLINE", "7s")
    quick = quick_options(parse("s3://bucket/run?part_size=8MiB"), {"retries": 1})
    assert not {"deadline", "part_size", "retries"} & quick.keys()
    assert quick["op_timeout_s"] == "25s"
    assert quick_options(parse("file:///nowhere"), {}) == {}


# The command


def test_fit_folder_has_status_0(tmp_path: Path) -> None:
    """Each trial has a line with its time. The folder is left unchanged."""
    printed = run("drivers", "--check", tmp_path).stdout
    assert f"ok: file://{tmp_path} is fit for checkpoints" in printed
    assert "exclusive puts at the same time" in printed
    assert "MiB/s" in printed or "GiB/s" in printed
    assert "\x1b" not in printed
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document() -> None:
    """The document has every finding."""
    printed = run_json("drivers", "memory://check-json/run", "--check")
    assert (printed["ok"], printed["may_save"], printed["left"]) == (True, True, None)
    names = {finding["name"] for finding in printed["findings"]}
    assert names >= {"exclusive", "ranges", "bulk", "unfinished"}
    assert STORES["check-json"] == {}


def test_problem_has_status_1(tmp_path: Path) -> None:
    """Its consequence is printed with advice."""
    (tmp_path / "file").write_bytes(b"no folder")
    printed = run("drivers", "--check", tmp_path / "file", status=1).stdout
    for said in ("PROBLEM", "nothing can be saved here", "is not fit for checkpoints", "not tried"):
        assert said in printed


@pytest.mark.parametrize(
    ("words", "told"), [([], "needs the URI"), (["s3"], "is a scheme"), (["no://x"], "no driver")]
)
def test_check_without_a_storage_is_a_wrong_call(words: list[str], told: str) -> None:
    """The status is 2, and stdout is empty."""
    printed = run("drivers", "--check", *words, status=2)
    assert told in printed.stderr
    assert printed.stdout == ""


@pytest.mark.heavy
def test_interrupted_check_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C gives status 130, and the folder is left unchanged."""
    # A shell may have its background processes ignore the signal.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    main = f"{heed}; import holdfast.cli; holdfast.cli.main()"
    command = [sys.executable, "-c", main, "drivers", "--check", f"{tmp_path}/run"]
    environment = {**os.environ, "HOLDFAST_FAULTS": "seed:1,delay:1,delay_s:0.1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.rglob("holdfast-check-*/*")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in told
    assert "remove it by hand" not in told
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]
