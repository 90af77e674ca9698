"""fio beside the limit: its report, refusals, and a real run where it is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.bench.contest import Contestant, blamed
from holdfast.bench.limit.fio import Fio, fio_seconds
from holdfast.bench.limit.raw_file import RawFile
from holdfast.bench.measured.result import Measurement, Phase
from holdfast.bench.peers.choice import asks_for_fio, chosen
from holdfast.cli import app
from holdfast.drivers.uri import parse
from holdfast.errors import FullError, StorageError, UsageError

MIB = 1 << 20
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
REPORT = """fio: this platform does not support something
{"fio version": "fio-3.33", "jobs": [{"jobname": "write", "error": 0,
 "read": {"io_bytes": 0, "bw_bytes": 0, "runtime": 0},
 "write": {"io_bytes": 8388608, "bw_bytes": 33554432, "runtime": 250}}]}"""


def test_the_seconds_of_a_report() -> None:
    """Take the seconds of writing; skip the warning before the JSON."""
    assert fio_seconds(REPORT, "write", 8 * MIB) == 0.25


@pytest.mark.parametrize(
    ("text", "nbytes", "said"),
    [
        (REPORT, 9 * MIB, "fio moved 8,388,608 bytes of 9,437,184"),
        (REPORT.replace('"error": 0', '"error": 5'), 8 * MIB, "fio moved"),
        (REPORT.replace("runtime", "run"), 8 * MIB, "cannot be read"),
        (REPORT.replace("[{", "[{},{"), 8 * MIB, "cannot be read"),
        (REPORT[:-1], 8 * MIB, "cannot be read"),
        ("", 8 * MIB, "cannot be read"),
    ],
)
def test_a_report_of_something_else_is_refused(text: str, nbytes: int, said: str) -> None:
    """An error, a short run, a cut report."""
    with pytest.raises(OSError, match=said):
        fio_seconds(text, "write", nbytes)


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("nbytes", [4096, MIB + 1, 128 * MIB, 128 * MIB + 1, 1000 * MIB + 4097])
def test_it_moves_as_much_as_the_limit(nbytes: int, threads: int) -> None:
    """Up to some pages, in blocks of no more than 16 MiB."""
    fio = Fio(RawFile(Path("f"), nbytes, threads))
    blocks = -(-fio.nbytes // (16 * MIB))
    assert 0 <= fio.nbytes - nbytes < 4096 * threads * max(blocks, 1)


def test_it_is_held_against_the_limit() -> None:
    """Its row says which part of the limit's rate it reached, by the bytes of each."""
    phases = (Phase("write limit", 100, (1.0,)), Phase("fio write", 110, (2.0,)))
    assert Measurement("file:///x", 0.0, {}, {}, phases).share("fio write") == pytest.approx(0.55)


def test_where_it_cannot_be_measured_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, with the package that is missing, and before anything is written. "all" leaves it
    out."""
    with pytest.raises(UsageError, match="fio cannot be measured on s3://"):
        asks_for_fio("dcp,fio", parse("s3://b/x"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not asks_for_fio("all", parse(tmp_path))
    assert app.run(["bench", str(tmp_path), "--size", "1MiB", "--peer", "torchsave, fio"]) == 2
    said = capsys.readouterr().err
    assert "fio is not installed" in said
    assert "apt install fio" in said
    assert list(tmp_path.iterdir()) == []


@needs_fio
def test_it_is_named_beside_peers(tmp_path: Path) -> None:
    """Choose it by name or by "all", and never as one of the peers."""
    assert asks_for_fio("torchsave, fio", parse(tmp_path))
    assert asks_for_fio("all", parse(tmp_path))
    assert not asks_for_fio("torchsave", parse(tmp_path))
    assert [peer.key for peer in chosen("fio, torchsave,fio", parse(tmp_path))] == ["torchsave"]


@needs_fio
@pytest.mark.parametrize("preallocate", [False, True])
def test_it_writes_and_reads_a_file(tmp_path: Path, preallocate: bool) -> None:
    """In a folder whose name holds a colon, which fio takes for a separator."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    fio = Fio(RawFile(folder / "file", 3 * MIB + 5, 4, preallocate))
    assert 0 < fio.write() < 60
    assert [path.stat().st_size for path in folder.iterdir()] == [fio.nbytes]
    assert 0 < fio.read() < 60
    fio.remove()
    assert list(folder.iterdir()) == []


@needs_fio
def test_it_says_why_it_fails() -> None:
    """Where no file can be made."""
    with pytest.raises(OSError, match="error=No such file or directory"):
        Fio(RawFile(Path("/proc/self/file"), MIB, 4)).try_out()


FAKE_FIO = """#!{python} -IS
import json, pathlib, sys
given = dict(each.lstrip("-").partition("=")[::2] for each in sys.argv[1:])
calls = pathlib.Path({calls!r})
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if len(calls.read_text()) > 4:
    sys.exit("fio: io error on the device")
pathlib.Path(given["filename"]).touch()
moved = int(given["size"]) * int(given["numjobs"])
job = {{"error": 0, given["rw"]: {{"io_bytes": moved, "runtime": 1}}}}
print(json.dumps({{"jobs": [job]}}))
"""


def test_it_fails_in_mid_contest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names it and its last words, without a traceback, and deletes its folder."""
    program, folder = tmp_path / "bin" / "fio", tmp_path / "scratch"
    program.parent.mkdir()
    calls = str(tmp_path / "calls")
    program.write_text(FAKE_FIO.format(python=sys.executable, calls=calls))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    arguments = ["bench", str(folder), "--size", "1MiB", "--runs", "1", "--peer", "fio"]
    assert app.run(arguments) == 2
    said = capsys.readouterr().err
    assert "fio write failed: fio ended with 1: fio: io error on the device" in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("step", ["before", "run", "after"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "save: torch failed: .*No space left on device"),
        (RuntimeError("first\nlast"), "save: torch failed: last"),
        (KeyError(), "save: torch failed: KeyError"),
    ],
)
def test_errors_of_other_programs_name_them(step: str, error: Exception, said: str) -> None:
    """Whatever they raise, in each of their steps."""

    def fail() -> None:
        raise error

    contestant = Contestant("save: torch", **{"run": lambda: None, step: fail})
    with pytest.raises(StorageError, match=said) as caught:
        getattr(blamed(contestant, parse("memory://x")), step)()
    assert caught.value.__cause__ is error
    assert caught.value.uri == "memory://x"


@pytest.mark.parametrize("error", [FullError("no space"), KeyboardInterrupt()])
def test_our_own_errors_stay_as_they_are(error: BaseException) -> None:
    """They say all that there is to say."""

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        blamed(Contestant("write alone", fail), parse("memory://x")).run()
    assert caught.value is error
