"""The lineage of checkpoints that trainers save through a door."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.bits import fresh_uri

import holdfast
from holdfast.storage.integrations.doors import Door
from holdfast.storage.integrations.newest import newest_checkpoint


@given(st.lists(st.tuples(st.sampled_from(["save", "load", "restart"]), st.integers(0, 5))))
def test_the_newest_checkpoint_leads_to_the_current_state(acts: list[tuple[str, int]]) -> None:
    """A trainer loads and saves at random, in one process or several."""
    uri = fresh_uri()
    door = Door()
    stored: dict[int, int] = {}  # the number of the save, by step
    lines: dict[int, tuple[int, ...]] = {}  # the steps that led to each save, as numbers of saves
    recorded: tuple[int, ...] = ()  # the line of the last save
    line: tuple[int, ...] | None = ()  # the line of the training; None if unknown
    at = 0

    def alive(line: tuple[int, ...]) -> list[int]:
        return sorted(step for step, number in stored.items() if number in line)

    for number, (act, value) in enumerate(acts):
        if act == "save":
            at += 1 + value
            if line is None:
                earlier = [step for step in alive(recorded) if step < at]
                goes_back = any(step > at for step in alive(recorded))
                line = recorded
                if goes_back:
                    line = () if not earlier else lines[stored[earlier[-1]]]
            door.save(f"{uri}/step-{at}", {"n": number}, step=at)
            stored[at] = number
            recorded = line = lines[number] = (*line, number)
        elif act == "load" and stored:
            at = sorted(stored)[value % len(stored)]
            assert door.load_to_train(f"{uri}/step-{at}") == {"n": stored[at]}
            line = lines[stored[at]]
        elif act == "restart":
            door, line, at = Door(), None, value
        live = alive(recorded)
        assert [c.step for c in holdfast.list_checkpoints(uri) if not c.abandoned] == live
        assert newest_checkpoint(uri) == (f"{uri}/step-{live[-1]}" if live else None)
