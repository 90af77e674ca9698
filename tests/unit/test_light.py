"""The light tests: what their list says is held to."""

from __future__ import annotations

import sys

import pytest
from support.commands import finished
from support.light import FILES, TESTS

FORBIDDEN = {
    "torch": "import torch",
    "a process": "import subprocess; subprocess.run(['true'])",
    "a fork": "import os; os.fork()",
    "a server": "import socket; socket.create_server(('127.0.0.1', 0))",
}


def test_every_light_file_is_there() -> None:
    """A file that was renamed is listed under its new name, or ``make unit`` would run without it."""
    assert [file for file in sorted(FILES) if not (TESTS / file).is_file()] == []


@pytest.mark.parametrize("statement", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_light_test_is_refused_what_is_heavy(statement: str) -> None:
    """It fails with advice if it imports torch, or starts a process or a server."""
    code = f"from support import light\nlight.ban()\nwith light.running():\n    {statement}"
    done = finished([sys.executable, "-c", code], cwd=TESTS)
    assert done.returncode == 1
    assert "mark the test heavy" in done.stderr
