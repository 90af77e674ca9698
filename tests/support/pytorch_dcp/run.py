"""Runs the DCP tests of PyTorch's repository with DCP's own writer and reader, and with ours.

    make torch-dcp PYTORCH=~/pytorch

No package contains these tests: take them from a checkout of PyTorch's repository, at the tag of the
installed torch. They need ``pip install expecttest``. Prints the tests with other outcomes through
ours; exits with 1 if there are any.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)", re.MULTILINE)
TIMEOUT_S = 900


def outcomes(file: Path, *, ours: bool) -> dict[str, str]:
    """Return the outcome of each test in ``file`` that is not skipped."""
    path = [os.environ.get("PYTHONPATH", "")]
    if ours:
        path.insert(0, str(Path(__file__).parent))
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rA",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            file.name,
        ],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ended.returncode not in (0, 1, 5):  # 5: no tests
        return {f"{file.name}: {(ended.stdout + ended.stderr).strip()[-300:]}": "ERROR"}
    return {name: outcome for outcome, name in OUTCOME.findall(ended.stdout)}


def main() -> None:
    """Compare the outcomes of all files below a folder that use DCP's own writer or reader."""
    files = [
        path
        for path in sorted(Path(sys.argv[1]).rglob("test_*.py"))
        if re.search(r"FileSystem(?:Writer|Reader)", path.read_text())
    ]
    unlike, totals = 0, {"stock": Counter[str](), "ours": Counter[str]()}
    for file in files:
        stock, ours = (outcomes(file, ours=door) for door in (False, True))
        totals["stock"].update(stock.values())
        totals["ours"].update(ours.values())
        for name in sorted(stock.keys() | ours.keys()):
            if stock.get(name) != ours.get(name):
                unlike += 1
                print(f"{name}: {stock.get(name)} with DCP's own, {ours.get(name)} with ours")
    for door, counts in totals.items():
        print(f"{door}: {dict(counts)} in {len(files)} files")
    sys.exit(not files or unlike > 0)


if __name__ == "__main__":
    main()
