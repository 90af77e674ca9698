"""``holdfast drivers --check URI``: what it prints, its exit status, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import run, run_json

from holdfast.drivers.memory import STORES


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
    # What starts a process in the background may have it ignore the signal.
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
