"""fsspec's SFTP file system as storage, on OpenSSH's own server: saves, and what they say when it
is cut off."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.servers.sshd import Sshd

import holdfast
from holdfast.errors import AccessError, StorageDownError


def files(uri: str) -> list[str]:
    """What lies at a URI, by the names alone."""
    folder = Path(urlsplit(uri).path)
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_saved_loaded_and_replaced(sftp_url: str, rng: np.random.Generator) -> None:
    """Bit for bit; the second save replaces the first, and leaves nothing else."""
    for step in (1, 2):
        state = {"w": rng.standard_normal((300, 1000)), "step": step}
        holdfast.save(sftp_url, state)
        back = holdfast.load(sftp_url)
        assert back["step"] == step
        assert (back["w"] == state["w"]).all()
    names = ["0.safetensors", "fate", "manifest.safetensors", "telemetry.jsonl.gz"]
    assert files(sftp_url) == names


def test_a_key_that_the_server_does_not_know_is_an_access_error(
    sftp_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has no key of the account is told that the server does not let them in, at once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessError, match="uthentication"):
        holdfast.save(sftp_url, {"w": np.ones(10)})
    assert files(sftp_url) == []


def test_a_server_that_is_gone_is_an_error_of_the_storage(sftp_url: str, sshd: Sshd) -> None:
    """Nobody listens: the error says so, and the next save, to the server that is back, succeeds."""
    sshd.kill()
    try:
        with pytest.raises(StorageDownError):
            holdfast.save(sftp_url + "&retries=1", {"w": np.ones(10)})
    finally:
        sshd.listen()
    holdfast.save(sftp_url, {"w": np.ones(10)})
    assert (holdfast.load(sftp_url)["w"] == 1).all()
