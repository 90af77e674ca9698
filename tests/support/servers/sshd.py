"""A real SFTP server: OpenSSH's sshd on a free port of the loopback, with its own keys.

It is found where ``make test-servers`` has put it (``.servers/openssh``), or installed on the host.
It runs without privileges, so it admits only its own account: this process's, or ``daemon`` if this
process is root. (As root, sshd needs an account and a folder that only an installation creates.)
It offers SFTP and nothing else.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.servers.ports import free_port

__all__ = ["Sshd", "find_sshd"]

ROOT = Path(__file__).parents[3]
BOOT_S = 30.0
# A test run that is killed stops nothing; so the kernel does.
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")

CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
AllowTcpForwarding no
MaxStartups 100
MaxSessions 100
LogLevel VERBOSE
Subsystem sftp internal-sftp
ForceCommand internal-sftp
"""


@dataclass(frozen=True, slots=True)
class _OpenSsh:
    """Paths of OpenSSH's programs, and of the libraries that this host lacks (None if it lacks
    none).
    """

    sshd: Path
    keygen: Path
    libraries: Path | None


def find_sshd() -> _OpenSsh | None:
    """OpenSSH, if all that is needed of it is there."""
    if shutil.which("setpriv") is None:
        return None
    unpacked = Path(os.environ.get("HOLDFAST_TEST_SERVERS", ROOT / ".servers"), "openssh")
    for root in (unpacked, Path("/")):
        sshd = root / "usr/sbin/sshd"
        keygen = next(
            (path for path in (root, Path("/")) if (path / "usr/bin/ssh-keygen").exists()), None
        )
        if sshd.exists() and keygen is not None:
            libraries = None if root == Path("/") else next(root.glob("usr/lib/*-linux-gnu"), None)
            return _OpenSsh(sshd, keygen / "usr/bin/ssh-keygen", libraries)
    return None


@dataclass
class Sshd:
    """SFTP server with ``start`` and ``stop``; in between, its sessions or all of it can be killed.

    Objects of tests belong below :attr:`root`. The client's private key is :attr:`key`; the
    server's public key is in :attr:`known_hosts`. OpenSSH, paramiko and asyncssh find both if they
    run in :meth:`environment`.
    """

    port: int = field(default_factory=free_port)
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sshd-")))
    _process: subprocess.Popen[bytes] | None = None

    host = "127.0.0.1"

    @property
    def username(self) -> str:
        """The only account that may log in."""
        return "daemon" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name

    @property
    def root(self) -> Path:
        """Return a folder where the account may write and this process may read."""
        return self._folder / "root"

    @property
    def home(self) -> Path:
        """A home folder for clients, with the keys."""
        return self._folder / "home"

    @property
    def key(self) -> Path:
        """The private key of the account, in OpenSSH's format, without a passphrase."""
        return self.home / ".ssh/id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The public key of the server."""
        return self.home / ".ssh/known_hosts"

    def environment(self) -> dict[str, str]:
        """Return the environment for clients.

        It omits SSH_AUTH_SOCK, because an agent would offer other keys.
        """
        return {"HOME": str(self.home)}

    def start(self) -> None:
        """Start it, and wait until it listens. Raises RuntimeError, with the end of its log, where
        it does not."""
        try:
            self._prepare()
            self.listen()
        except BaseException:
            self.stop()
            raise

    def listen(self) -> None:
        """Restart it on the same port after :meth:`kill`."""
        openssh = self._openssh
        environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self._programs)}
        account = pwd.getpwnam(self.username)
        become = []
        if os.geteuid() == 0:
            become = [
                "--reuid",
                str(account.pw_uid),
                "--regid",
                str(account.pw_gid),
                "--clear-groups",
            ]
        # sshd must be called by its absolute path, because it executes itself for each connection.
        sshd = self._programs / openssh.sshd.name
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [
                    *_DIES_WITH_US,
                    *become,
                    str(sshd),
                    "-D",
                    "-e",
                    "-f",
                    str(self._folder / "sshd_config"),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until_it_listens(self._process)

    def kill_sessions(self) -> int:
        """Cut every connection, as the loss of a network would; return how many there were. It
        still listens."""
        if self._process is None:
            return 0
        sessions = psutil.Process(self._process.pid).children(recursive=True)
        for session in sessions:
            with suppress(psutil.NoSuchProcess):
                session.kill()
        return len(sessions)

    def kill(self) -> None:
        """Kill the server and its connections, as a crash of the host would."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            self.kill_sessions()
        self._process.kill()
        self._process.wait(10)
        self._process = None

    def stop(self) -> None:
        """End it, and remove all that it has stored."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _openssh(self) -> _OpenSsh:
        found = find_sshd()
        if found is None:
            raise RuntimeError("OpenSSH is not installed: make test-servers")
        return found

    @property
    def _programs(self) -> Path:
        """Copies of the server and its libraries, which the account may read whoever owns the
        repository."""
        return self._folder / "programs"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _prepare(self) -> None:
        """Make the keys, the configuration, and the folders."""
        openssh = self._openssh
        for folder in (self.key.parent, self.root, self._programs):
            folder.mkdir(parents=True)
        shutil.copy(openssh.sshd, self._programs)
        for library in openssh.libraries.glob("*.so*") if openssh.libraries else ():
            shutil.copy(library, self._programs)
        for key in (self._folder / "host_key", self.key):
            command = [
                str(openssh.keygen),
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                "",
                "-f",
                str(key),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=BOOT_S)
        shutil.copy(f"{self.key}.pub", self._folder / "authorized_keys")
        host_key = Path(f"{self._folder}/host_key.pub").read_text()
        self.known_hosts.write_text(f"[{self.host}]:{self.port} {host_key}")
        (self._folder / "sshd_config").write_text(
            CONFIG.format(port=self.port, folder=self._folder)
        )
        self._folder.chmod(0o711)
        if os.geteuid() == 0:
            for path in (self.root, self._folder / "host_key"):
                shutil.chown(path, self.username)

    def _until_it_listens(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + BOOT_S
        while True:
            with suppress(OSError):
                socket.create_connection((self.host, self.port), 1).close()
                return
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"sshd did not come up:\n{self._log.read_text(errors='replace')[-1500:]}"
                )
            time.sleep(0.05)
