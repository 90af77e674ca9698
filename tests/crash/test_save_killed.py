"""kill -9 of a process that saves: afterwards there is one whole checkpoint, and the next save cleans up."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.bits import difference
from support.victims import save_and_die_at, save_until_killed, spawned, state_of_step

import holdfast
from holdfast.storage import commit

WAIT_S = 60.0


def check(uri: Path, allowed: set[int]) -> int:
    """There is a whole checkpoint, of one of these steps; return which."""
    found = holdfast.load(uri)
    assert found["step"] in allowed
    assert difference(state_of_step(found["step"]), found) is None
    with holdfast.open(uri) as c:
        assert c.verify().ok
    return int(found["step"])


def files(uri: Path) -> list[str]:
    """Everything that is there, folders too; the attempt's name left out."""
    current = holdfast.open(uri).attempt
    return sorted(str(p.relative_to(uri)).replace(current, "<attempt>") for p in uri.rglob("*"))


CLEAN = ["data", *(f"data/<attempt>{name}" for name in ("", "/0.safetensors", "/attempt.json", "/fate")), "manifest.safetensors"]


def left_after_a_save(uri: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> set[str]:
    """What a save leaves behind, besides itself and what was about to be committed; and what the next one leaves when the
    grace period of that is over. File names only."""
    holdfast.save(uri, state_of_step(step))
    current = holdfast.open(uri).attempt
    claimed = {p.name for p in (uri / "data").iterdir() if (p / "fate").exists() and (p / "fate").read_bytes() == b"commit"}
    there = [p.relative_to(uri) for p in uri.rglob("*")]
    left = {str(p) for p in there if p.parts[0] != "data" or (len(p.parts) > 1 and p.parts[1] not in {current, *claimed})}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "GRACE_S", -1.0)
        holdfast.save(uri, state_of_step(step))
    check(uri, {step})
    return (left - {"manifest.safetensors"}) | (set(files(uri)) - set(CLEAN))


def test_a_save_killed_before_any_of_its_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call that changes the file system it does not get to: the checkpoint is the old one or the new one, whole;
    the next save works, and leaves nothing but itself."""
    seen, left = set(), {}
    at = 0
    while True:
        at += 1
        uri = tmp_path / str(at)
        holdfast.save(uri, state_of_step(1000 + at))
        process, pipe = spawned(save_and_die_at, str(uri), 2000 + at, at)
        process.join(WAIT_S)
        if process.exitcode == 0:
            calls = pipe.recv()
            break
        assert process.exitcode == -9
        seen.add(check(uri, {1000 + at, 2000 + at}) >= 2000)
        left[at] = left_after_a_save(uri, monkeypatch, 3000 + at)
    assert calls < at
    assert at > 15
    assert seen == {False, True}
    assert {at: names for at, names in left.items() if names} == {}


def test_saves_killed_at_random_moments(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times: what is there is what was committed last, or the one that was about to be."""
    rng = random.Random(seed)
    uri = tmp_path / "c"
    holdfast.save(uri, state_of_step(0))
    step = 0
    for _ in range(20):
        process, pipe = spawned(save_until_killed, str(uri), step + 1)
        assert pipe.poll(WAIT_S)
        time.sleep(rng.random() * 0.15)
        process.kill()
        process.join(WAIT_S)
        told: list[tuple[str, int]] = []
        drain(pipe, told)
        committed = max([step, *(n for what, n in told if what == "committed")])
        begun = max(n for what, n in told if what == "begin")
        assert begun <= committed + 1
        step = check(uri, {committed, begun})
    assert left_after_a_save(uri, monkeypatch, step) == set()


def drain(pipe: Any, into: list[tuple[str, int]]) -> None:
    """All that a dead process said."""
    try:
        while pipe.poll(1):
            into.append(pipe.recv())
    except EOFError:
        return
