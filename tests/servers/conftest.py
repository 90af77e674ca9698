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
from support.servers.moto import Moto, find_moto
from support.servers.radosgw import Radosgw, find_ceph
from support.servers.sshd import Sshd, find_sshd

TIMEOUT_S = 300
"""Of a test, unless it says otherwise: servers share the machine, and boot within the first test
that asks."""
S3_URL = "HOLDFAST_TEST_S3_URL"
HDFS_URL = "HOLDFAST_TEST_HDFS_URL"
AZ_URL = "HOLDFAST_TEST_AZ_URL"
GS_URL = "HOLDFAST_TEST_GS_URL"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder more time."""
    for item in items:
        if (
            Path(__file__).parent in item.path.parents
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    """A radosgw with a bucket, ``holdfast``, whose credentials are in the environment."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    server = Radosgw(tmp_path_factory.mktemp("radosgw"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        server.start()
        try:
            server.client().create_bucket(Bucket="holdfast")
            yield server
        finally:
            server.stop()


@pytest.fixture
def s3_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on HOLDFAST_TEST_S3_URL, or else on a radosgw."""
    given = os.environ.get(S3_URL)
    if given is None:
        server: Radosgw = request.getfixturevalue("radosgw")
        given = f"s3://holdfast?endpoint={server.endpoint}"
    location, mark, options = given.partition("?")
    return f"{location.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    """An HDFS of one name node and two DataNodes."""
    if find_hadoop() is None:
        pytest.skip("Hadoop is not installed: make test-servers")
    server = Hadoop(tmp_path_factory.mktemp("hadoop"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def hdfs_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on HOLDFAST_TEST_HDFS_URL, or else on a Hadoop."""
    given = os.environ.get(HDFS_URL)
    if given is None:
        server: Hadoop = request.getfixturevalue("hadoop")
        given = server.uri
    location, mark, options = given.partition("?")
    return f"{location.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"


@pytest.fixture(scope="session")
def sshd() -> Iterator[Sshd]:
    """An SFTP server, whose keys are where clients look for them."""
    if find_sshd() is None:
        pytest.skip("OpenSSH's server is not installed: make test-servers")
    server = Sshd()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        for name, value in server.environment().items():
            patch.setenv(name, value)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def sftp_url(sshd: Sshd) -> str:
    """The URI of an empty root on an SFTP server, through fsspec."""
    pytest.importorskip("paramiko")
    options = f"port={sshd.port}&username={sshd.username}"
    return f"fsspec+sftp://{sshd.host}{sshd.root}/{uuid.uuid4().hex}?{options}"


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


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    """A moto with a bucket, ``holdfast``, whose credentials are in the environment: those of the
    radosgw are not, meanwhile."""
    if find_moto() is None:
        pytest.skip("moto is not installed: make test-servers")
    yield from _running(Moto(tmp_path_factory.mktemp("moto")))


def _running(server: Azurite | FakeGcs | Moto) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture
def az_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on HOLDFAST_TEST_AZ_URL, or else on an Azurite."""
    given = os.environ.get(AZ_URL) or request.getfixturevalue("azurite").uri
    return _empty_root(given)


@pytest.fixture
def gs_url(request: pytest.FixtureRequest) -> str:
    """The URI of an empty root on HOLDFAST_TEST_GS_URL, or else on a fake-gcs-server."""
    given = os.environ.get(GS_URL) or request.getfixturevalue("fake_gcs").uri
    return _empty_root(given)


@pytest.fixture
def moto_url(moto: Moto) -> str:
    """The URI of an empty root on a moto."""
    return _empty_root(moto.uri)


def _empty_root(uri: str) -> str:
    location, mark, options = uri.partition("?")
    return f"{location.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"
