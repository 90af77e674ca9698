"""The limit beside each result of ``holdfast bench``: by which client it is found, and with which of
its settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast.bench.limit.of import limit_of
from holdfast.bench.limit.raw_file import RawFile
from holdfast.bench.limit.sweep import fastest_reader, fastest_writer
from holdfast.bench.ratios import median_ratio, of_medians, of_pairs
from holdfast.drivers.uri import join, parse

MIB = 1 << 20


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("file://", ("O_DIRECT, ", "page cache, ")),
        ("fsspec+file://", ("fsspec's file, ",)),
        ("fsspec+memory://", ("fsspec's memory, ",)),
        ("memory://bench", ("our driver of memory:// alone",)),
    ],
)
def test_the_limit_is_that_of_a_client_of_others(
    root: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    """Where there is one; else our driver is, and the name says so. All of it is written, and read,
    and deleted again."""
    tried: list[str] = []
    place = join(parse(f"{root}{tmp_path}"), "place")
    limit = limit_of(place, 5 * MIB + 1, say=tried.append)
    assert limit.writing.name.startswith(said)
    assert limit.reading.name.startswith(said)
    assert limit.nbytes >= 5 * MIB + 1
    assert bool(tried) == (not root.startswith("memory"))
    limit.write()
    limit.prepare()
    limit.read()
    if "file" in root:
        stored = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert stored >= 5 * MIB + 1
    limit.remove()
    limit.remove()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_raw_file_that_is_too_short_is_no_limit(tmp_path: Path) -> None:
    """A read of what is not there must not look fast."""
    raw = RawFile(tmp_path / "raw", 3 * MIB)
    raw.write()
    assert raw.path.stat().st_size == 3 * MIB
    with pytest.raises(OSError, match="at once"):
        replace(raw, nbytes=4 * MIB).read()


@dataclass(frozen=True)
class Sleeper:
    """A client whose settings take so long, and that tells what it is asked for."""

    name: str
    takes_s: float
    nbytes: int = 1 << 40
    stored: object = None
    done: list[str] = field(default_factory=list)

    def at_size(self, nbytes: int) -> Sleeper:
        """The same list of what was done."""
        return replace(self, nbytes=nbytes)

    def write(self) -> None:
        """Note the size."""
        self.done.append(f"write {self.nbytes // MIB}")
        time.sleep(self.takes_s)

    def read(self) -> None:
        """Note it."""
        self.done.append("read")
        time.sleep(self.takes_s)

    def remove(self) -> None:
        """Note it."""
        self.done.append("remove")


def test_the_fastest_setting_is_taken_at_its_full_size() -> None:
    """And tried at a reduced one; writers leave nothing."""
    settings = [Sleeper("a", 0.03), Sleeper("b", 0.001), Sleeper("c", 0.03)]
    best = fastest_writer(settings, settle_s=0.0, say=lambda line: None)
    assert (best.name, best.nbytes) == ("b", 1 << 40)
    assert settings[0].done == ["write 16", "remove", "write 256", "remove"]
    assert settings[1].done == ["write 256", "remove"]


def test_readers_read_cold_and_what_they_can_read() -> None:
    """One write serves all settings that store alike, and another those that do not."""
    seen: list[str] = []
    settings = [
        Sleeper("a", 0.03, stored=4, done=seen),
        Sleeper("b", 0.001, stored=4, done=seen),
        Sleeper("c", 0.03, stored=8, done=seen),
    ]
    best = fastest_reader(
        settings, settle_s=0.0, make_cold=lambda: seen.append("cold"), say=lambda line: None
    )
    assert best.name == "b"
    assert seen[2:-3] == [
        *("write 256", "cold", "read"),
        *("cold", "read"),
        *("write 256", "cold", "read"),
    ]


def test_a_sweep_of_a_slow_storage_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes are tried, and no more settings once the time is over; one is always taken."""
    monkeypatch.setattr("holdfast.bench.limit.sweep.SWEEP_S", 0.05)
    settings = [Sleeper("a", 0.03), Sleeper("b", 0.03), Sleeper("c", 0.0)]
    best = fastest_writer(settings, settle_s=0.0, say=lambda line: None)
    assert best.name in ("a", "b")
    assert settings[0].done == ["write 16", "remove", "write 16", "remove"]
    assert settings[2].done == []


def test_ratios_are_taken_within_rounds() -> None:
    """What slows both at once says nothing; the interval is the same each time."""
    a, b = [2.0, 20.0, 2.0, 4.4, 2.0], [1.0, 10.0, 1.0, 2.0, 1.0]
    assert median_ratio(a, b) == 2.0
    pairs = of_pairs(a, b)
    assert pairs == of_pairs(a, b)
    assert (pairs.ratio, pairs.low, pairs.high) == (2.0, 2.0, 2.2)
    medians = of_medians(a, b)
    assert medians.ratio == 2.0
    assert medians.low < 1
    assert medians.high > 4
    with pytest.raises(ValueError, match="shorter"):
        of_pairs(a, b[:3])
