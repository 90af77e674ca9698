"""How a keeper follows the lead keeper: reports are answered late, or twice, or by another one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from support.clock import in_virtual_time

from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.standing import Report, Standing
from holdfast.storage.keeper.reporting import Reporting

HOSTS = (KeeperHost("a", "a", "a", ranks=(0,)), KeeperHost("b", "b", "b", ranks=(1,)))


class Reporter(Reporting):
    """The keeper ``name``, whose reports are answered when a test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self.compose, self.note, self.lost, self.later)
        self.reports: asyncio.Queue[asyncio.Future[Standing]] = asyncio.Queue()
        self.followed: list[Standing] = []
        self.problems: list[str] = []
        self.told: GenerationId | None = None

    def compose(self) -> Report:
        return Report(self.name, 1, guarded_by_all=self.told)

    async def note(self, standing: Standing) -> None:
        self.followed.append(standing)
        self.told = standing.guarded

    async def lost(self, problem: str, away: bool) -> None:
        self.problems.append(problem)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    async def _sent(self, host: KeeperHost, report: Report) -> Standing:
        answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self.reports.put_nowait(answer)
        return await answer


async def settled() -> None:
    """All that can happen has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


@in_virtual_time
async def test_an_answer_of_a_lead_keeper_that_has_died_is_not_followed_after_one_of_the_next() -> (
    None
):
    """It answers a question from before the next one was heard. That which the next one answers
    later is followed."""
    keeper = Reporter("b")
    keeper.enter(1, HOSTS, ())
    first = await keeper.reports.get()  # it waits for news
    await keeper.tell()
    second = await keeper.reports.get()
    second.set_result(Standing("y/1", 1))
    await settled()
    first.set_result(Standing("x/7", 1))
    await settled()
    assert [standing.version for standing in keeper.followed] == ["y/1"]
    assert keeper.problems == []
    third = await keeper.reports.get()
    third.set_result(Standing("z/1", 1))
    await settled()
    assert [standing.version for standing in keeper.followed] == ["y/1", "z/1"]
    assert keeper.problems == []
    await keeper.close()


@in_virtual_time
async def test_the_lead_keeper_hears_itself_until_it_has_nothing_to_say() -> None:
    """What it follows is news for it, too: else nothing would be protected until another keeper
    says something."""
    keeper = Reporter("a")
    keeper.lead = Lead("x")
    keeper.enter(1, HOSTS, ())
    known = GenerationId(0, 3)
    keeper.lead.hear(Report("b", 1, guarded_by_all=known))
    await keeper.tell()
    assert keeper.told == known
    assert keeper.lead.standing().protected == known
    assert keeper.followed[-1] == keeper.lead.standing()
    await keeper.close()
