"""The code in the documents: blocks of Python run, and calls of the command are parsed."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.commands import finished
from support.documents import (
    EXCERPT,
    ROOT,
    Block,
    commands_in,
    documents,
    holdfast_calls,
    python_blocks,
)
from support.simulation.breaking import Broken
from support.simulation.broken_channels import BROKEN_CHANNELS
from support.simulation.broken_keepers import BROKEN_ALONE, BROKEN_HOSTS
from support.simulation.channel_truth import Truth
from support.simulation.channels import Engine, Job
from support.simulation.keeper_hosts import Hosts

from holdfast.cli.app import command_parser
from holdfast.cli.catalog import COMMANDS

TEXTS = {page: (ROOT / page).read_text() for page in documents()}
BLOCKS = {page: found for page, text in TEXTS.items() if (found := python_blocks(text))}

RUN_ELSEWHERE = {
    "docs/how-to/serve-from-a-checkpoint.md": "tests/frameworks/test_serving.py",
    "docs/how-to/update-vllm-and-sglang.md": "tests/unit/test_engines.py",
    "docs/how-to/use-with-accelerate.md": "tests/frameworks/test_accelerate.py",
    "docs/how-to/use-with-hugging-face.md": "tests/frameworks/test_transformers.py",
    "docs/how-to/use-with-lightning.md": "tests/frameworks/test_lightning.py",
    "docs/how-to/use-with-megatron.md": "tests/frameworks/test_megatron.py",
    "docs/how-to/use-with-ray-train.md": "tests/frameworks/test_ray.py",
    "docs/how-to/use-with-torch-checkpointing.md": "tests/frameworks/test_torch_checkpointing.py",
    "docs/how-to/use-with-torchtitan.md": "tests/frameworks/test_torchtitan.py",
}
"""Pages whose blocks run under the framework that they are about, and the tests that run them."""

HERE = sorted(BLOCKS.keys() - RUN_ELSEWHERE)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the problems found in each page's session, all in one process, and in ``wrong``."""
    folder = tmp_path_factory.mktemp("documents")
    page = folder / "page.md"
    page.write_text(WRONG)
    wrong = os.path.relpath(page, ROOT)
    found = run_sessions(folder / "sessions", [*HERE, wrong])
    return {**found, "wrong": found[wrong]}


WRONG = """# Page

```python
report = holdfast.save(uri, state)
```

<!-- run twice -->
```python
assert report.nbytes == 0
```
"""


def run_sessions(folder: Path, pages: list[str]) -> dict[str, str]:
    """Run pages in a process of its own; what went wrong in each."""
    program = ROOT / "tests/support/document_sessions.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-P", program, folder, *pages]
    done = finished(command, env=environment, timeout_s=110)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("page", HERE)
def test_blocks_of_python_run(page: str, problems: dict[str, str]) -> None:
    """Each page is one session, in an empty folder, with its blocks in their order."""
    assert problems[page] == ""


def test_a_wrong_block_fails(problems: dict[str, str]) -> None:
    """A block that assumes a wrong result fails its page, with the line of the document."""
    assert "AssertionError" in problems["wrong"]
    assert 'page.md.py", line 9' in problems["wrong"]


@pytest.mark.parametrize("page", sorted(RUN_ELSEWHERE))
def test_pages_about_frameworks_run_there(page: str) -> None:
    """The test that is named for a page takes its blocks from the page."""
    assert f'"{Path(page).name}"' in (ROOT / RUN_ELSEWHERE[page]).read_text()


@pytest.mark.parametrize(
    ("page", "checking", "broken"),
    [
        ("keeper-protocol", (Hosts,), (*BROKEN_ALONE, *BROKEN_HOSTS)),
        ("weight-channels", (Truth, Engine, Job), BROKEN_CHANNELS),
    ],
)
def test_promises_name_their_guards(
    page: str, checking: Sequence[type], broken: Sequence[Broken]
) -> None:
    """Each promise names checks of the simulator, and broken engines."""
    _, _, proofs = TEXTS[f"docs/explanation/{page}.md"].partition("## Promises and proofs")
    rows = [line for line in proofs.splitlines() if line.startswith("| ")][1:]
    guards = [row.split("|")[3] for row in rows]
    known = {one.name for one in broken}
    assert len(guards) > 10
    for guard in guards:
        checks, names = re.findall(r"`(\w+)`", guard), re.findall(r'"(.+?)"', guard)
        assert checks
        assert names
        assert all(any(hasattr(one, check) for one in checking) for check in checks)
        assert set(names) <= known


EXCERPTS = [
    pytest.param(block, id=f"{page}:{number}")
    for page, blocks in BLOCKS.items()
    for number, block in enumerate(blocks)
    if (block.reason or "").startswith(EXCERPT)
]


@pytest.mark.parametrize("block", EXCERPTS)
def test_excerpts_are_in_their_files(block: Block) -> None:
    """Every line of an excerpt is in its file, however formatted; ``...`` marks omitted lines."""
    folder = ROOT / (block.reason or "").removeprefix(EXCERPT)
    known = {line for file in folder.rglob("*.py") for line in unparsed(file.read_text())}
    assert known
    assert [line for line in unparsed(block.code) if "..." not in line and line not in known] == []


def unparsed(code: str) -> list[str]:
    """Return the lines of code in a normal form, without comments and indentation."""
    return list(map(str.strip, ast.unparse(ast.parse(code)).splitlines()))


@pytest.mark.parametrize("page", sorted(page for page in TEXTS if any(commands_in(TEXTS[page]))))
def test_calls_of_the_command_are_parsed(page: str) -> None:
    """Each ``holdfast …`` in a block of a document is a call that the command takes."""
    for number, line in commands_in(TEXTS[page]):
        for call in holdfast_calls(line):
            assert fault_of(call) == "", f"{page}:{number}: {line}"


def fault_of(call: list[str]) -> str:
    """Return the parser's error for a command line, "" if it is accepted."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            command_parser().parse_args(call)
        except SystemExit:
            return said.getvalue() or "it answers without doing anything"
    return ""


def test_calls_are_found_and_refused() -> None:
    """A call that the command does not take is seen, behind a pipe and in a prompt, too."""
    text = "    $ holdfast ls run | head && holdfast ls --wrong run > out  # twice\n\nholdfast is\n"
    ((number, line),) = commands_in(text)
    first, second = holdfast_calls(line)
    assert number == 1
    assert fault_of(first) == ""
    assert "--wrong" in fault_of(second)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_help_has_examples(command: str) -> None:
    """Each help has 80 columns, and ends with valid examples and the meanings of its status."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            command_parser().parse_args([*command.split(), "--help"])
    text = out.getvalue()
    assert [line for line in text.splitlines() if len(line) > 80] == []
    _, _, ending = text.partition("\nexamples:\n")
    examples, _, statuses = ending.partition("\nexit status:\n")
    calls = [line.strip() for line in examples.splitlines() if line.startswith("  holdfast ")]
    assert calls
    assert [line for line in calls for call in holdfast_calls(line) if fault_of(call)] == []
    assert {line.split()[0] for line in statuses.splitlines()} >= {"0", "2", "3"}


# The notebook among the examples


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
