"""The arithmetic of ``holdfast bench``, drivers alone, and baselines."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.commands import run

from holdfast.bench.alone.plan import Point, grid
from holdfast.bench.alone.transfer import Shape, Transfer, parts
from holdfast.bench.contest import Contestant, blamed, contest, rows
from holdfast.bench.limit.of import fastest_reader, limit_of
from holdfast.bench.limit.raw_file import RawFile
from holdfast.bench.measured.beside import NOT_EQUAL, PeerContest
from holdfast.bench.measured.course import Course
from holdfast.bench.measured.plan import Plan
from holdfast.bench.measured.ranks import Ranks
from holdfast.bench.measured.result import Measurement, Phase, decoded, encoded
from holdfast.bench.peers.choice import chosen
from holdfast.bench.peers.peer import Peer
from holdfast.bench.program import TINY_GIB, Options, Program
from holdfast.bench.report import Report, Series
from holdfast.bench.states import State, build, flat_tensors
from holdfast.bench.workloads.sized import scaled_parameters
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.uri import Uri, join, parse
from holdfast.errors import StorageError, UsageError

MIB = 1 << 20


def test_rows_show_ratios_to_limit_and_to_holdfast() -> None:
    """Rows show ratios: the limit takes half of our time, a peer four times as long."""
    ours = Series("holdfast", [2.0, 2.0, 2.0], [5, MIB << 10, 0])
    found = [Series("limit", [1.0], [0]), ours, Series("DCP", [8.0])]
    assert [row[4:] for row in rows(found, 4 * 10**9)] == [
        ["4.00", "–", "–", "0.00 GiB"],
        ["2.00", "50%", "–", "1.00 GiB"],
        ["0.50", "12%", "4.0 ×", "–"],
    ]


def test_contestants_take_turns() -> None:
    """Contestants alternate (A B, B A, A B), and set-up and clean-up are not timed."""
    seen: list[str] = []
    add = seen.append
    contestants = [
        Contestant(n, partial(add, n), partial(add, "("), partial(add, ")")) for n in "AB"
    ]
    assert [len(series.seconds) for series in contest(contestants, 3, 0.0)] == [3, 3]
    assert "".join(seen) == "(A)(B)(B)(A)(A)(B)"


@pytest.mark.parametrize("gib", [0.5, 1.0, 8.0])
def test_states_come_close_to_their_size(gib: float) -> None:
    """A scaled model of whole layers is within 10 % of the requested size."""
    nbytes = sum(math.prod(shape) * 14 for shape in scaled_parameters(gib).values())
    assert nbytes / (1 << 30) == pytest.approx(gib, rel=0.1)


def test_tiny_overrules_size_and_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tiny overrides other options: it runs one round of a small state, and leaves a file."""
    seen: list[Options] = []

    def report(given: Options, folder: Path) -> Report:
        seen.append(given)
        (folder / "file").write_text("x")
        return Report("T", ["", "s"], [["A", "1"]])

    file = tmp_path / "out.json"
    arguments = ["--tiny", "--gib", "7", "--runs", "9", "--dir", str(tmp_path / "dir")]
    assert Program("p", "Doc.", report)([*arguments, "--json", str(file)]) == 0
    assert [(given.gib, given.runs) for given in seen] == [(TINY_GIB, 1)]
    found = json.loads(file.read_text())
    assert (found["program"], found["rows"]) == ("p", [["A", "1"]])
    assert "cpu" in found["machine"]
    assert "A  1" in capsys.readouterr().out
    assert list((tmp_path / "dir").iterdir()) == []


# A driver alone: --workload raw


TRAITS = replace(MemoryDriver().traits, part_nbytes=16 * MIB, concurrency=16, shared=True)
WRITE = Phase("write 4MiB × 8", 10**9, (1.0, 2.0, 1.0))


def test_the_grid_is_around_the_preferences_of_the_driver() -> None:
    """S3 takes no parts below 5 MiB. A driver's options for part size and concurrency are set."""
    points = grid(S3Driver.OPTIONS, TRAITS)
    names = [f"{part}MiB × {number}" for part in (8, 16, 64) for number in (1, 16, 64)]
    assert [point.name for point in points] == names
    assert points[0].options == {"part_size": "8MiB", "concurrency": "1"}
    local = grid(LocalDriver.OPTIONS, TRAITS, [MIB], [4, 2])
    assert local == [Point(Shape(MIB, n), {"threads": str(n)}) for n in (2, 4)]
    assert grid({}, TRAITS, [7], [3]) == [Point(Shape(7, 3))]


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        ({"part_sizes": [MIB]}, (), "--part-sizes 1MiB is beyond .*: its option part_size"),
        ({"concurrencies": [1000]}, (), "--concurrencies 1000 is beyond"),
        ({"part_sizes": [8 * MIB]}, ("part_size",), "the URI sets part_size"),
        ({"concurrencies": [4]}, ("concurrency",), "the URI sets concurrency"),
    ],
)
def test_impossible_points_are_refused(
    asked: dict[str, list[int]], given: tuple[str, ...], said: str
) -> None:
    """The error names the argument, and gives the driver's own reason."""
    with pytest.raises(UsageError, match=said):
        grid(S3Driver.OPTIONS, TRAITS, **asked, given=given)
    with pytest.raises(UsageError, match="--part-sizes 1MiB is less than this storage takes"):
        grid({}, replace(TRAITS, part_min_nbytes=MIB + 1), [MIB])


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("writing", [False, True])
def test_parts_cover_an_object_once(random: bool, writing: bool) -> None:
    """Random order differs from the sequence, and is the same in each run."""
    shape = Shape(3 * MIB, 4, random)
    moved = parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing)
    assert parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing) == moved
    ends = [0, *(start + nbytes for start, nbytes in sorted(moved))]
    assert [start for start, _ in sorted(moved)] == ends[:-1]
    assert ends[-1] == 100 * MIB + 5
    assert (moved == sorted(moved)) == (not random and not writing)


def test_a_written_object_can_be_read(tmp_path: Path) -> None:
    """Parts have odd sizes, in sequence and in random order. Each has a latency."""
    nbytes = MIB + 4096
    for random in (False, True):
        shape = Shape(100_000, 3, random)
        moved = Transfer(parse(str(tmp_path)), "key", nbytes, shape=shape)
        moved.write()
        written = (tmp_path / "key").read_bytes()
        assert len(written) == nbytes
        assert len(moved.latencies_s) == 11
        assert np.unique(np.frombuffer(written, np.uint8)).size == 256
        moved.read()
        assert len(moved.latencies_s) == 22


def test_results_are_compared_with_their_like(tmp_path: Path) -> None:
    """Results of different workloads are refused by name."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(encoded(Measurement("file:///x", 1.9e9, {}, {}, (WRITE,))))
    b.write_text(encoded(Measurement("file:///x", 1.9e9, {"workload": "raw"}, {}, (WRITE,))))
    said = f"a.json measures checkpoints, {b} measures raw"
    assert said in run("bench", "compare", a, b, status=2).stderr


@pytest.mark.nightly(4)
def test_raw_is_measured(tmp_path: Path) -> None:
    """Every operation at every point is in the document and the page; nothing is left."""
    page = tmp_path / "page.html"
    arguments = ["bench", tmp_path / "s", "--workload", "raw", "--size", "4MiB", "--runs", "1"]
    arguments += ["--part-sizes", "1MiB,2MiB", "--concurrencies", "1,3"]
    printed = run(*arguments, "--json", "--html", page, status=1)
    found = decoded(printed.stdout, "x")
    operations = ("write", "random write", "read", "random read")
    names = [f"{what} {part}MiB × {n}" for what in operations for part in (1, 2) for n in (1, 3)]
    assert [phase.name for phase in found.phases] == names
    counts = [operations.count for each in found.phases for operations in each.operations.values()]
    assert counts == [4, 4, 2, 2] * 4
    assert all(phase.nbytes == 4 * MIB for phase in found.phases)
    assert "the object has only 2 parts; give a larger --size" in found.invalid["read 2MiB × 3"]
    assert list((tmp_path / "s").iterdir()) == []
    text = page.read_text()
    assert "INVALID" in text
    assert text.count("<svg") == 4 + len(names)
    assert "<script" not in text


# Baselines: the limit of a storage, and peers


FILE = parse("file:///x")


def no_word(line: str) -> None:
    """Ignore a line of progress."""


def course(say: Callable[[str], None] = no_word) -> Course:
    """Return the course of a measurement by one process."""
    return Course(Plan("file:///x", MIB, runs=1), Ranks(), say)


def failing(error: BaseException) -> Callable[..., None]:
    """Return a function that raises the error."""

    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("file://", ("O_DIRECT, ", "page cache, ")),
        ("fsspec+file://", ("fsspec's file, ",)),
        ("memory://bench", ("our driver of memory:// alone",)),
    ],
)
def test_a_foreign_client_sets_the_limit(root: str, said: tuple[str, ...], tmp_path: Path) -> None:
    """Our own driver sets it only without a client, and the name says so. Nothing is left."""
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
    nbytes: int
    stored: object
    done: list[str]

    def write(self) -> None:
        self.done.append(f"write {self.nbytes // MIB}")
        time.sleep(self.takes_s)

    def read(self) -> None:
        self.done.append("read")
        time.sleep(self.takes_s)

    def remove(self) -> None:
        self.done.append("remove")


def test_readers_read_cold() -> None:
    """Each is tried at a reduced size. Settings with the same stored form share one write."""
    seen: list[str] = []
    given = (("a", 0.03, 4), ("b", 0.001, 4), ("c", 0.03, 8))

    def settings(nbytes: int) -> list[Sleeper]:
        return [Sleeper(name, s, nbytes, stored, seen) for name, s, stored in given]

    best = fastest_reader(settings, 1 << 40, make_cold=lambda: seen.append("cold"), say=no_word)
    assert (best.name, best.nbytes) == ("b", 1 << 40)
    cold = ["cold", "read"]
    assert seen[2:-3] == ["write 256", *cold, *cold, "write 256", *cold]


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
        importlib.util, "find_spec", lambda name: None if name == "safetensors" else find_spec(name)
    )
    with pytest.raises(UsageError, match=r"(?s)safetensors is not .*pip install safetensors"):
        chosen("safetensors", FILE)
    assert "safetensors" not in {peer.key for peer in chosen("all", FILE)}


@pytest.mark.nightly(4)
@pytest.mark.parametrize("peer", chosen("all", FILE), ids=lambda peer: peer.key)
def test_each_installed_peer_returns_the_saved_state(peer: Peer, tmp_path: Path) -> None:
    """The tensors of the state are equal bit for bit."""
    found = PeerContest([peer], parse(tmp_path), build(TINY_GIB), course())
    contest(found.saving(), 1, 0.0, no_word)
    found.prepare()
    contest(found.loading(), 1, 0.0, no_word)
    assert found.invalid == {}


def test_a_peer_that_returns_other_bytes_is_invalid(tmp_path: Path) -> None:
    """One element of one tensor is enough. Its times are kept, like those of other peers."""
    (good,) = chosen("torchsave", FILE)

    def one_bit_off(uri: Uri, state: State) -> None:
        good.load(uri, state)
        tensor = max(flat_tensors(state).values(), key=lambda each: each.numel())
        tensor.view(-1)[-1] += 1

    broken = replace(good, key="broken", name="broken", load=one_bit_off)
    found = PeerContest([good, broken], parse(tmp_path), build(TINY_GIB), course())
    found.prepare()
    series = contest(found.loading(), 2, 0.0, no_word)
    assert [len(each.seconds) for each in series] == [2, 2]
    assert found.invalid == {"save: broken": (NOT_EQUAL,), "load: broken": (NOT_EQUAL,)}


def test_a_peer_that_fails_is_left_out(tmp_path: Path) -> None:
    """The reason is printed at once, and is in the result; nothing of the peer stays."""
    (good,) = chosen("torchsave", FILE)
    broken = replace(good, name="broken", load=failing(RuntimeError("cannot load it")))
    said: list[str] = []
    found = PeerContest([broken], parse(tmp_path), build(TINY_GIB), course(said.append))
    assert said == ["broken is not measured: cannot load it"]
    reason = "not measured, because it failed: cannot load it"
    assert found.invalid == {"save: broken": (reason,), "load: broken": (reason,)}
    assert (found.saving(), found.loading()) == ([], [])
    assert list(tmp_path.iterdir()) == []


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
