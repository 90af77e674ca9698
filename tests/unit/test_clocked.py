"""Tests that go by the clock are run again where the machine stood still, and only there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.light import TESTS

pytestmark = pytest.mark.clocked

FAILS_ONCE = """
import ctypes, time
import pytest
from pathlib import Path

def stand_still():
    ctypes.PyDLL(None).usleep(300_000)  # keeps the GIL

RAN = Path(__file__).with_suffix(".ran")
{mark}
def test_it():
    ran = RAN.read_text() if RAN.exists() else ""
    RAN.write_text(ran + "x")
    if {when}:
        {stall}
        assert False
"""


@pytest.mark.nightly(6)
@pytest.mark.parametrize(
    ("mark", "when", "stall", "runs", "passes"),
    [
        ("@pytest.mark.clocked", "not ran", "stand_still()", 2, True),
        ("@pytest.mark.clocked", "not ran", "pass", 1, False),
        ("", "not ran", "stand_still()", 1, False),
        ("@pytest.mark.clocked", "True", "stand_still()", 5, False),
    ],
    ids=["stood still", "kept time", "not marked", "fails each time"],
)
def test_a_failed_test_is_run_again(
    tmp_path: Path, mark: str, when: str, stall: str, runs: int, passes: bool
) -> None:
    """If it is marked and the machine stood still: at most four times."""
    file = tmp_path / "test_it.py"
    file.write_text(FAILS_ONCE.format(mark=mark, when=when, stall=stall))
    plugins = ["-p", "support.clocked", "-p", "no:cacheprovider"]
    markers = ["-o", "markers=clocked: goes by the clock", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *markers, "-c", "/dev/null", str(file)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) is passes, done.stdout
    assert len(file.with_suffix(".ran").read_text()) == runs
    assert bool(re.search(r"\d rerun", done.stdout)) is (runs > 1)
