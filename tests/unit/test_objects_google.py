"""Google credentials: which kinds there are, whom they are asked from, and that nobody is asked
without any."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.drivers import used
from support.servers.scripted import Answer, Request, ScriptedServer, s3_answer, set_credentials

from holdfast.drivers.contract import Driver
from holdfast.errors import AccessError, HoldfastError

pytestmark = pytest.mark.clocked


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave nothing of Google in the environment, nor in the home folder."""
    set_credentials(monkeypatch, tmp_path, ())


async def put(driver: Driver) -> None:
    """One object, and two looks at it."""
    await driver.put("k", b"abc")
    assert await driver.get("k") == b"abc"
    await driver.delete("k")


def run(uri: str) -> None:
    """Within a minute."""
    used(uri, put)


def google(request: Request) -> Answer:
    """Answer as Google's servers: tokens, and a public bucket."""
    later = datetime.now(UTC) + timedelta(hours=1)
    if request.path == "/sts":
        good = b"subject_token=from-the-cluster" in request.body
        token = {"access_token": "federated", "token_type": "Bearer", "expires_in": 3600}
        refusal = {"error": "invalid_grant", "error_description": "no such subject"}
        return _json(token) if good else _json(refusal, 400)
    if request.path == "/token" and request.host == "oauth2.googleapis.com":
        return _json({"access_token": "of-user", "token_type": "Bearer", "expires_in": 3600})
    if request.path.endswith(":generateAccessToken"):
        source = request.headers["authorization"].removeprefix("Bearer ")
        return _json(
            {
                "accessToken": f"{source}-as-trainer",
                "expireTime": later.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )
    return s3_answer(request)


def _json(content: dict[str, Any], status: int = 200) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"content-type": "application/json"})


def federated(
    folder: Path, server: ScriptedServer, subject: str = "from-the-cluster", **more: Any
) -> dict[str, Any]:
    """Workload identity federation, whose subject is a file."""
    (folder / "subject").write_text(subject)
    audience = (
        "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k"
    )
    return {
        "type": "external_account",
        "audience": audience,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{server.url}/sts",
        "credential_source": {"file": str(folder / "subject")},
        **more,
    }


def use_file(path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``content`` the application default credentials."""
    path.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))


def tokens(server: ScriptedServer) -> set[str | None]:
    """Return the tokens of all requests for objects."""
    return {
        request.headers.get("authorization")
        for request in server.log
        if request.path.startswith("/bucket/")
    }


def test_federated_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subject's token from a file is exchanged for the one that requests carry."""
    with ScriptedServer(google) as server:
        use_file(tmp_path / "adc.json", federated(tmp_path, server), monkeypatch)
        run(f"gs://bucket/run?endpoint={server.url}&retries=0&deadline=1s")
        assert tokens(server) == {"Bearer federated"}


def test_credentials_that_gcloud_left_are_found(tmp_path: Path) -> None:
    """In its folder, with nothing in the environment."""
    with ScriptedServer(google) as server:
        (tmp_path / "gcloud").mkdir()
        path = tmp_path / "gcloud" / "application_default_credentials.json"
        path.write_text(json.dumps(federated(tmp_path, server)))
        run(f"gs://bucket/run?endpoint={server.url}&retries=0&deadline=1s")
        assert tokens(server) == {"Bearer federated"}


def test_impersonated_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's token is exchanged for one of a service account, at Google's host: by the proxy, and
    the authority, that the URI names."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    account = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/trainer@p.iam.gserviceaccount.com"
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    with ScriptedServer(google, authority) as proxy:
        content = {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": f"{account}:generateAccessToken",
            "source_credentials": user,
        }
        use_file(tmp_path / "adc.json", content, monkeypatch)
        run(f"gs://bucket/run?proxy={proxy.url}&ca={tmp_path / 'ca.pem'}&retries=0&deadline=1s")
        objects = [request for request in proxy.log if request.path.startswith("/bucket/")]
        assert {request.headers["authorization"] for request in objects} == {
            "Bearer of-user-as-trainer"
        }
        assert {request.host for request in objects} == {"storage.googleapis.com"}


def test_a_refused_exchange_is_an_error_of_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the file, and what Google said; the subject's token is not repeated, and no object
    is asked for."""
    with ScriptedServer(google) as server:
        use_file(tmp_path / "adc.json", federated(tmp_path, server, "hunter2"), monkeypatch)
        with pytest.raises(AccessError, match=r"adc\.json.*no such subject") as caught:
            run(f"gs://bucket/run?endpoint={server.url}&retries=0&deadline=1s")
        assert "hunter2" not in str(caught.value)
        assert tokens(server) == set()


@pytest.mark.parametrize("content", [{"type": "external_account"}, {"type": "unheard_of"}])
def test_a_file_that_cannot_be_used_is_said(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file, and a type that nobody knows."""
    use_file(tmp_path / "adc.json", content, monkeypatch)
    with ScriptedServer(google) as server, pytest.raises(HoldfastError, match=r"adc\.json"):
        run(f"gs://bucket/run?endpoint={server.url}&retries=0&deadline=1s")


def test_without_credentials_nobody_is_asked_for_any() -> None:
    """anonymous=on: objects are written, read and deleted, and the metadata server, which is not
    there, is not asked."""
    with ScriptedServer(google) as server:
        run(f"gs://bucket/run?endpoint={server.url}&retries=0&deadline=1s&anonymous=on")
        assert [request.method for request in server.log] == ["PUT", "GET", "DELETE"]
        assert not any((token or "").removeprefix("Bearer").strip() for token in tokens(server))
