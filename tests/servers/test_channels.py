"""Weight channels on real servers: followed, waited for, kept small, and taken over."""

from __future__ import annotations

import threading

import pytest
from support.drivers import keys, used
from support.weight_victims import published, weights

import holdfast


@pytest.fixture(params=["file", "s3", "hdfs", "az", "gs"])
def server(request: pytest.FixtureRequest) -> str:
    """Return a new channel on a file system or a real server."""
    if request.param == "file":
        return f"file://{request.getfixturevalue('tmp_path')}"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def followed(subscriber: holdfast.Subscriber, timeout_s: float = 0.0) -> int:
    """Update, and return the version that the subscriber has, whole."""
    assert subscriber.update(timeout_s) is not None
    assert subscriber.version == published(subscriber.state)
    return subscriber.version


@pytest.mark.nightly(10)
def test_a_channel_is_followed_and_taken_over(server: str) -> None:
    """Each version arrives, old ones are deleted, and the earlier of two publishers fails."""
    with holdfast.publish(server, keep=4, anchor=3) as first, holdfast.subscribe(server) as early:
        for version in range(8):
            first.push(version, weights(version)).wait()
            assert followed(early) == version
        with holdfast.subscribe(server) as late:
            assert followed(late) == 7
        second = holdfast.publish(server, keep=4, anchor=3)
        waiting = threading.Timer(0.5, lambda: second.push(8, weights(8)).wait())
        waiting.start()
        assert followed(early, 30) == 8
        waiting.join()
        with pytest.raises(holdfast.SupersededError, match="another publisher"):
            first.push(9, weights(9)).wait()
        for version in (9, 10, 11):
            second.push(version, weights(version)).wait()
            assert followed(early) == early.newest() == version
        second.close()
    folders = {key.split("/")[0] for key in used(server, keys)}
    versions = {int(folder) for folder in folders if folder.isdecimal()}
    assert max(versions) == 12
    assert min(versions) > 4
    assert folders - {f"{sequence:08d}" for sequence in versions} == {"newest.json"}
