"""The notebook among the examples runs, and prints the outputs that it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.commands import finished

TOUR = Path(__file__).parents[2] / "docs/examples/tour.ipynb"
END = "-- end of the cell --\n"


def test_the_notebook_prints_its_outputs(tmp_path: Path) -> None:
    """All cells run in one process, in order, as in a fresh kernel."""
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4
    script = tmp_path / "tour.py"
    sources = [f"{''.join(cell['source'])}\nprint({END!r}, end='')" for cell in cells]
    script.write_text("\n".join(sources))
    command = [sys.executable, "-W", "error", script]
    run = finished(command, env={"TMPDIR": str(tmp_path)}, timeout_s=100)
    assert (run.returncode, run.stderr) == (0, "")
    shown = ["".join(line for o in cell["outputs"] for line in o["text"]) for cell in cells]
    assert run.stdout.split(END)[:-1] == shown
