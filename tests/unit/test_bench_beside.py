"""The baselines of ``holdfast bench``: the limit of a storage, and peers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast.bench.contest import Contestant, blamed, contest
from holdfast.bench.limit.of import limit_of
from holdfast.bench.limit.raw_file import RawFile
from holdfast.bench.limit.sweep import fastest_reader
from holdfast.bench.measured.beside import NOT_EQUAL, PeerContest
from holdfast.bench.peers.choice import chosen
from holdfast.bench.peers.peer import Peer
from holdfast.bench.states import State, build, flat_tensors
from holdfast.drivers.uri import Uri, join, parse
from holdfast.errors import StorageError, UsageError

MIB = 1 << 20
FILE = parse("file:///x")
TINY_GIB = 1 / 256


def no_word(line: str) -> None:
    """Ignore a line of progress."""


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("file://", ("O_DIRECT, ", "page cache, ")),
        ("fsspec+file://", ("fsspec's file, ",)),
        ("memory://bench", ("our driver of memory:// alone",)),
    ],
)
def test_a_foreign_client_sets_the_limit(root: str, said: tuple[str, ...], tmp_path: Path) -> None:
    """Only where there is none our driver does, and the name says so. Nothing is left."""
    tried: list[str] = []
    limit = limit_of(join(parse(f"{root}{tmp_path}"), "place"), 5 * MIB + 1, say=tried.append)
    assert bool(tried) == (not root.startswith("memory"))
    limit.writing.write()
    limit.reading.write()
    limit.reading.read()
    if "file" in root:
        stored = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert stored >= 5 * MIB + 1
    for client in (limit.writing, limit.reading) * 2:
        assert client.name.startswith(said)
        assert client.nbytes >= 5 * MIB + 1
        client.remove()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_file_that_is_too_short_is_no_limit(tmp_path: Path) -> None:
    """A read of missing bytes must not look fast."""
    raw = RawFile(tmp_path / "raw", 3 * MIB)
    raw.write()
    assert raw.path.stat().st_size == 3 * MIB
    with pytest.raises(OSError, match="at once"):
        replace(raw, nbytes=4 * MIB).read()


@dataclass(frozen=True)
class Sleeper:
    """A client that takes a given time, and records its calls."""

    name: str
    takes_s: float
    nbytes: int = 1 << 40
    stored: object = None
    done: list[str] = field(default_factory=list)

    def at_size(self, nbytes: int) -> Sleeper:
        """Return the client with another size, and the same record."""
        return replace(self, nbytes=nbytes)

    def write(self) -> None:
        """Record the size."""
        self.done.append(f"write {self.nbytes // MIB}")
        time.sleep(self.takes_s)

    def read(self) -> None:
        """Record the call."""
        self.done.append("read")
        time.sleep(self.takes_s)

    def remove(self) -> None:
        """Record the call."""
        self.done.append("remove")


def test_readers_read_cold() -> None:
    """Each is tried at a reduced size. Settings with the same stored form share one write."""
    seen: list[str] = []
    settings = [
        Sleeper("a", 0.03, stored=4, done=seen),
        Sleeper("b", 0.001, stored=4, done=seen),
        Sleeper("c", 0.03, stored=8, done=seen),
    ]
    best = fastest_reader(settings, make_cold=lambda: seen.append("cold"), say=no_word)
    assert (best.name, best.nbytes) == ("b", 1 << 40)
    assert seen[2:-3] == [
        *("write 256", "cold", "read"),
        *("cold", "read"),
        *("write 256", "cold", "read"),
    ]


@pytest.mark.parametrize(
    ("names", "uri", "said", "advice"),
    [
        ("nobody", "file:///x", "no peer is called 'nobody'", "dcp"),
        ("torchsave", "s3://b/x", "torchsave cannot be measured on s3://", "dcp"),
        ("all", "hdfs://h/x", "no peer can be measured on hdfs://", "Leave --peer out"),
        ("dcp", "hdfs://h/x", "dcp cannot be measured on hdfs://", "Leave --peer out"),
    ],
)
def test_impossible_peers_are_refused(names: str, uri: str, said: str, advice: str) -> None:
    """The advice names the possible ones."""
    with pytest.raises(UsageError, match=said) as caught:
        chosen(names, parse(uri))
    assert advice in str(caught.value)


def test_absent_programs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says how to install them; "all" omits them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == "safetensors" else find_spec(name),
    )
    with pytest.raises(UsageError, match=r"(?s)safetensors is not .*pip install safetensors"):
        chosen("safetensors", FILE)
    assert "safetensors" not in {peer.key for peer in chosen("all", FILE)}


@pytest.mark.nightly(4)
@pytest.mark.parametrize("peer", chosen("all", FILE), ids=lambda peer: peer.key)
def test_each_installed_peer_returns_the_saved_state(peer: Peer, tmp_path: Path) -> None:
    """The tensors of the state are equal bit for bit."""
    found = PeerContest([peer], parse(tmp_path), build(TINY_GIB), no_word)
    contest(found.saving(), 1, 0.0, no_word)
    found.prepare()
    contest(found.loading(), 1, 0.0, no_word)
    assert found.invalid == {}


def test_a_peer_that_returns_other_bytes_is_invalid(tmp_path: Path) -> None:
    """One element of one tensor is enough. Its times are kept, and those of other peers."""
    (good,) = chosen("torchsave", FILE)

    def one_bit_off(uri: Uri, state: State) -> None:
        good.load(uri, state)
        tensor = max(flat_tensors(state).values(), key=lambda each: each.numel())
        tensor.view(-1)[-1] += 1

    broken = replace(good, key="broken", name="broken", load=one_bit_off)
    found = PeerContest([good, broken], parse(tmp_path), build(TINY_GIB), no_word)
    found.prepare()
    series = contest(found.loading(), 2, 0.0, no_word)
    assert [len(each.seconds) for each in series] == [2, 2]
    assert found.invalid == {"save: broken": (NOT_EQUAL,), "load: broken": (NOT_EQUAL,)}


def test_a_peer_that_fails_is_left_out(tmp_path: Path) -> None:
    """The reason is printed at once, and is in the result; nothing of the peer stays."""
    (good,) = chosen("torchsave", FILE)

    def fail(uri: Uri, state: State) -> None:
        raise RuntimeError(f"cannot load {len(state)} things")

    broken = replace(good, name="broken", load=fail)
    said: list[str] = []
    found = PeerContest([broken], parse(tmp_path), build(TINY_GIB), said.append)
    assert said == ["broken is not measured: cannot load 3 things"]
    reason = "not measured, because it failed: cannot load 3 things"
    assert found.invalid == {"save: broken": (reason,), "load: broken": (reason,)}
    assert (found.saving(), found.loading()) == ([], [])
    assert list(tmp_path.iterdir()) == []


def failing(error: BaseException) -> Callable[[], None]:
    """Return a function that raises the error."""

    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "save: torch failed: .*No space left on device"),
        (RuntimeError("first\nlast"), "save: torch failed: last"),
        (KeyError(), "save: torch failed: KeyError"),
    ],
)
def test_errors_of_other_programs_name_them(error: Exception, said: str) -> None:
    """This holds for any error, in each step."""
    fail = failing(error)
    contestant = blamed(Contestant("save: torch", fail, fail, fail), parse("memory://x"))
    for step in (contestant.before, contestant.run, contestant.after):
        with pytest.raises(StorageError, match=said) as caught:
            step()
        assert (caught.value.__cause__, caught.value.uri) == (error, "memory://x")
