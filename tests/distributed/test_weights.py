"""Weight channels of several ranks: layouts, failures of one rank, and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_processes import RankProcesses
from support.weight_jobs import (
    changing_state,
    dying_job,
    publish_once,
    push_with_one_bad,
    train_and_follow,
    two_trainers,
    update_with_one_bad,
    weights,
)

import holdfast


@pytest.mark.parametrize(
    ("stored", "layout", "engines"),
    [
        ("fsdp2", "tp", 2), ("tp", "module", 1), ("pp", "fsdp2", 2), ("ep", "pp", 2),
        ("flat", "ep", 2), ("plain", "flat", 2), ("fsdp1", "plain", 1), ("module", "fsdp1", 2),
    ],
)  # fmt: skip
def test_engines_of_any_layout_follow_trainers_of_any_other(
    stored: str, layout: str, engines: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Every version arrives on every rank, bit for bit, and only the first one as an anchor."""
    found = ranks.run(train_and_follow, str(tmp_path), stored, layout, 4, world=2 + engines)
    assert found[2:] == [[(True, True, version == 0) for version in range(4)]] * engines


@pytest.mark.parametrize("bad", ["state", "version", "storage"])
def test_a_push_that_fails_on_one_rank_fails_on_all(
    bad: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Nothing is published, each rank learns which one failed and why, and the next push is an
    anchor."""
    found = ranks.run(push_with_one_bad, str(tmp_path), bad, 1, world=2)
    own, cause = {
        "state": ("StateError", "no set of weights"),
        "version": ("UsageError", "ranks are in different calls"),
        "storage": ("FullError", "no room"),
    }[bad]
    for rank, outcomes in enumerate(found):
        assert [outcomes[n] for n in (0, 2, 4)] == [0, 2, 4]
        for n in (1, 3):
            kind, failed, text = outcomes[n]
            assert kind == (own if rank == 1 or bad == "version" else "RankFailedError")
            assert failed == 1 or rank == 1
            assert cause in text
    for sequence, version in enumerate((0, 2, 4), 1):
        loaded = holdfast.load(tmp_path / f"{sequence:08d}")["model"]
        assert all(torch.equal(loaded[name], whole) for name, whole in weights(version).items())


@pytest.mark.parametrize("bad", ["damage", "fit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_fails_on_one_rank_fails_on_all(
    bad: str, rank: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """All ranks keep the old version and know the cause. The next update works; after damage, the
    next one that does not need the damaged patch."""
    found = ranks.run(update_with_one_bad, str(tmp_path), bad, rank, world=2)
    failed, before = ([2, 3], 1) if bad == "damage" else ([0], None)
    cause = "need a patch that cannot be applied" if bad == "damage" else "unknown"
    for number, outcomes in enumerate(found):
        for version, (got, used, same) in enumerate(outcomes):
            if version not in failed:
                assert (got, used, same) == (version, version, [version])
                continue
            assert (used, same) == (before, [] if before is None else [before])
            kind, _, text = got
            assert cause in text
            if bad == "damage":
                assert kind == ("DamagedError" if number == rank else "RankFailedError")


def test_a_trainer_restarts_on_another_number_of_ranks(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Versions of all these trainers continue each other, and subscribers notice nothing."""
    with holdfast.subscribe(tmp_path) as subscriber:
        for version, (layout, world, anew) in enumerate(
            [("fsdp2", 2, False), ("tp", 3, False), ("plain", 1, True), ("flat", 4, True)]
        ):
            done = ranks.run(publish_once, str(tmp_path), layout, version, anew, world=world)
            assert [newest for newest, _ in done] == [version] * world
            update = subscriber.update()
            assert update is not None
            got = dict(subscriber.weights())
            assert all(torch.equal(got[name], whole) for name, whole in weights(version).items())
            assert ("more" in got) == anew


def test_a_state_that_gains_and_loses_tensors_arrives(ranks: RankProcesses, tmp_path: Path) -> None:
    """A patch is made only between images with the same tensors."""
    assert ranks.run(changing_state, str(tmp_path), world=2) == [[True] * 6] * 2


def test_of_two_trainers_all_ranks_of_one_are_told(ranks: RankProcesses, tmp_path: Path) -> None:
    """They learn of it at the next push, and at each later one."""
    found = ranks.run(two_trainers, str(tmp_path))
    for rank, outcomes in enumerate(found):
        if rank >= 2:
            assert outcomes == [1, 4]
            continue
        assert outcomes[0] == 0
        assert "another publisher" in outcomes[1][2]
        assert outcomes[2][0] == "SupersededError"


@pytest.mark.nightly(9)
@pytest.mark.parametrize("what", ["push", "update"])
def test_a_rank_that_is_killed_is_named(what: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """The other rank keeps the old version. The next job publishes and follows the next one."""
    with RankProcesses(2) as doomed:
        (kind, rank, _), used, same = doomed.outcomes(doomed.begin(dying_job, str(tmp_path), what))[
            0
        ]
        assert (kind, rank) == ("DeadlineError", 1)
        assert (used, same) == (0, True)
    version = 1 if what == "push" else 2
    assert {found[0] for found in ranks.run(publish_once, str(tmp_path), "tp", version, False)} == {
        version
    }
    with holdfast.subscribe(tmp_path) as subscriber:
        subscriber.update()
        got = dict(subscriber.weights())
    assert all(torch.equal(got[name], whole) for name, whole in weights(version).items())
