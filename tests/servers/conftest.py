"""Real servers: started once for all tests that use them, or given by the environment."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.azurite import Azurite, find_azurite
from support.servers.fake_gcs import FakeGcs, find_fake_gcs
from support.servers.hadoop import Hadoop, find_hadoop
from support.servers.radosgw import Radosgw, find_ceph

TIMEOUT_S = 300
"""Default time limit of a test: the first test that uses a server starts it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder more time."""
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def _running(server: Any) -> Iterator[Any]:
    """Run a server for the length of a fixture, with its credentials in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _server(
    name: str, find: Callable[[], object], make: Callable[[Path], Any], needs: str = ""
) -> Any:
    """Make a fixture of a server that all tests share."""

    @pytest.fixture(scope="session", name=name)
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        if find() is None:
            pytest.skip(f"{name} is not installed: make test-servers{needs}")
        yield from _running(make(tmp_path_factory.mktemp(name)))

    return server


radosgw = _server("radosgw", find_ceph, Radosgw)
hadoop = _server("hadoop", find_hadoop, Hadoop)
azurite = _server("azurite", find_azurite, Azurite, ", with npm")
fake_gcs = _server("fake_gcs", find_fake_gcs, FakeGcs)


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run an SFTP server whose keys are where clients look for them."""
    pytest.importorskip("asyncssh")
    from support.servers.sftp import SftpServer

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        yield from _running(SftpServer(tmp_path_factory.mktemp("sftp")))


def _root(scheme: str, server: str) -> Any:
    """Make a fixture of the URI of an empty root, on HOLDFAST_TEST_<scheme>_URL or a server."""

    @pytest.fixture(name=f"{scheme}_url")
    def root(request: pytest.FixtureRequest) -> str:
        own = os.environ.get(f"HOLDFAST_TEST_{scheme.upper()}_URL")
        location, mark, options = (own or request.getfixturevalue(server).uri).partition("?")
        return f"{location.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"

    return root


s3_url = _root("s3", "radosgw")
hdfs_url = _root("hdfs", "hadoop")
az_url = _root("az", "azurite")
gs_url = _root("gs", "fake_gcs")
