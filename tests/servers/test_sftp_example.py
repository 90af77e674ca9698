"""The example of a driver for an asynchronous client, on an SFTP server."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.conformance_run import run_conformance
from support.examples import install

from holdfast.drivers.uri import parse
from holdfast.errors import StorageDownError

if TYPE_CHECKING:
    from support.servers.sftp import SftpServer

KIT_S = 500

pytestmark = [pytest.mark.drill, pytest.mark.timeout(KIT_S + 20)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example."""
    return install("holdfast-sftp", tmp_path_factory.mktemp("example"))


@pytest.fixture
def url(sftp: SftpServer) -> str:
    """The URI of an empty folder on the server."""
    return f"sftp://{sftp.username}@{sftp.host}:{sftp.port}{sftp.root}/{uuid.uuid4().hex}"


def test_the_example_keeps_the_contract(installed: Path, url: str, tmp_path: Path) -> None:
    """Every trial of the conformance kit passes that is not about streams or small objects."""
    probe = ["--driver-probe", "support.servers.sftp:SftpProbe"]
    output = run_conformance(url, *probe, cwd=tmp_path, path=[installed], timeout_s=KIT_S)
    assert "1 × an upload is one stream" in output
    assert "1 × objects may be larger than 64 MiB" in output
    assert "deviations      0 declared, 0 cases deviated" in output


def test_a_lost_connection_is_made_again(
    installed: Path, url: str, sftp: SftpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection fails the call that meets it as temporary; the next one reconnects."""
    monkeypatch.syspath_prepend(installed)
    from holdfast_sftp.driver import SftpDriver

    async def main() -> None:
        driver = SftpDriver.open(parse(url))
        await driver.put("a/x", b"content")
        upload = await driver.create("a/y", 4)
        sftp.kill_sessions()
        with pytest.raises(StorageDownError) as caught:
            await upload.write(0, memoryview(b"lost"))
        assert caught.value.temporary
        assert await driver.get("a/x") == b"content"
        sftp.kill_sessions()
        await driver.close()

    asyncio.run(main())
