"""``holdfast drivers --check`` and saves on real servers: the check reports their deficiencies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from support.servers.moto import Moto
from support.servers.rclone import Rclone, find_rclone

import holdfast
from holdfast.drivers.checks.course import check
from holdfast.drivers.checks.findings import Report
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse

STATE = {"weights": torch.arange(1000.0)}


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """Start a server with a bucket, ``holdfast``, and set its credentials."""
    if find_rclone() is None:
        pytest.skip("rclone is not installed: make test-servers")
    server = Rclone(tmp_path_factory.mktemp("rclone"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def uri_of(server: Rclone | Moto, name: str, more: str = "") -> str:
    """Return the URI of a folder on the server."""
    location, _, options = server.uri.partition("?")
    return f"{location}/{name}?{options}{more}"


def checked(uri: str) -> Report:
    """Return the report on a storage."""
    return asyncio.run(check(parse(uri)))


def left(uri: str) -> list[str]:
    """Return the keys below ``uri``."""

    async def listed() -> list[str]:
        driver = open_driver(uri)
        try:
            return [info.key async for info in driver.list()]
        finally:
            await driver.close()

    return asyncio.run(listed())


def told(report: Report) -> dict[str, str]:
    """Return the problems of a report."""
    return {finding.name: finding.detail for finding in report.problems}


def test_radosgw_is_fit(s3_url: str) -> None:
    """radosgw passes the check, which finds an unfinished upload and leaves nothing behind."""
    report = checked(s3_url)
    assert told(report) == {}
    assert {finding.outcome for finding in report.findings} == {"kept"}
    assert next(f.detail for f in report.findings if f.name == "unfinished").endswith(
        "found and dropped"
    )
    assert left(s3_url) == []


@pytest.mark.nightly(18)
def test_hdfs_is_fit(hdfs_url: str) -> None:
    """HDFS passes the check, which leaves nothing behind."""
    report = checked(hdfs_url)
    assert told(report) == {}
    assert left(hdfs_url) == []


@pytest.mark.drill
def test_moto_is_fit(moto: Moto) -> None:
    """moto, an independent implementation of S3, passes the check."""
    uri = uri_of(moto, "check")
    assert told(checked(uri)) == {}
    assert left(uri) == []


@pytest.mark.nightly(5)
def test_a_server_that_ignores_conditions_is_found_out(rclone: Rclone) -> None:
    """The check detects ignored conditions, in sequence and in parallel, and names the option."""
    uri = uri_of(rclone, "check")
    report = checked(uri)
    problems = told(report)
    assert {"exclusive", "race"} <= problems.keys()
    assert not report.may_save
    advice = next(finding.advice for finding in report.problems if finding.name == "exclusive")
    assert "?conditional=off" in advice
    # After concurrent puts, the server may keep listing a deleted key. The report says so then.
    assert left(uri) == [] or report.left is not None


def test_a_save_to_such_a_server_is_refused_and_leaves_nothing(rclone: Rclone) -> None:
    """A save to a server that ignores conditions names the option and leaves nothing."""
    uri = uri_of(rclone, "save")
    with pytest.raises(
        holdfast.StorageError, match=r"although its key is taken.*\?conditional=off"
    ):
        holdfast.save(uri, STATE)
    assert left(uri) == []


def test_with_the_option_a_save_works_if_it_can_be_loaded(rclone: Rclone) -> None:
    """The save fails, not the later load, if the client rejects the server's range responses."""
    uri = uri_of(rclone, "weak", "&conditional=off")
    unreadable = "ranges" in told(checked(uri))
    if unreadable:
        with pytest.raises(holdfast.StorageError, match="cannot be read back as bytes"):
            holdfast.save(uri, STATE)
        return
    holdfast.save(uri, STATE)
    assert torch.equal(holdfast.load(uri)["weights"], STATE["weights"])
