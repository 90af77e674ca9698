"""A server that is one program. It starts on a free port of the loopback, is awaited until it
listens, and is stopped by its process id."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.servers.ports import listens

INSTALLED = Path(os.environ.get("HOLDFAST_TEST_SERVERS", Path(__file__).parents[3] / ".servers"))
"""The folder into which ``make test-servers`` installs servers."""
START_S = 60.0
# Some servers read their own users' keys from a client's variables.
_CLIENTS_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""Before a command: the kernel ends the program when a test run is killed. setpriv runs the program
in its own process."""


def output_of(
    program: str, command: Sequence[str | Path], environment: Mapping[str, str] = {}
) -> str:
    """Return the output of a server's ``program``. Raises RuntimeError if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr[-2000:]}{done.stdout[-500:]}")
    return done.stdout


class Daemon:
    """A process that listens on ``port`` of the loopback. Its output goes to the file ``log``.

    It inherits this process's environment without the credentials of clients.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self._command = [*DIES_WITH_US, *map(str, command)]
        self._log = log
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_CLIENTS_VARIABLES)
        }
        self._environment = inherited | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens. Raises RuntimeError, with the end of its log, if it
        does not."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while not listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise RuntimeError(
                    f"{self._command} does not "
                    f"listen:\n{self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it, and wait for its end. Safe to call twice."""
        process = self._process
        if process is None:
            return
        self._process = None
        process.kill()
        process.wait(10)
