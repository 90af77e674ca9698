"""Secrets stay where they are: none of the secrets planted everywhere comes out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.commands import finished

TESTS = Path(__file__).parents[1]
SIGNS = ("cAnArY", "Y0FuQXJZQXp1cmU=")


@pytest.mark.nightly(34)
@pytest.mark.timeout(300)
def test_no_secret_comes_out_whatever_fails(tmp_path: Path) -> None:
    """Output, errors, causes, reprs, tracebacks, logs, JSON and written files contain no secret."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, TESTS / "support" / "canaries.py", tmp_path]
    ran = finished(program, timeout_s=280, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("raised") > 150, "everything failed"
    assert "DEBUG:asyncio" in ran.stderr, "the log is looked at"
    assert "cAnArY" in (tmp_path / "secret-told").read_text(), "a server said a secret back"
    said = [("stdout", ran.stdout), ("stderr", ran.stderr)]
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.relative_to(tmp_path).parts[0].startswith("secret-"):
            said.append((str(path), path.read_bytes().decode("latin-1")))
    assert len(said) >= 4, "the checkpoint is among them"
    found = [
        f"{where}: {line[:300]}"
        for where, text in said
        for line in text.splitlines()
        if any(sign in line for sign in SIGNS)
    ]
    assert found == []
