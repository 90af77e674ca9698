"""Runs the command in this process, and programs in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli import app

HOLDFAST = [sys.executable, "-c", "import holdfast.cli; holdfast.cli.main()"]
"""The command as a program."""


def on_a_terminal(
    *arguments: str, answer: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run the command on a terminal, type ``answer``, and return the status and the output."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*HOLDFAST, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    os.write(ours, answer.encode() + b"\n")
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    return process.wait(60), shown.decode()


@dataclass(frozen=True)
class Printed:
    """The outputs of a command."""

    stdout: str
    stderr: str


def run(*arguments: str | Path, status: int = 0) -> Printed:
    """Run a command in this process, which must end with ``status``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            ended: object = app.run([str(word) for word in arguments])
        except SystemExit as error:  # argparse's own answers
            ended = error.code
    assert ended == status, out.getvalue() + err.getvalue()
    return Printed(out.getvalue(), err.getvalue())


def run_json(*arguments: str | Path, status: int = 0) -> Any:
    """Return the document that a command prints with --json."""
    return json.loads(run(*arguments, "--json", status=status).stdout)


def finished(
    command: Sequence[str | Path], *, timeout_s: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Return its status and its outputs as text."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )
