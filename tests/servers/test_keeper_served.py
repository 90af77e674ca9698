"""A keeper whose memory is read over HTTP, as checkpoints, while a trainer continues."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.app import run as command
from holdfast.storage.arenas.client import status_of, stop
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder, keeper_folders

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for the keepers of one test."""
    with tempfile.TemporaryDirectory(prefix="hk") as folder:
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, folder)
        yield Path(folder)
        for one in keeper_folders():
            stop(one)


def asked(address: str, path: str, token: str | None) -> str:
    """Return a keeper's response to a plain HTTP client."""
    request = urllib.request.Request(f"http://{address}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=20) as answer:
        data = answer.read()
        assert isinstance(data, bytes)
        return data.decode()


def test_steps_in_memory_are_checkpoints_for_whoever_has_the_token(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are listed, verified, read and copied, and metrics are scraped."""
    state = {"w": torch.arange(300_000.0), "step": 0}
    keeper = holdfast.Keeper(serve="127.0.0.1", linger="1min")
    with holdfast.Checkpointer(tmp_path / "run", keeper=keeper, grace_s=None) as run:
        for step in (1, 2):
            state["step"] = step
            handle = run.step(step, state)
            assert handle is not None
            handle.wait(60)
        (folder,) = keeper_folders()
        status = status_of(folder)
        assert status is not None
        address = str(status["address"])
        token = folder.token.read_text()
        assert folder.token.stat().st_mode & 0o777 == 0o600
        monkeypatch.setenv("HOLDFAST_PEER_TOKEN", token)
        uri = f"peer://{address}/{status['run']}"
        assert command(["ls", uri]) == 0
        listed = capsys.readouterr().out
        assert "step-00000001" in listed
        assert "step-00000002" in listed
        assert command(["verify", f"{uri}/step-00000002"]) == 0
        assert command(["show", f"{uri}/step-00000002"]) == 0
        with holdfast.open(f"{uri}/step-00000002") as checkpoint:
            assert torch.equal(checkpoint.read("w", rows=slice(7, 9)), state["w"][7:9])
        with pytest.raises(holdfast.StorageError, match="read-only"):
            holdfast.save(f"{uri}/step-00000003", state)
        assert command(["cp", f"{uri}/step-00000001", str(tmp_path / "copy")]) == 0
        for step in (3, 4, 5):  # they overwrite the source of the copy
            handle = run.step(step, state)
            assert handle is not None
            handle.wait(60)
        capsys.readouterr()
        assert command(["ls", uri]) == 0
        assert "step-00000001" not in capsys.readouterr().out
        assert "holdfast_keeper_agreed_total 5" in asked(address, "/metrics", token)
        assert json.loads(asked(address, "/status", token))["run"] == status["run"]
        assert asked(address, "/health", None)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(address, "/metrics", "0" * 32)
        assert token not in json.dumps(status_of(KeeperFolder(folder.path)))
    loaded = holdfast.load(tmp_path / "copy")
    assert isinstance(loaded, dict)
    assert loaded["step"] == 1
    assert torch.equal(loaded["w"], state["w"])


def test_a_place_that_is_none_is_said_before_a_keeper_is_started(base: Path) -> None:
    """An invalid address is refused. The error says which form is valid."""
    with pytest.raises(holdfast.UsageError, match="an interface or an address"):
        holdfast.Keeper(serve="127.0.0.1:99999")
    assert keeper_folders() == []
