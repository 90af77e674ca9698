"""Fuzz the targets of ``tests/support/fuzzed.py`` with atheris.

Usage: ``run.py [TARGET|all] [SECONDS] [FOLDER]``, or ``run.py TARGET FILE``.

``all`` gives each target its share of the seconds, in its own process. Print the number of inputs
of each target, and exit with 0 if no input failed. Failing inputs are kept in FOLDER (default: a
new one), to be run again as FILE.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

# The parent of all only counts.
with (
    nullcontext()
    if sys.argv[1:2] in ([], ["all"])
    else atheris.instrument_imports(["holdfast", "support.fuzzed"])
):
    from support.fuzzed import TARGETS, seeds


def fuzz(target: str, seconds: float, found: Path) -> None:
    """Fuzz until the time is over or an input fails; end the process."""
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(target)):
            Path(corpus, str(number)).write_bytes(seed)
        limits = [f"-max_total_time={max(1, round(seconds))}", "-timeout=20"]
        limits += ["-rss_limit_mb=4096", "-max_len=8192"]
        more = [f"-artifact_prefix={found}/{target}-", "-print_final_stats=1", corpus]
        atheris.Setup([sys.argv[0], *limits, *more], lambda data: TARGETS[target](data) and None)
        atheris.Fuzz()


def fuzz_all(seconds: float, found: Path) -> bool:
    """Fuzz every target; return True if no input failed."""
    good = True
    for target in TARGETS:
        command = [sys.executable, __file__, target, str(seconds / len(TARGETS)), str(found)]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        inputs = re.search(r"number_of_executed_units:\s+(\d+)", ran.stderr)
        good = good and ran.returncode == 0 and inputs is not None
        failure = f"failed, see {found}\n{ran.stderr[-4000:]}"
        state = "nothing found" if ran.returncode == 0 else failure
        print(f"{target}: {inputs[1] if inputs else 0} inputs, {state}", flush=True)
    return good


def main(target: str = "all", seconds: str = "60", folder: str | None = None) -> None:
    """Run the command; see the module."""
    if Path(seconds).is_file():
        TARGETS[target](Path(seconds).read_bytes())
        return
    found = Path(folder or tempfile.mkdtemp(prefix="fuzz-"))
    found.mkdir(parents=True, exist_ok=True)
    if target == "all":
        sys.exit(not fuzz_all(float(seconds), found))
    fuzz(target, float(seconds), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
