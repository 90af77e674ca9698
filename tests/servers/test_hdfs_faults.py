"""Saves to a real HDFS whose servers die, hang, restart and fail over: none is ever torn."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.bits import difference
from support.servers.hadoop import Hadoop, find_hadoop
from support.servers.hdfs_probe import HdfsProbe
from support.servers.proxy import FaultProxy

import holdfast
from holdfast.drivers.uri import parse
from holdfast.errors import FullError, HoldfastError, StorageDownError

pytestmark = pytest.mark.clocked

WAIT_S = 120.0
CUTS_S = 15.0
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    """Run a name node and three DataNodes, with two copies of each file."""
    if find_hadoop() is None:
        pytest.skip("Hadoop is not installed: make test-servers")
    server = Hadoop(tmp_path_factory.mktemp("cluster"), datanodes=3)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def uri(cluster: Hadoop) -> Iterator[str]:
    """Yield an empty checkpoint on the cluster, with healthy servers before and after."""
    yield f"{cluster.at(uuid.uuid4().hex)}&timeout=5s&op_timeout_s=20"
    heal(cluster)


def heal(cluster: Hadoop) -> None:
    """Resume or restart the servers that hang or have died."""
    for name in ("nn0", "dn0", "dn1", "dn2"):
        if name in cluster.running:
            cluster.kill(name, signal.SIGCONT)
        else:
            cluster.begin(name)
    cluster.wait()


@pytest.fixture
def state(rng: np.random.Generator) -> State:
    """Return 96 MiB of random numbers, in two tensors: six chunks."""
    return {name: torch.from_numpy(rng.standard_normal(6 << 20)) for name in ("a", "b")}


def changed(state: State) -> State:
    """Return another state of the same shape."""
    return {name: tensor + 1 for name, tensor in state.items()}


def files(uri: str) -> list[str]:
    """List everything below a checkpoint, temporary files included, without the driver."""
    return HdfsProbe(parse(uri)).list()


def finished(uri: str, old: State, new: State) -> bool:
    """Return True if ``new`` replaced ``old``, and False if not; fail if neither is whole."""
    found = holdfast.load(uri)
    assert difference(found, old) is None or difference(found, new) is None
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.verify().ok
    return difference(found, new) is None


def one_save_tidies_up(uri: str, state: State) -> None:
    """Check that the next save leaves only its files, and attempts that died after their claim."""
    attempt = holdfast.save(uri, state).attempt
    assert difference(holdfast.load(uri), state) is None
    left = files(uri)
    others = {name.split("/")[1] for name in left if name.startswith("data/")} - {attempt}
    assert all(f"data/{other}/fate" in left for other in others), left
    assert [name for name in left if name.endswith(".tmp")] == []


@pytest.mark.drill
@pytest.mark.parametrize(
    ("victim", "how", "block_size"),
    [("dn0", signal.SIGKILL, "1MiB"), ("dn2", signal.SIGSTOP, "128MiB")],
)
def test_a_datanode_is_gone_mid_save(
    cluster: Hadoop, uri: str, state: State, victim: str, how: signal.Signals, block_size: str
) -> None:
    """A save survives a DataNode that dies among small blocks, or hangs in the middle of one.

    Or it fails with an error, and leaves the old checkpoint whole.
    """
    holdfast.save(uri, state)
    newer = changed(state)
    slowly = f"{uri}&block_size={block_size}&max_bytes_per_s=60MB"
    handle = holdfast.async_save(slowly, newer, budget_nbytes=128 << 20)
    time.sleep(0.6)
    assert not handle.done()
    cluster.kill(victim, how)
    error = _outcome(handle)
    assert error is None or isinstance(error, StorageDownError)
    assert finished(uri, state, newer) == (error is None)
    heal(cluster)
    one_save_tidies_up(uri, state)


@pytest.mark.drill
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_name_node_is_gone_mid_save(
    cluster: Hadoop, uri: str, state: State, how: signal.Signals
) -> None:
    """A save without its name node fails in time, names it, and keeps the old checkpoint."""
    holdfast.save(uri, state)
    handle = holdfast.async_save(uri, changed(state), budget_nbytes=64 << 20)
    time.sleep(0.2)
    cluster.kill("nn0", how)
    began_s = time.monotonic()
    error = _outcome(handle)
    assert isinstance(error, StorageDownError)
    assert error.uri is not None
    assert error.uri.startswith("hdfs://127.0.0.1")
    assert time.monotonic() - began_s < WAIT_S
    heal(cluster)
    assert not finished(uri, state, changed(state))
    one_save_tidies_up(uri, state)


@pytest.mark.nightly(6)
def test_connections_to_the_name_node_are_cut(hadoop: Hadoop, hdfs_url: str, state: State) -> None:
    """A save finishes, or fails with an error, while its connections are cut again and again."""
    holdfast.save(hdfs_url, state)
    newer = changed(state)
    host, _, port = hadoop.address.partition(":")
    with FaultProxy((host, int(port))) as proxy:
        way = hdfs_url.replace(hadoop.address, proxy.endpoint.removeprefix("http://"))
        handle = holdfast.async_save(
            f"{way}&block_size=1MiB&max_bytes_per_s=60MB&op_timeout_s=20&timeout=5s", newer
        )
        until_s = time.monotonic() + CUTS_S
        while not handle.done() and time.monotonic() < until_s:
            time.sleep(0.15)
            proxy.cut_all()
        error = _outcome(handle)
        assert proxy.cuts > 0
    assert error is None or isinstance(error, StorageDownError)
    assert finished(hdfs_url, state, newer) == (error is None)
    one_save_tidies_up(hdfs_url, state)


@pytest.mark.nightly(7)
def test_a_quota_that_is_used_up_fails_the_save(
    hadoop: Hadoop, hdfs_url: str, state: State
) -> None:
    """A save that exhausts a quota raises FullError; with more room the next one cleans up."""
    holdfast.save(hdfs_url, state)
    root = "/" + parse(hdfs_url).location.partition("/")[2]
    hadoop.admin("-setSpaceQuota", "300m", root)  # each byte counts twice
    with pytest.raises(FullError, match="quota"):
        holdfast.save(hdfs_url, changed(state))
    assert difference(holdfast.load(hdfs_url), state) is None
    hadoop.admin("-clrSpaceQuota", root)
    one_save_tidies_up(hdfs_url, changed(state))


@pytest.mark.nightly(41)
def test_a_fail_over_mid_save(tmp_path_factory: pytest.TempPathFactory, state: State) -> None:
    """After a fail-over, the current save and all later ones continue on the other name node."""
    if find_hadoop() is None:
        pytest.skip("Hadoop is not installed: make test-servers")
    server = Hadoop(tmp_path_factory.mktemp("ha"), ha=True)
    server.start()
    try:
        uri = f"{server.at('run')}&timeout=60s"
        holdfast.save(uri, state)
        newer = changed(state)
        handle = holdfast.async_save(uri, newer, budget_nbytes=64 << 20)
        time.sleep(0.2)
        server.kill("nn0")
        server.activate("nn1")
        error = _outcome(handle)
        assert finished(uri, state, newer) == (error is None)
        holdfast.save(uri, newer)
        assert difference(holdfast.load(uri), newer) is None
        _names_the_standby(server)
    finally:
        server.stop()


def _names_the_standby(server: Hadoop) -> None:
    """Check that a load from a standby fails at the deadline, with advice what to name instead."""
    server.begin("nn0")
    server.wait_for_standby("nn0")
    with pytest.raises(StorageDownError, match=r"standby: name the name service.*op_timeout_s"):
        holdfast.load(f"hdfs://{server.address}/run?timeout=3s&op_timeout_s=6")


def _outcome(handle: holdfast.SaveHandle) -> HoldfastError | None:
    try:
        handle.wait(WAIT_S)
    except HoldfastError as error:
        return error
    return None
