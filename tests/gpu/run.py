"""Runs the tests of tests/gpu and the benchmark ``holdfast.bench.gpu`` on a bare machine with one
GPU. Holdfast is not installed there, and there is no network.

    python3 tests/gpu/run.py [--out FOLDER] [--tiny] [--no-bench] [--device cpu]

The repository becomes importable as ``holdfast`` by a link in a temporary folder. Packages that the
interpreter lacks come from the wheels in ``wheels/`` (``make gpu-wheels`` fetches them). Built-in
drivers are found without installed metadata. Without a GPU it says so in one line, and ends with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "torch": "holds the tensors",
    "numpy": "holds the tables",
    "xxhash": "computes every digest",
    "pytest": "runs the tests",
}
TESTS_S = 320.0
FILE_S = 150.0
BENCH_S = 220.0
"""Limits of all tests, of one file of tests and of the benchmark: the whole run stays below ten
minutes, and a file that hangs leaves time for the others."""
INTERRUPTED_S = 10.0
"""Time for an interrupted part to write its results."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that schedulers and closed terminals send to end a process."""


def main() -> int:
    """Return 0 if all tests passed or the host has no GPU, and 130 if interrupted."""
    given = _arguments()
    interrupt_on_signals()
    try:
        return _run_all(given)
    except KeyboardInterrupt:
        print("make gpu: interrupted", file=sys.stderr)
        return 130


def interrupt_on_signals() -> None:
    """Treat :data:`ENDING` as a Ctrl-C.

    Without a handler these signals would end this process alone and leave its child running.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # A shell has its background jobs ignore SIGINT, and parts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in ENDING:
        if signal.getsignal(signum) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(signum, interrupt)


def _run_all(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder, *_unpacked(ROOT / "wheels", Path(folder) / "wheels")]
        sys.path[1:1] = paths
        if given.device == "cuda" and (reason := _no_gpu()):
            print(f"make gpu: no GPU here ({reason}); nothing was run")
            return 0
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            for name in missing:
                print(f"make gpu: {name} is missing, which {NEEDED[name]}", file=sys.stderr)
            print(
                "`make gpu-wheels`, with a network, fetches xxhash into wheels/.", file=sys.stderr
            )
            return 2
        (Path(folder) / "holdfast").symlink_to(ROOT)
        return _run(given, paths)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="where the results go"
    )
    parser.add_argument("--tiny", action="store_true", help="the benchmark in its smallest size")
    parser.add_argument("--no-bench", action="store_true", help="only the tests")
    # For trying the script on a host without a GPU.
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _unpacked(wheels: Path, to: Path) -> list[str]:
    """Unpack the wheels of packages that this interpreter lacks. A wheel without scripts is a
    folder of packages, and none of ours has any data files elsewhere, so pip is not needed."""
    found = [wheel for wheel in sorted(wheels.glob("*.whl")) if _is_wanted(wheel.name)]
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
    return [str(to)] if found else []


def _is_wanted(wheel: str) -> bool:
    """Return whether the wheel of this file name fits this interpreter, and is needed."""
    package, _, python, abi = wheel.split("-")[:4]
    fits = abi == "abi3" or python == f"cp{sys.version_info.major}{sys.version_info.minor}"
    return fits and importlib.util.find_spec(package) is None


def _no_gpu() -> str:
    """Return why no GPU can be used, or nothing."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _run(given: argparse.Namespace, paths: list[str]) -> int:
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("PYTHONPATH")
    paths = [*paths, *([before] if before else [])]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("HOLDFAST_")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HOLDFAST_CONFIG": ""}
    # The current folder stays off the path, or every room would be there twice.
    environment |= {"PYTHONSAFEPATH": "1", "HOLDFAST_TEST_DEVICE": given.device}
    began_s = time.monotonic()
    passed = True
    for path in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        # A process for each file: one that hangs or crashes takes no other file's results along.
        tests = [
            *(sys.executable, "-m", "pytest", "-c", str(ROOT / "tests/gpu/pytest.ini"), "-v"),
            *("-p", "no:cacheprovider", str(path), f"--junitxml={out / path.stem}.xml"),
        ]
        left_s = began_s + TESTS_S - time.monotonic()
        passed &= run_part(path.stem, tests, environment, max(0.0, min(FILE_S, left_s)))
    if not given.no_bench:
        bench = [
            *(sys.executable, "-m", "holdfast.bench.gpu", "--device", given.device),
            *("--json", str(out / "bench.json"), "--dir", str(out)),
            *(["--tiny"] if given.tiny else []),
        ]
        passed &= run_part("benchmark", bench, environment, BENCH_S)
    print(f"make gpu: results are in {out}")
    return 0 if passed else 1


def run_part(
    name: str, command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> bool:
    """Run ``command``, and return whether it ended with 0 in time. No process of its group is left
    afterwards."""
    print(f"== {name}", flush=True)
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"make gpu: {name} took more than {limit_s:.0f} s", file=sys.stderr)
        return False
    finally:
        _end(process)
    if code < 0:
        print(f"make gpu: {name} was killed by signal {-code}", file=sys.stderr)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process that still runs, so that pytest writes its results; kill its group."""
    try:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
