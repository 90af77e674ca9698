"""A systemd of one's own, for services of this user, where the system runs under none: it looks for
a folder below /run, which it gets in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SYSTEMD = "/lib/systemd/systemd"
_AS_IF_BOOTED = 'mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec "$@"'
_STARTED_S = 20.0


class UserSystemd:
    """``folder``: its runtime folder, below which its services are described."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self.services = folder / "systemd" / "user"
        self.services.mkdir(parents=True)

    def command(self, *arguments: str) -> list[str]:
        """To be run where systemd believes that it has booted the system."""
        return ["unshare", "--mount", "sh", "-c", _AS_IF_BOOTED, "sh", *arguments]

    def ask(self, *arguments: str) -> str:
        """What ``systemctl`` says."""
        command = self.command("systemctl", "--user", *arguments)
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip()

    def add(self, name: str, text: str) -> None:
        """A service, which is started."""
        (self.services / f"{name}.service").write_text(text)
        self.ask("daemon-reload")
        self.ask("start", "--no-block", name)


@contextmanager
def user_systemd() -> Iterator[UserSystemd]:
    """One that runs; its services end with it. Skips where there is none, or it does not start."""
    if not os.path.exists(_SYSTEMD) or not shutil.which("unshare") or os.getuid():
        pytest.skip("no systemd, or no right to run one in a namespace of mounts")
    with tempfile.TemporaryDirectory(prefix="sd") as folder:
        systemd = UserSystemd(Path(folder))
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                systemd.command(_SYSTEMD, "--user", "--log-target=console"),
                env=systemd.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            until_s = time.monotonic() + _STARTED_S
            while systemd.ask("is-system-running") not in ("running", "degraded"):
                if process.poll() is not None or time.monotonic() > until_s:
                    pytest.skip(f"systemd does not run here: {log.read_text()[-300:]}")
                time.sleep(0.2)
            yield systemd
        finally:
            if process.poll() is None:
                systemd.ask("exit")
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
