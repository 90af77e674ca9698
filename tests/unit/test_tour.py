"""The notebook among the examples runs, and prints the outputs that it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOUR = Path(__file__).parents[2] / "docs/examples/tour.ipynb"
END = "-- end of the cell --\n"


def test_the_notebook_prints_its_outputs(tmp_path: Path) -> None:
    """All cells run in one process, in order, as in a fresh kernel."""
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4
    script = tmp_path / "tour.py"
    script.write_text(
        "\n".join(f"{''.join(cell['source'])}\nprint({END!r}, end='')" for cell in cells)
    )
    command = [sys.executable, "-W", "error", str(script)]
    run = subprocess.run(
        command,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    shown = ["".join(line for o in cell["outputs"] for line in o["text"]) for cell in cells]
    assert run.stdout.split(END)[:-1] == shown
