"""Servers that the tests start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.servers.daemon import Daemon
from support.servers.ports import free_port

SERVER = """
import json, os, socket, sys
with open(sys.argv[2], "w") as file:
    json.dump(dict(os.environ), file)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""


def test_a_server_inherits_no_credentials_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another test's AWS_SECRET_ACCESS_KEY does not become a key that the server accepts."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another server's")
    monkeypatch.setenv("KEPT", "1")
    port, seen = free_port(), tmp_path / "environment.json"
    server = Daemon(
        [sys.executable, "-c", SERVER, str(port), seen],
        port=port,
        log=tmp_path / "log",
        environment={"GIVEN": "2"},
    )
    server.start()
    server.stop()
    environment = json.loads(seen.read_text())
    assert (environment["KEPT"], environment["GIVEN"]) == ("1", "2")
    assert not [name for name in environment if name.startswith("AWS_")]
