"""The peers that ``holdfast bench --peer`` measures: which can be, and that what they give back is
held against what was saved."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.bench.contest import contest
from holdfast.bench.measured.peers import NOT_EQUAL, PeerContest
from holdfast.bench.peers.choice import PEERS, chosen
from holdfast.bench.peers.peer import Peer
from holdfast.bench.states import State, build, flat_tensors
from holdfast.cli import app
from holdfast.drivers.uri import Uri, parse
from holdfast.errors import UsageError

FILE = parse("file:///x")
TINY_GIB = 1 / 256


def no_word(line: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize(
    ("names", "uri", "said", "advice"),
    [
        ("nobody", "file:///x", "no peer is called 'nobody'", "dcp"),
        ("dcp,safetensor", "file:///x", "no peer is called 'safetensor'", "safetensors"),
        ("torchsave", "s3://b/x", "torchsave cannot be measured on s3://", "dcp"),
        ("all", "hdfs://h/x", "no peer can be measured on hdfs://", "Leave --peer out"),
        ("dcp", "hdfs://h/x", "dcp cannot be measured on hdfs://", "Leave --peer out"),
    ],
)
def test_peers_that_cannot_be_are_refused(names: str, uri: str, said: str, advice: str) -> None:
    """With those that can."""
    with pytest.raises(UsageError, match=said) as caught:
        chosen(names, parse(uri))
    assert advice in str(caught.value)


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how to install it; "all" leaves it out."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == "safetensors" else find_spec(name),
    )
    with pytest.raises(UsageError, match="safetensors is not installed") as caught:
        chosen("safetensors", FILE)
    assert "pip install safetensors" in str(caught.value)
    assert not {"safetensors", "runai"} & {peer.key for peer in chosen("all", FILE)}


def test_peers_are_chosen_once_and_by_storage() -> None:
    """A name stands for another way on another storage."""
    assert chosen("", FILE) == []
    assert [peer.name for peer in chosen("dcp, torchsave,dcp", FILE)] == ["DCP", "torch.save"]
    assert [peer.name for peer in chosen("dcp", parse("fsspec+memory://x"))] == ["DCP, fsspec"]
    served = [(peer.key, scheme) for peer in PEERS for scheme in peer.schemes]
    assert len(set(served)) == len(served)


def test_the_command_refuses_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2, and nothing is left."""
    assert app.run(["bench", str(tmp_path), "--peer", "nobody"]) == 2
    assert "no peer is called" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("peer", chosen("all", FILE), ids=lambda peer: peer.key)
def test_each_installed_peer_gives_back_what_it_saved(peer: Peer, tmp_path: Path) -> None:
    """Bit for bit, into the tensors of the state."""
    state = build(TINY_GIB)
    found = PeerContest([peer], parse(tmp_path), state, no_word)
    contest(found.saving(), 1, 0.0, no_word)
    found.prepare()
    contest(found.loading(), 1, 0.0, no_word)
    assert found.invalid == {}


def _one_bit_off(uri: Uri, state: State) -> None:
    (torch_save,) = chosen("torchsave", FILE)
    torch_save.load(uri, state)
    tensor = max(flat_tensors(state).values(), key=lambda each: each.numel())
    tensor.view(-1)[-1] += 1


def _fails(uri: Uri, state: State) -> None:
    raise RuntimeError(f"cannot load {len(state)} things")


def test_a_peer_that_gives_back_something_else_is_named(tmp_path: Path) -> None:
    """One element of one tensor is enough; its times are kept, and another peer's stand."""
    (good,) = chosen("torchsave", FILE)
    broken = replace(good, key="broken", name="broken", load=_one_bit_off)
    found = PeerContest([good, broken], parse(tmp_path), build(TINY_GIB), no_word)
    found.prepare()
    series = contest(found.loading(), 2, 0.0, no_word)
    assert [len(each.seconds) for each in series] == [2, 2]
    assert found.invalid == {"save: broken": (NOT_EQUAL,), "load: broken": (NOT_EQUAL,)}


def test_a_peer_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    """With the reason, on the spot and in the result; nothing of it stays."""
    (good,) = chosen("torchsave", FILE)
    broken = replace(good, name="broken", load=_fails, saves=False)
    said: list[str] = []
    found = PeerContest([broken], parse(tmp_path), build(TINY_GIB), said.append)
    assert said == ["broken is not measured: cannot load 3 things"]
    assert found.invalid == {
        "load: broken": ("not measured, because it failed: cannot load 3 things",),
    }
    assert (found.saving(), found.loading()) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_peers_stand_beside_our_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measure them and our driver alone, with their share of the limit, and leave nothing."""
    arguments = ["bench", str(tmp_path / "s"), "--size", "4MiB", "--runs", "1", "--json"]
    app.run([*arguments, "--peer", "dcp,torchsave", "--driver-alone"])
    found = json.loads(capsys.readouterr().out)
    names = [phase["name"] for phase in found["phases"]]
    assert names == [
        *("write limit", "write alone", "save", "async save", "overwrite"),
        *("save: DCP", "save: torch.save"),
        *("read limit", "read alone", "load", "verify", "load: DCP", "load: torch.save"),
        *("prune", "delete"),
    ]
    without = {phase["name"] for phase in found["phases"] if phase["share"] is None}
    assert without == {"write limit", "read limit", "prune", "delete"}
    assert found["config"]["peers"] == "dcp,torchsave"
    assert set(found["limits"]) == {"write limit", "read limit"}
    assert list((tmp_path / "s").iterdir()) == []
