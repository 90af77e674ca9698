"""kill -9 of trainers that publish weights, and of engines that follow them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.aftermath import some
from support.inside import after_grace
from support.victims import spawned
from support.weight_victims import follow_and_die_at, publish_and_die_at, published, weights

import holdfast
from holdfast.storage.weights import channel
from holdfast.storage.weights.channel import Head

WAIT_S = 60.0
POINTS = 6
BEFORE, AFTER = 2, 7
"""Versions before a trainer is killed, and at its end."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return a channel with a few versions, and the number of calls that publish the others."""
    folder = tmp_path_factory.mktemp("weights")
    push(folder / "begun", BEFORE)
    shutil.copytree(folder / "begun", folder / "counted")
    process, pipe = spawned(publish_and_die_at, str(folder / "counted"), AFTER, 0)
    process.join(WAIT_S)
    return folder / "begun", pipe.recv()


def push(uri: Path, count: int) -> None:
    """Publish until there are ``count`` versions."""
    with holdfast.publish(uri, keep=4, anchor=3) as publisher:
        for version in range(0 if publisher.newest is None else publisher.newest + 1, count):
            publisher.push(version, weights(version)).wait()


def followed(subscriber: holdfast.Subscriber) -> int:
    """Update, and return the version that the subscriber has, whole."""
    subscriber.update()
    assert subscriber.version == published(subscriber.state)
    return subscriber.version


def leftovers(uri: Path) -> list[str]:
    """Return all files and folders that belong to no version."""
    head = Head.decode((uri / "newest.json").read_bytes())
    versions = {channel.version_key(sequence) for sequence in head.kept}
    known = {"newest.json", "leases", *versions}
    left = [path.name for path in uri.iterdir() if path.name not in known]
    for version in sorted(versions):
        attempts = list((uri / version / "data").iterdir())
        left += [str(path) for path in attempts if len(attempts) > 1]
        left += [str(path) for path in (uri / version).rglob(".*") if "telemetry" not in path.name]
    return left + [path.name for path in (uri / "leases").glob("*")]


def test_a_trainer_is_killed_and_starts_again(
    begun: tuple[Path, int], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, subscribers have a published version. It continues above the newest one."""
    start, calls = begun
    ended = set()
    for at in some(range(1, calls + 1), POINTS, seed):
        uri = tmp_path / str(at)
        shutil.copytree(start, uri)
        with holdfast.subscribe(uri) as survivor:
            assert followed(survivor) == BEFORE - 1
            process, _ = spawned(publish_and_die_at, str(uri), AFTER, at)
            while process.is_alive():
                followed(survivor)
            process.join(WAIT_S)
            assert process.exitcode in (-9, 0)
            newest = followed(survivor)
            with holdfast.subscribe(uri) as fresh:
                assert followed(fresh) == newest
            with monkeypatch.context() as patch:
                after_grace(patch)
                push(uri, newest + 1 + 6)
            assert followed(survivor) == newest + 6
            with holdfast.subscribe(uri) as fresh:
                assert followed(fresh) == newest + 6
        assert leftovers(uri) == [], at
        ended.add(newest)
    assert len(ended) > 1


def test_an_engine_is_killed_while_it_reads(tmp_path: Path, seed: int) -> None:
    """The trainer and other engines notice nothing."""
    push(tmp_path, BEFORE)
    with holdfast.subscribe(tmp_path) as survivor:
        for number, at in enumerate(some(range(1, 40), POINTS // 2, seed)):
            process, _ = spawned(follow_and_die_at, str(tmp_path), at)
            version = BEFORE + number
            while process.is_alive():
                push(tmp_path, version := version + 1)
                process.join(0.2)
            assert process.exitcode == -9
            assert followed(survivor) == survivor.newest()


def test_a_lease_of_a_killed_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that it was reading is kept for as long as a lease lives, and no longer."""
    push(tmp_path, BEFORE)
    process, _ = spawned(follow_and_die_at, str(tmp_path), 8)
    process.join(WAIT_S)
    (lease,) = (tmp_path / "leases").iterdir()
    push(tmp_path, 12)
    assert (tmp_path / channel.version_key(BEFORE)).exists()
    monkeypatch.setattr(channel, "LEASE_S", -1.0)
    push(tmp_path, 14)
    assert not (tmp_path / channel.version_key(BEFORE)).exists()
    assert not lease.exists()
