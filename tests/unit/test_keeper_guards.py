"""Which parity a keeper keeps."""

from __future__ import annotations

from typing import Any

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.parity.guards import Guards


class Parity:
    """Of a generation."""

    nbytes = 1
    closed = False

    def close(self) -> None:
        self.closed = True


def id(step: int) -> GenerationId:
    """Of a step."""
    return GenerationId(0, step)


def guards(*steps: int) -> Any:
    """With parity of these steps."""
    found: Any = Guards("run", "", lambda: None)
    for step in steps:
        found._held[id(step)] = Parity()
        found._worlds[id(step)] = 1
    return found


def steps(of: Any) -> list[int]:
    """Those that there is parity of."""
    return [one.step for one in sorted(of._held)]


def test_what_nobody_relies_on_is_let_go_but_the_newest() -> None:
    """That one may be what all are about to rely on."""
    held = guards(1, 2, 3, 4)
    parity = dict(held._held)
    held.keep([id(2)])
    assert steps(held) == [2, 4]
    assert [parity[id(step)].closed for step in (1, 2, 3, 4)] == [True, False, True, False]


def test_what_a_restart_may_choose_stays_until_it_has_chosen() -> None:
    """Keepers go on meanwhile, and what they protect then may be what it drops."""
    held = guards(1, 2)
    for client in (7, 8):
        held.offer(client, [id(2), id(3)])
    for step in (3, 4, 5):
        held._held[id(step)] = Parity()
        held._worlds[id(step)] = 1
    held.keep([id(5)])
    assert steps(held) == [1, 2, 3, 5]
    held.released(7)
    held.released(7)
    held.keep([id(5)])
    assert steps(held) == [1, 2, 3, 5]
    held.released(8)
    held.keep([id(5)])
    assert steps(held) == [5]


def test_a_resume_drops_parity_of_later_steps_though_it_was_offered() -> None:
    """It is of another line from now on."""
    held = guards(1, 2)
    held.offer(7, [])
    held.drop_later(1)
    assert steps(held) == [1]
    held.drop_later(None)
    assert steps(held) == []
