"""A network of the test's own: a namespace with one address, which nothing outside can reach.

Mounts are shared with the host, so that a file system served within is seen outside.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

__all__ = ["ADDRESS", "NETWORK", "OwnNetwork", "network_works"]

ADDRESS = "10.77.0.1"
NETWORK = "no network namespace can be made here: that takes root, iproute2 and util-linux"
"""Why a test is skipped where :func:`network_works` says no."""
LISTENS = "0A"  # the kernel's number of that state
# The namespace ends with its processes. This one ends with its standard input, so with the test.
HOLD = f"ip link set lo up && ip addr add {ADDRESS}/32 dev lo && echo ready && exec cat"


class OwnNetwork:
    """A network namespace with two addresses: the loopback's, and ``ADDRESS``. ``start`` it, ``stop``
    it."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make it. Raises RuntimeError where the host does not allow that."""
        if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
            raise RuntimeError(NETWORK)
        self._holder = holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if holder.stdout is None or holder.stdout.readline() != b"ready\n":
            self.stop()
            raise RuntimeError(NETWORK)

    @property
    def enter(self) -> tuple[str, ...]:
        """Return what to put before a command that is to run within."""
        return "nsenter", f"--net=/proc/{self._pid}/ns/net", "--"

    def listens(self, port: int, host: str) -> bool:
        """Tell whether a process within listens on ``port`` of ``host``, by the kernel's table."""
        number = int.from_bytes(socket.inet_aton(host), "little")
        table = Path(f"/proc/{self._pid}/net/tcp").read_text().splitlines()[1:]
        sockets = (line.split() for line in table)
        return any(s[1] == f"{number:08X}:{port:04X}" and s[3] == LISTENS for s in sockets)

    def stop(self) -> None:
        """End it. It is gone once the processes within have ended. Safe to call twice."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.communicate(timeout=10)

    @property
    def _pid(self) -> int:
        if self._holder is None:
            raise RuntimeError("the network is not started")
        return self._holder.pid


def network_works() -> bool:
    """Tell whether this process may make a network of its own."""
    network = OwnNetwork()
    try:
        network.start()
    except RuntimeError:
        return False
    network.stop()
    return True
