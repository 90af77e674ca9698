"""The example of a driver for an asynchronous client, on OpenSSH's server."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.examples import SAVE_AND_LOAD, install, run
from support.servers.sshd import Sshd

from holdfast.drivers.uri import parse
from holdfast.errors import StorageDownError

KIT_S = 500

pytestmark = [pytest.mark.drill, pytest.mark.timeout(KIT_S + 20)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example."""
    pytest.importorskip("asyncssh")
    return install("holdfast-sftp", tmp_path_factory.mktemp("example"))


@pytest.fixture
def root(sshd: Sshd) -> Path:
    """A folder for objects, as it is called on the server and on this host."""
    return sshd.root / uuid.uuid4().hex


@pytest.fixture
def url(sshd: Sshd, root: Path) -> str:
    """The URI of that."""
    return f"sftp://{sshd.username}@{sshd.host}:{sshd.port}{root}"


def test_the_example_keeps_the_contract(installed: Path, url: str, tmp_path: Path) -> None:
    """Every trial of the conformance kit passes that is not about streams or small objects; nothing is declared as a
    deviation."""
    probe = ["--driver-probe", "support.servers.sftp_probe:SftpProbe"]
    output = run_conformance(url, *probe, cwd=tmp_path, path=[installed], timeout_s=KIT_S)
    assert "not applicable  2\n" in output
    assert "1 × an upload is one stream" in output
    assert "1 × objects may be larger than 64 MiB" in output
    assert "deviations      0 declared, 0 cases deviated" in output


def test_the_example_saves_and_loads(installed: Path, url: str) -> None:
    """Nothing but the URI tells Holdfast where to go."""
    run([sys.executable, "-W", "error", "-c", SAVE_AND_LOAD, url], installed)


def test_a_lost_connection_is_made_again(
    installed: Path, url: str, sshd: Sshd, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """A call that meets it fails as one that may be tried again, and the next one finds the server;
    so does close()."""
    monkeypatch.syspath_prepend(installed)
    from holdfast_sftp.driver import SftpDriver

    async def main() -> None:
        driver = SftpDriver.open(parse(url))
        await driver.put("a/x", b"content")
        upload = await driver.create("a/y", 4)
        assert sshd.kill_sessions() > 0
        with pytest.raises(StorageDownError) as caught:
            await upload.write(0, memoryview(b"lost"))
        assert caught.value.temporary
        assert await driver.get("a/x") == b"content"
        sshd.kill_sessions()
        await driver.close()

    asyncio.run(main())


def test_a_sweep_goes_by_the_clock_of_the_server(installed: Path, url: str, root: Path) -> None:
    """A temporary file to which nothing was written for an hour is swept; one that is newer stays."""
    names = {"old": 3700, "new": 3500}
    program = "import asyncio, sys; from holdfast.drivers.registry import open_driver\n"
    program += "async def main():\n    d = open_driver(sys.argv[1])\n    await d.put('a/x', b'x')\n"
    program += "    await d.sweep('a'); await d.close()\nasyncio.run(main())\n"
    run([sys.executable, "-c", program, url], installed)
    paths = {}
    for name, age_s in names.items():
        path = root / "a" / f".{name}.{uuid.uuid4().hex[:16]}.part"
        path.write_bytes(b"left")
        at_s = path.stat().st_mtime - age_s
        os.utime(path, (at_s, at_s))
        paths[name] = path
    run([sys.executable, "-c", program, url], installed)
    assert not paths["old"].exists()
    assert paths["new"].exists()
