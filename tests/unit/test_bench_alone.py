"""A driver alone: ``holdfast bench URI --workload raw`` and ``meta``."""

from __future__ import annotations

import csv
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.bench.alone.grid import Point, grid
from holdfast.bench.alone.meta import META_OPERATIONS
from holdfast.bench.alone.plan import MetaPlan, RawPlan, check_meta, check_raw
from holdfast.bench.alone.result import (
    DriverMeasurement,
    Latency,
    PointResult,
    decoded,
    encoded,
    latency_of,
)
from holdfast.bench.alone.transfer import Memory, Shape, Transfer, parts
from holdfast.bench.measured.result import Measurement, Phase
from holdfast.bench.measured.result import encoded as checkpoints_encoded
from holdfast.cli import app
from holdfast.cli.bench.driver_page import driver_page
from holdfast.drivers.contract import Traits
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.uri import parse
from holdfast.errors import UsageError

MIB = 1 << 20
TRAITS = Traits(
    part_nbytes=16 * MIB,
    part_min_nbytes=1,
    align_nbytes=1,
    concurrency=16,
    coalesce_nbytes=1,
    part_order="ascending",
    exclusive_is_atomic=True,
    shared=True,
)
WRITE = PointResult("write", 4 * MIB, 8, 10**9, (1.0, 2.0, 1.0), latency_of([0.1, 0.2, 0.3]))


def measurement(point: PointResult = WRITE, workload: str = "raw") -> DriverMeasurement:
    """A result of one point."""
    config = {"nbytes": 10**9, "runs": 3, "objects": 1000}
    return DriverMeasurement(
        workload, "file:///x", 1.9e9, config, {"cpu": "2 × x"}, {"write 4MiB × 8": point}
    )


def test_the_grid_is_around_what_the_driver_prefers() -> None:
    """Within its limits: S3 takes no parts below 5 MiB; and a driver that has options for part size
    and concurrency is opened with them."""
    points = grid(S3Driver.OPTIONS, TRAITS, part_sizes=None, concurrencies=None)
    assert [point.name for point in points] == [
        f"{part}MiB × {number}" for part in (8, 16, 64) for number in (1, 16, 64)
    ]
    assert points[0].options == {"part_size": "8MiB", "concurrency": "1"}
    local = grid(LocalDriver.OPTIONS, TRAITS, part_sizes=[MIB], concurrencies=[4, 2])
    assert local == [
        Point(MIB, 2, {"threads": "2"}),
        Point(MIB, 4, {"threads": "4"}),
    ]
    assert [point.options for point in grid({}, TRAITS, part_sizes=[7], concurrencies=[3])] == [{}]


@pytest.mark.parametrize(
    ("part_sizes", "concurrencies", "given", "said"),
    [
        (
            [MIB],
            None,
            (),
            "--part-sizes 1MiB is beyond this storage's limits: its option part_size",
        ),
        (None, [1000], (), "--concurrencies 1000 is beyond"),
        ([8 * MIB], None, ("part_size",), "the URI sets part_size"),
        (None, [4], ("concurrency",), "the URI sets concurrency"),
    ],
)
def test_a_point_that_the_driver_does_not_take_is_refused(
    part_sizes: list[int] | None, concurrencies: list[int] | None, given: tuple[str, ...], said: str
) -> None:
    """By the argument that asked for it, with the driver's own reason."""
    with pytest.raises(UsageError, match=said):
        grid(
            S3Driver.OPTIONS,
            TRAITS,
            part_sizes=part_sizes,
            concurrencies=concurrencies,
            given=given,
        )


def test_what_the_uri_sets_is_not_varied() -> None:
    """The default grid keeps to it."""
    points = grid(
        S3Driver.OPTIONS, TRAITS, part_sizes=None, concurrencies=None, given=["part_size"]
    )
    assert {point.part_nbytes for point in points} == {16 * MIB}
    assert all("part_size" not in point.options for point in points)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("writing", [False, True])
def test_parts_cover_an_object_once(random: bool, writing: bool) -> None:
    """In any order; at random it is another one than in sequence, and always the same."""
    shape = Shape(3 * MIB, 4, random)
    moved = parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing)
    assert parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing) == moved
    ends = [0, *(start + nbytes for start, nbytes in sorted(moved))]
    assert [start for start, _ in sorted(moved)] == ends[:-1]
    assert ends[-1] == 100 * MIB + 5
    assert (moved == sorted(moved)) == (not random and not writing)


def test_an_upload_of_several_streams_gets_all_of_them() -> None:
    """Part after part of each: the first four parts are in four segments."""
    moved = parts(128 * MIB, Shape(16 * MIB, 8), replace(TRAITS, streams=4), writing=True)
    assert [start // MIB for start, _ in moved] == [0, 32, 64, 96, 16, 48, 80, 112]


def test_what_was_written_can_be_read(tmp_path: Path) -> None:
    """Parts of odd sizes, in order and at random: the file has the bytes of the memory, and each
    part has a latency."""
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


def test_parts_in_flight_have_memory_of_their_own() -> None:
    """As long as there is enough of it."""
    memory = Memory(4 * 8192)
    slots = [memory.slot(number, 5000) for number in range(4)]
    for number, slot in enumerate(slots):
        slot[:] = bytes([number]) * 5000
    assert [slot[0] for slot in slots] == [0, 1, 2, 3]
    memory.slot(4, 5000)[:1] = b"x"
    assert slots[0][0] == ord("x")


def test_percentiles_are_times_of_operations() -> None:
    """Each one that something took; the histogram counts them all."""
    found = latency_of([number / 1000 for number in range(1, 101)])
    assert (found.p50_s, found.p90_s, found.p99_s, found.max_s) == (0.05, 0.09, 0.099, 0.1)
    assert found.count == 100


def test_json_comes_back() -> None:
    """With the rate of all rounds together."""
    found = replace(measurement(), invalid={"write 4MiB × 8": ("it drifts",)})
    text = encoded(found)
    assert decoded(text, "x") == found
    document = json.loads(text)
    assert document["points"]["write 4MiB × 8"]["rate"] == 3e9 / 4
    assert document["config_hash"] == found.config_hash
    other = replace(found, workload="meta")
    assert other.config_hash != found.config_hash


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        encoded(measurement()).replace('"version": 1', '"version": 2'),
        encoded(measurement(workload="other")),
        encoded(measurement()).replace("2.0", "0.0"),
    ],
)
def test_what_is_no_result_is_refused(text: str) -> None:
    """By the name of the file."""
    with pytest.raises(UsageError, match="file-name"):
        decoded(text, "file-name")


def test_results_are_compared_with_their_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point by point; a result of another workload is refused by name."""
    a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    steady = replace(WRITE, seconds=(1.0, 1.01, 0.99, 1.0, 1.02))
    slow = replace(WRITE, seconds=tuple(2 * seconds for seconds in steady.seconds))
    a.write_text(encoded(measurement(steady)))
    b.write_text(encoded(measurement(slow)))
    c.write_text(
        checkpoints_encoded(Measurement("file:///x", 1.9e9, {}, {}, (Phase("save", 1, (1.0,)),)))
    )
    assert app.run(["bench", "compare", str(a), str(b), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["slower"] == ["write 4MiB × 8"]
    assert app.run(["bench", "compare", str(a), str(c)]) == 2
    assert "a.json measures raw" in capsys.readouterr().err
    a.write_text(encoded(measurement(workload="meta")))
    assert app.run(["bench", "compare", str(a), str(b)]) == 2
    assert "measures meta" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "raw", "--size", "1KiB"], "too little"),
        (["--workload", "raw", "--runs", "0"], "measure nothing"),
        (["--workload", "raw", "--part-sizes", "much"], "not a size"),
        (["--workload", "raw", "--part-sizes", "0"], "below 1"),
        (["--workload", "raw", "--part-sizes", "2GiB"], "larger than the object"),
        (["--workload", "raw", "--concurrencies", "1,two"], "not a number"),
        (["--workload", "raw", "--concurrencies", "1000"], "beyond this storage's limits"),
        (["--workload", "raw", "--size", "900TiB"], "would be stored"),
        (
            ["--workload", "raw", "--size", "1TiB", "--part-sizes", "8GiB"],
            "of host memory",
        ),
        (["--workload", "meta", "--objects", "0"], "cannot be measured"),
        (["--workload", "meta", "--runs", "0"], "measure nothing"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With status 2."""
    assert app.run(["bench", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    """By objects large or small."""
    uri = f"file://{tmp_path}"
    raw = RawPlan(uri, 4 * MIB, 1, concurrencies=[1])
    with pytest.raises(UsageError, match="would be stored in"):
        check_raw(raw, free=lambda folder: 12 * MIB - 1)
    check_raw(raw, free=lambda folder: 12 * MIB)
    with pytest.raises(UsageError, match="would be stored in"):
        check_meta(MetaPlan(uri, 4096, 1, objects=1000), free=lambda folder: 8_000_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.clocked
@pytest.mark.parametrize("workload", ["raw", "meta"])
def test_a_server_that_is_not_there_is_said_at_once(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, most of which are imports: nothing is tried again."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"s3://bucket/x?endpoint=http://127.0.0.1:{taken.getsockname()[1]}&region=us-east-1"
        assert app.run(["bench", uri, "--workload", workload]) == 2  # what is imported once
        began_s = time.monotonic()
        assert app.run(["bench", uri, "--workload", workload]) == 2
        assert time.monotonic() - began_s < 1


def test_raw_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation at every point, in a document, as lines and as a page; nothing is left."""
    page, lines = tmp_path / "page.html", tmp_path / "lines.csv"
    arguments = ["bench", str(tmp_path / "s"), "--workload", "raw", "--size", "4MiB"]
    arguments += ["--runs", "1", "--part-sizes", "1MiB,2MiB", "--concurrencies", "1,3"]
    assert app.run([*arguments, "--json", "--html", str(page), "--csv", str(lines)]) == 1
    found = decoded(capsys.readouterr().out, "x")
    operations = ("write", "random write", "read", "random read")
    names = [f"{what} {part}MiB × {n}" for what in operations for part in (1, 2) for n in (1, 3)]
    assert list(found.points) == names
    assert [point.latency.count for point in found.points.values()] == [4, 4, 2, 2] * 4
    assert all(point.amount == 4 * MIB for point in found.points.values())
    assert "the object has only 2 parts; give a larger --size" in found.invalid["read 2MiB × 3"]
    assert list((tmp_path / "s").iterdir()) == []
    rows = list(csv.DictReader(lines.read_text().splitlines()))
    assert [float(row["seconds"]) for row in rows] == [p.seconds[0] for p in found.points.values()]
    text = page.read_text()
    assert "INVALID" in text
    assert text.count("<svg") == 4 + len(names)
    assert "<script" not in text


def test_meta_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation once for each object, one at a time and several; nothing is left."""
    uri = f"file://{tmp_path}/s?threads=4"
    arguments = ["bench", uri, "--workload", "meta", "--objects", "20", "--runs", "3"]
    assert app.run([*arguments, "--json"]) in (0, 1)
    found = decoded(capsys.readouterr().out, "x")
    assert list(found.points) == [f"{what} × {n}" for n in (1, 4) for what in META_OPERATIONS]
    for point in found.points.values():
        assert point.latency.count == (3 if point.operation == "list" else 60)
        assert len(point.seconds) == 3
    assert list((tmp_path / "s").iterdir()) == []
    assert app.run(arguments) in (0, 1)
    assert "keys/s" in capsys.readouterr().out


def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a round."""
    # A shell's background jobs, and what they start, ignore the signal unless they are told.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from holdfast.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "bench", tmp_path, "--workload", "raw"]
    command += ["--size", "16MiB", "--runs", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "round 1" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_small_objects_has_no_heat_map() -> None:
    """It has a histogram for each operation."""
    latency = Latency(0.1, 0.1, 0.1, 0.1, latency_of([0.1]).histogram)
    found = measurement(PointResult("stat", 4096, 8, 1000, (1.0,), latency), "meta")
    assert driver_page(found).count("<svg") == 1
