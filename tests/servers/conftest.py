"""Real servers: booted once for all tests that ask, or one's own, named by the environment."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.hadoop import Hadoop, find_hadoop
from support.servers.radosgw import Radosgw, find_ceph

TIMEOUT_S = 300
"""Of a test, unless it says otherwise: servers share the machine, and boot within the first test that asks."""
S3_URL = "HOLDFAST_TEST_S3_URL"
HDFS_URL = "HOLDFAST_TEST_HDFS_URL"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder more time."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
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
