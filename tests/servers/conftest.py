"""Real servers: booted once for all tests that ask, or one's own, named by the environment."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.azurite import Azurite, find_azurite
from support.servers.fake_gcs import FakeGcs, find_fake_gcs
from support.servers.hadoop import Hadoop, find_hadoop
from support.servers.radosgw import Radosgw, find_ceph

TIMEOUT_S = 300
"""Of a test, unless it says otherwise: servers share the machine, and boot within the first test
that asks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder more time."""
    for item in items:
        if (
            Path(__file__).parent in item.path.parents
            and item.get_closest_marker("timeout") is None
        ):
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


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    """A radosgw with a bucket, ``holdfast``, whose credentials are in the environment."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    yield from _running(Radosgw(tmp_path_factory.mktemp("radosgw")))


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    """An HDFS of one name node and two DataNodes."""
    if find_hadoop() is None:
        pytest.skip("Hadoop is not installed: make test-servers")
    yield from _running(Hadoop(tmp_path_factory.mktemp("hadoop")))


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """An Azurite with a container, ``holdfast``, whose account and key are in the environment."""
    if find_azurite() is None:
        pytest.skip("Azurite is not installed: make test-servers, with npm")
    yield from _running(Azurite(tmp_path_factory.mktemp("azurite")))


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """A fake-gcs-server with a bucket, ``holdfast``, whose service account is in the environment."""
    if find_fake_gcs() is None:
        pytest.skip("fake-gcs-server is not installed: make test-servers")
    yield from _running(FakeGcs(tmp_path_factory.mktemp("fake-gcs")))


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An SFTP server, whose keys are where clients look for them."""
    pytest.importorskip("asyncssh")
    from support.servers.sftp import SftpServer

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        yield from _running(SftpServer(tmp_path_factory.mktemp("sftp")))


def _root_url(request: pytest.FixtureRequest, scheme: str, server: str) -> str:
    """Return the URI of an empty root on HOLDFAST_TEST_<scheme>_URL, or else on a server."""
    given = os.environ.get(f"HOLDFAST_TEST_{scheme}_URL") or request.getfixturevalue(server).uri
    location, mark, options = given.partition("?")
    return f"{location.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"


@pytest.fixture
def s3_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on a radosgw."""
    return _root_url(request, "S3", "radosgw")


@pytest.fixture
def hdfs_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on a Hadoop."""
    return _root_url(request, "HDFS", "hadoop")


@pytest.fixture
def az_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on an Azurite."""
    return _root_url(request, "AZ", "azurite")


@pytest.fixture
def gs_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on a fake-gcs-server."""
    return _root_url(request, "GS", "fake_gcs")
