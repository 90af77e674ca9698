"""kill -9 of a process that saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.aftermath import CLEAN, check, files, some
from support.bits import difference
from support.inside import after_grace
from support.victims import save_against_others, save_and_die_at, spawned, state_of_step

import holdfast

WAIT_S = 60.0
POINTS = 24
"""Number of points, of about sixty. HOLDFAST_TEST_CRASH_POINTS=all tries all."""


def left_after_a_save(uri: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> set[str]:
    """Return the leftovers of a save, apart from attempts that were about to be committed."""
    holdfast.save(uri, state_of_step(step))
    with holdfast.open(uri) as checkpoint:
        current = checkpoint.attempt
    claimed = {
        p.name
        for p in (uri / "data").iterdir()
        if (p / "fate").exists() and (p / "fate").read_bytes().startswith(b"claim ")
    }
    there = [p.relative_to(uri) for p in uri.rglob("*")]
    left = {
        str(p)
        for p in there
        if p.parts[0] != "data" or (len(p.parts) > 1 and p.parts[1] not in {current, *claimed})
    }
    with monkeypatch.context() as patch:
        after_grace(patch)
        holdfast.save(uri, state_of_step(step))
    check(uri, {step})
    return (left - {"manifest.safetensors"}) | (set(files(uri)) - set(CLEAN))


@pytest.fixture(
    scope="module", params=[(None, POINTS), ("lz4", POINTS // 2)], ids=["as it is", "compressed"]
)
def aftermath(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[bool, bool, set[str]]]:
    """Kill a save over a checkpoint before the n-th of its system calls, for many n."""
    compression, points = request.param
    folder, found = tmp_path_factory.mktemp("killed"), {}
    process, pipe = spawned(save_and_die_at, str(folder / "counted"), 1, 0, compression)
    process.join(WAIT_S)
    # A save over a checkpoint makes a few more calls to delete it, so the process may survive the
    # last of these points.
    for at in some(range(1, pipe.recv() + 10), points, POINTS):
        uri = folder / str(at)
        holdfast.save(uri, state_of_step(1000 + at), compression=compression)
        process, pipe = spawned(save_and_die_at, str(uri), 2000 + at, at, compression)
        process.join(WAIT_S)
        if process.exitcode == 0:
            assert pipe.recv() < at
            check(uri, {2000 + at})
            continue
        assert process.exitcode == -9
        committed = pipe.recv()
        new = check(uri, {1000 + at, 2000 + at}) >= 2000
        with pytest.MonkeyPatch.context() as patch:
            found[at] = (new, committed, left_after_a_save(uri, patch, 3000 + at))
    return found


def test_a_save_killed_before_any_of_its_system_calls_leaves_a_whole_checkpoint(
    aftermath: dict[int, tuple[bool, bool, set[str]]],
) -> None:
    """It is the old one until the rename of the manifest, and the new one from then on."""
    found = {at: new for at, (new, _, _) in aftermath.items()}
    assert found == {at: committed for at, (_, committed, _) in aftermath.items()}
    assert set(found.values()) == {False, True}


def test_what_a_killed_save_had_written_is_collected_by_the_next(
    aftermath: dict[int, tuple[bool, bool, set[str]]],
) -> None:
    """No image, temporary file or empty folder stays."""
    assert {at: left for at, (_, _, left) in aftermath.items() if left} == {}


def test_saves_of_several_processes_to_one_uri(tmp_path: Path) -> None:
    """Processes that save to one URI at the same time need not know of each other."""
    uri = tmp_path / "c"
    holdfast.save(uri, state_of_step(0))
    rivals = [spawned(save_against_others, str(uri), 1000 * i, 15) for i in range(1, 4)]
    allowed = {0} | {1000 * i + n for i in range(1, 4) for n in range(15)}
    while any(process.is_alive() for process, _ in rivals):
        found = holdfast.load(uri)
        assert found["step"] in allowed
        assert difference(state_of_step(found["step"]), found) is None
    outcomes = [pipe.recv() for _, pipe in rivals for _ in range(15)]
    others = [
        error
        for _, error in outcomes
        if error is not None and not isinstance(error, holdfast.SupersededError)
    ]
    assert others == []
    assert sum(error is None for _, error in outcomes) >= 1
    with pytest.MonkeyPatch.context() as patch:
        assert left_after_a_save(uri, patch, 1) == set()
