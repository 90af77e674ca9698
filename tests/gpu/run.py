"""Runs the tests of tests/gpu and the benchmark ``holdfast.bench.gpu`` on a bare machine with one
GPU: nothing of Holdfast is installed there, and there is no network.

    python3 tests/gpu/run.py [--out FOLDER] [--tiny] [--no-bench] [--device cpu]

The repository becomes importable as ``holdfast`` by a link in a temporary folder. Packages that the
interpreter lacks come from the wheels in ``wheels/`` (``make gpu-wheels`` fetches them). Built-in
drivers are found without installed metadata. Without a GPU it says so in one line, and ends with 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "torch": "holds the tensors",
    "numpy": "holds the tables",
    "xxhash": "computes every digest",
    "pytest": "runs the tests",
}
TESTS_S = 300
BENCH_S = 240
"""Limits of the two parts: the whole run stays below ten minutes."""


def main() -> int:
    """Return 0 where all passed, or where there is no GPU."""
    given = _arguments()
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
                    "`make gpu-wheels`, with a network, fetches xxhash into wheels/.",
                    file=sys.stderr,
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
    # To try the mechanics where there is no GPU.
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _unpacked(wheels: Path, to: Path) -> list[str]:
    """Unpack the wheels: a wheel without scripts is a folder of packages, and none of ours has
    any data files elsewhere, so pip is not needed."""
    found = sorted(wheels.glob("*.whl"))
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
    return [str(to)] if found else []


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
    tests = [
        *(sys.executable, "-m", "pytest", "-c", str(ROOT / "tests/gpu/pytest.ini")),
        *("-p", "no:cacheprovider", str(ROOT / "tests/gpu"), f"--junitxml={out / 'tests.xml'}"),
    ]
    codes = [_part("tests", tests, environment, TESTS_S)]
    if not given.no_bench:
        bench = [
            *(sys.executable, "-m", "holdfast.bench.gpu", "--device", given.device),
            *("--json", str(out / "bench.json"), "--dir", str(out)),
            *(["--tiny"] if given.tiny else []),
        ]
        codes.append(_part("benchmark", bench, environment, BENCH_S))
    print(f"make gpu: results are in {out}")
    return max(codes)


def _part(name: str, command: list[str], environment: dict[str, str], limit_s: float) -> int:
    print(f"== {name}", flush=True)
    try:
        return subprocess.run(
            command, env=environment, cwd=ROOT, timeout=limit_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"make gpu: the {name} took more than {limit_s:g} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
