"""Small files that ask for much: refused, or read, within a gibibyte and in seconds; and never a
crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bombs import BOMBS

import holdfast
from holdfast.drivers import contract
from holdfast.drivers.local.driver import LocalDriver
from holdfast.planner.coverage import ROUNDS_MAX, flawed
from holdfast.storage.format import columns
from holdfast.storage.format.tree import Container, Tree
from holdfast.storage.runtime.engine import start

TESTS = Path(__file__).parents[1]
DEADLINE_S = 110
GROWN_NBYTES_MAX = 512 << 20
HARMLESS = {
    "a run of 2^30 items",
    "five thousand owners",
    "a world of 2^60 ranks",
    "image of a terabyte",
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each bomb ended, by name; one that took the process down has no ending."""
    folder = tmp_path_factory.mktemp("bombs")
    command = [sys.executable, str(TESTS / "support" / "bombs.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    ended = {line["bomb"]: line for line in lines if "seconds" in line}
    assert ran.returncode == 0, (
        f"{lines[-1:]} ended the process with {ran.returncode}:\n{ran.stderr[-3000:]}"
    )
    return ended


@pytest.mark.nightly(15)
@pytest.mark.parametrize("name", [*BOMBS, "manifest of a terabyte", "image of a terabyte"])
def test_a_bomb_is_an_error_of_ours_within_bounds(
    name: str, endings: dict[str, dict[str, Any]]
) -> None:
    """No more than half a gibibyte is taken for it, of a whole one that is allowed."""
    ending = endings[name]
    assert ending["grown_nbytes"] < GROWN_NBYTES_MAX
    assert name in HARMLESS or ending["raised"]
    assert set(ending["raised"]) <= {
        "DamagedError",
        "UnsupportedFormatError",
        "UsageError",
        "MismatchError",
    }


def test_an_object_that_is_not_small_is_not_got(tmp_path: Path) -> None:
    """However a file came to be that large: it is refused by its size, before a byte is read."""
    (tmp_path / "o").touch()
    os.truncate(tmp_path / "o", contract.SMALL_NBYTES_MAX + 1)
    driver = LocalDriver(tmp_path)
    try:
        with pytest.raises(holdfast.DamagedError, match="4,294,967,296") as caught:
            start(driver.get("o")).result()
        assert caught.value.key == "o"
    finally:
        start(driver.close()).result()


def test_what_no_reader_would_accept_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state whose containers have names too long, all together, is refused when it is saved, not
    when it is loaded."""
    tree = Tree([Container(-1, None, "dict"), Container(0, "k" * (1 << 20), "dict")])
    tree.containers += [Container(1, str(n), "dict") for n in range(100)]
    assert tree.paths_too_long
    state = {"k" * (1 << 20): {str(n): {"x": 1} for n in range(100)}}
    with pytest.raises(holdfast.SaveError, match="shorter keys"):
        holdfast.save("memory://too-long", state)
    monkeypatch.setattr(columns, "HEADER_NBYTES_MAX", 1 << 20)
    with pytest.raises(holdfast.SaveError, match="as JSON"):
        holdfast.save("memory://too-large", {"x": "x" * (1 << 20)})


def test_boxes_that_are_peeled_off_one_by_one_are_judged_right() -> None:
    """Such a tiling takes a round of cuts for every two boxes; beyond a limit the rest is counted,
    to the same end."""
    n = 4 * ROUNDS_MAX
    low, size, offsets, lengths = np.zeros(2, np.int64), np.full(2, n), [], []
    for i in range(n - 1):
        slab = size - low
        slab[i % 2] = 1
        offsets.append(low.copy())
        lengths.append(slab)
        low[i % 2] += 1
    offsets.append(low)
    lengths.append(size - low)
    shape, tensor = np.array([[n, n]]), np.zeros(n, np.int64)
    assert not flawed(shape, tensor, np.array(offsets), np.array(lengths))[0]
    offsets[n - 10] = offsets[n - 10] - [0, 1]
    assert flawed(shape, tensor, np.array(offsets), np.array(lengths))[0]
