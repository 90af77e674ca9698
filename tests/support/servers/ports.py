"""Ports for servers that need a fixed one."""

from __future__ import annotations

import random
import socket

# Below the kernel's range of ephemeral ports. Another process could easily take a port of that
# range between the check and the server's start, seconds later.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of the loopback on which nobody listens, outside of the ephemeral range."""
    for port in random.Random().sample(_PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no port is free")


def listens(port: int) -> bool:
    """Return whether somebody accepts connections on a port of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
