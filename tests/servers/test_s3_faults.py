"""Saves to a real S3 server that fails: they finish, or fail in time, and leave nothing torn."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.servers.proxy import FaultProxy, Faults
from support.servers.radosgw import Radosgw, find_ceph

import holdfast
from holdfast.errors import FullError, StorageDownError

pytestmark = pytest.mark.clocked

MIB = 1 << 20
SHORT = "&timeout=3s&deadline=4s&retries=1&op_timeout_s=15"
"""Options of a save that must fail soon."""
FAIL_S = 40.0
"""Deadline for that failure."""
OLD, NEW = ({"x": torch.randn(24_000_000), "step": step} for step in (1, 2))
"""Two states of 96 MB, which differ everywhere."""


@dataclass
class Place:
    """A folder of a bucket that no other test uses."""

    server: Radosgw
    folder: str

    def uri(self, options: str = "", endpoint: str | None = None) -> str:
        """Return its URI."""
        at = endpoint or self.server.endpoint
        return f"s3://holdfast/{self.folder}?endpoint={at}&part_size=5MiB{options}"

    def holds(self, state: dict[str, Any]) -> bool:
        """Return whether exactly this state is loaded from there."""
        found = holdfast.load(self.uri())
        return torch.equal(found["x"], state["x"]) and found["step"] == state["step"]

    def keys(self) -> list[str]:
        """Return the keys in it, as another client sees them."""
        found = self.server.client().list_objects_v2(Bucket="holdfast", Prefix=f"{self.folder}/")
        return [entry["Key"].removeprefix(f"{self.folder}/") for entry in found["Contents"]]

    def unfinished(self) -> list[dict[str, str]]:
        """Return its unfinished uploads."""
        client = self.server.client()
        found = client.list_multipart_uploads(Bucket="holdfast", Prefix=f"{self.folder}/")
        uploads: list[dict[str, str]] = found.get("Uploads", [])
        return uploads

    def parts_left(self) -> int:
        """Count the parts of unfinished uploads, which cost money."""
        client = self.server.client()
        at = [{"Key": found["Key"], "UploadId": found["UploadId"]} for found in self.unfinished()]
        listed = [client.list_parts(Bucket="holdfast", **upload) for upload in at]
        return sum(len(found.get("Parts", ())) for found in listed)

    def leftovers(self) -> list[str]:
        """Return unfinished uploads, and keys that are not the current checkpoint's."""
        keys = self.keys()
        (current,) = {key.split("/")[1] for key in keys if re.match("data/.*safetensors$", key)}
        names = ("fate", "0.safetensors", "telemetry.jsonl.gz")
        known = {"manifest.safetensors", *(f"data/{current}/{name}" for name in names)}
        return sorted({*keys} - known) + [found["Key"] for found in self.unfinished()]


@pytest.fixture
def place(radosgw: Radosgw, request: pytest.FixtureRequest) -> Place:
    """Return a folder named after the test."""
    return Place(radosgw, re.sub(r"\W", "-", request.node.name))


@pytest.fixture
def proxy(radosgw: Radosgw) -> Iterator[FaultProxy]:
    """Run a proxy to the server."""
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        yield proxy


@pytest.mark.nightly(5)
def test_a_server_that_restarts_is_waited_for(place: Place, proxy: FaultProxy) -> None:
    """A save finishes although its server is killed and restarted during the upload."""
    proxy.faults = Faults(up_nbytes_per_s=4 * MIB)
    handle = holdfast.async_save(place.uri(endpoint=proxy.endpoint), OLD)
    time.sleep(1.0)
    assert not handle.done()
    place.server.kill_gateway()
    proxy.faults = Faults()
    time.sleep(1.0)
    place.server.start_gateway()
    handle.wait(60)
    assert place.holds(OLD)
    assert place.leftovers() == []


@pytest.mark.drill
@pytest.mark.parametrize("fault", ["killed", "mute"])
def test_a_server_that_stays_away_fails_the_save(
    place: Place, proxy: FaultProxy, fault: str
) -> None:
    """A killed server or a dead line fails a save in time; the next save collects leftovers."""
    holdfast.save(place.uri(), OLD)
    proxy.faults = Faults(up_nbytes_per_s=4 * MIB)
    handle = holdfast.async_save(place.uri(SHORT, proxy.endpoint), NEW)
    time.sleep(1.0)
    if fault == "mute":
        proxy.faults = Faults(mute=True)
    else:
        place.server.kill_gateway()
    began_s = time.monotonic()
    try:
        with pytest.raises(StorageDownError):
            handle.wait(60)
        assert time.monotonic() - began_s < FAIL_S
    finally:
        if fault == "killed":
            place.server.start_gateway()
    assert place.holds(OLD)
    holdfast.save(place.uri(), NEW)
    assert place.holds(NEW)
    assert place.leftovers() == []


@pytest.mark.nightly(4)
def test_connections_that_are_cut_are_made_again(place: Place, proxy: FaultProxy) -> None:
    """A save finishes although its connections are cut among the parts again and again.

    An upload that began unknown, since its answer was cut off, has no part; the next save drops it.
    """
    proxy.faults = Faults(up_nbytes_per_s=20 * MIB)
    handle = holdfast.async_save(place.uri(endpoint=proxy.endpoint), OLD)
    for _ in range(6):
        time.sleep(0.15)
        proxy.cut_all()
    proxy.faults = Faults()
    handle.wait(90)
    assert proxy.cuts > 6
    assert place.holds(OLD)
    assert place.parts_left() == 0
    holdfast.save(place.uri(), NEW)
    assert place.leftovers() == []


@pytest.mark.nightly(4)
def test_an_upload_whose_beginning_nobody_heard_of_is_dropped_by_the_next_save(
    place: Place,
) -> None:
    """It belongs to the attempt that became the checkpoint, and is dropped with it."""
    holdfast.save(place.uri(), OLD)
    with holdfast.open(place.uri()) as c:
        key = f"{place.folder}/data/{c.attempt}/0.safetensors"
    place.server.client().create_multipart_upload(Bucket="holdfast", Key=key)
    assert place.leftovers() == [key]
    holdfast.save(place.uri(), NEW)
    assert place.leftovers() == []


def answer_to(key: str) -> re.Pattern[bytes]:
    """Match a put of an object of this name."""
    return re.compile(rb"PUT /holdfast/[^ ?]*/" + re.escape(key.encode()) + rb"[ ?]")


@pytest.mark.nightly(10)
@pytest.mark.parametrize(
    "losing",
    [
        answer_to("attempt.json"),
        re.compile(rb"POST /holdfast/[^ ]*uploadId="),
        answer_to("fate"),
        answer_to("manifest.safetensors"),
    ],
    ids=["announcement", "upload", "claim", "manifest"],
)
def test_a_save_survives_that_one_answer_is_lost(
    place: Place, proxy: FaultProxy, losing: re.Pattern[bytes]
) -> None:
    """If the store has an object but its answer is cut off, a save recognises the object as its own."""
    uri = place.uri(endpoint=proxy.endpoint)
    holdfast.save(uri, {"x": torch.zeros(10), "step": 0})
    proxy.losing = losing
    holdfast.save(uri, NEW)
    assert proxy.losing is None
    assert place.holds(NEW)
    assert place.leftovers() == []


def test_a_pruning_survives_that_the_answer_to_its_sign_is_lost(
    place: Place, proxy: FaultProxy
) -> None:
    """It continues, and does not mistake its own lock for another pruning's."""
    uri = place.uri(endpoint=proxy.endpoint)
    for step in (1, 2):
        holdfast.save(uri.replace("?", f"/step-{step}?", 1), {"step": step})
    proxy.losing = answer_to("data/pruning")
    report = holdfast.prune(uri, keep_last=1)
    assert proxy.losing is None
    assert (len(report.checkpoints), report.kept) == (1, ("step-2",))
    assert {key.split("/")[0] for key in place.keys()} == {"step-2"}


@pytest.mark.drill
def test_a_quota_that_is_used_up_fails_the_save(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A used-up quota raises FullError and keeps the checkpoint before; with more room saves work."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    names = ("bucket_quota_ttl", "user_quota_bucket_sync_interval", "user_quota_sync_interval")
    exact = "\n".join(f"rgw_{name} = {n}" for name, n in zip(names, (0, 1, 1), strict=True))
    server = Radosgw(tmp_path_factory.mktemp("quota"), extra=exact)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    place, quota = Place(server, "run"), ("--uid=test", "--quota-scope=bucket")
    server.start()
    try:
        holdfast.save(place.uri(), OLD)
        server.rgw_admin("quota", "set", *quota, f"--max-size={140 * MIB}")
        server.rgw_admin("quota", "enable", *quota)
        server.kill_gateway()
        server.start_gateway()
        with pytest.raises(FullError, match="QuotaExceeded"):
            holdfast.save(place.uri("&concurrency=2"), NEW)
        server.rgw_admin("quota", "disable", *quota)
        server.kill_gateway()
        server.start_gateway()
        assert place.holds(OLD)
        holdfast.save(place.uri(), NEW)
        assert place.holds(NEW)
        assert place.leftovers() == []
    finally:
        server.stop()
