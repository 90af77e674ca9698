"""Keeps the keepers of a job in step: each reports to the leader over HTTP, and acts on the
standing that it gets in return. The leader, the keeper of rank 0, reports to itself.

A keeper without news always has one request pending at the leader, which answers as soon as
something changes (long polling). Lost messages are repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import CoordinationError
from ..arenas.hosts import GuardedGroup, KeeperHost
from ..arenas.messages import FlushEnd
from ..ranks.messages import codec
from .decisions.lead import Lead, incarnation_of, is_newer
from .decisions.standing import FlushOrder, Report, Standing

if TYPE_CHECKING:
    import aiohttp


REPORT_NBYTES_MAX = 16 << 20
WAIT_S = 10.0
"""The leader answers a pending request after this time, even without news."""
ANSWER_S = 30.0
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses after consecutive reports without an answer; the last one repeats."""
UNHEARD_S = 60.0
"""A keeper that is silent for this long counts as gone."""

_log = logging.getLogger(__name__)


class StaleReportError(Exception):
    """A report that does not match this keeper's state. ``later``: it may match soon."""

    def __init__(self, text: str, *, later: bool) -> None:
        super().__init__(text)
        self.later = later


class Reporting:
    """One keeper's side of the reporting.

    ``compose()`` returns its report; ``follow(standing)`` acts on a standing, and is never called
    concurrently; ``unheard(problem)`` is called when the leader has not answered for long;
    ``run_later(work)`` schedules a coroutine. ``certificate``: PEM file to verify other keepers
    with.
    """

    def __init__(
        self,
        name: str,
        compose: Callable[[], Report],
        follow: Callable[[Standing], Awaitable[None]],
        unheard: Callable[[str], Awaitable[None]],
        run_later: Callable[[Coroutine[Any, Any, None]], None],
        certificate: str = "",
    ) -> None:
        self.name = name
        self.lead = Lead(secrets.token_hex(4))
        self.hosts: tuple[KeeperHost, ...] = ()
        self.groups: tuple[GuardedGroup, ...] = ()
        self.failures = 0
        """Number of reports without an answer."""
        self._compose = compose
        self._follow = follow
        self._unheard = unheard
        self.run_later = run_later
        self.certificate = certificate
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        """Set and replaced on every change at this leader."""
        self._seen = ""
        self._asked = itertools.count()
        self._since = 0
        """Number of the next question at the time of the current leader's first answer."""
        self._heard_s: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_alone(self) -> bool:
        """True if there is no other keeper."""
        return len(self.hosts) < 2

    @property
    def leads(self) -> bool:
        """True if this keeper is the leader."""
        return self._lead_host is None

    @property
    def _lead_host(self) -> KeeperHost | None:
        for host in self.hosts:
            if 0 in host.ranks and host.name != self.name:
                return host
        return None

    def own_ranks(self, world: int) -> Sequence[int]:
        """Return the ranks whose images this keeper holds."""
        for host in self.hosts:
            if host.name == self.name:
                return host.ranks
        return range(world)

    def group(self) -> GuardedGroup | None:
        """Return this keeper's group."""
        return next((group for group in self.groups if self.name in group.names), None)

    def enter(
        self, epoch: int, hosts: Sequence[KeeperHost], groups: Sequence[GuardedGroup]
    ) -> None:
        """Enter an epoch of these keepers. Does nothing if another trainer has entered it
        before."""
        if (epoch, tuple(hosts)) == (self.lead.epoch, self.hosts):
            return
        self.hosts = tuple(hosts)
        self.groups = tuple(groups)
        names = [host.name for host in hosts] or [self.name]
        self.lead = self.lead.begin(epoch, names, guards=bool(groups))
        self._seen = ""
        self._stop()
        if self._lead_host is not None:
            self._tasks = [
                asyncio.ensure_future(self._report_news()),
                asyncio.ensure_future(self._wait_for_news()),
            ]
            for task in self._tasks:
                task.add_done_callback(_note_end)

    async def tell(self) -> None:
        """Report this keeper's news. If it is the leader, return once its own report has been
        handled."""
        self._news.set()
        if not self.leads:
            return
        async with self._turn:
            self.lead.hear(self._own_report())
            while self._seen != self.lead.version:
                await self._follow_own()
                self.lead.hear(self._own_report())

    def _own_report(self) -> Report:
        return replace(self._compose(), seen=self._seen)

    async def _follow_own(self) -> None:
        self._seen = self.lead.version
        self.wake()
        await self._follow(self.lead.standing())

    async def hear(self, body: bytes) -> bytes:
        """Handle the report of another keeper, and return the current standing, encoded. Raises
        CoordinationError if it is no report, StaleReportError."""
        report = codec(Report).decode(body, "a report")
        if not self.leads:
            raise StaleReportError("this is not the lead keeper", later=False)
        if report.epoch != self.lead.epoch:
            text = f"this is epoch {self.lead.epoch}, and the report is of epoch {report.epoch}"
            raise StaleReportError(text, later=report.epoch > self.lead.epoch)
        if report.name not in self.lead.names:
            raise StaleReportError(f"{report.name} is not a keeper of this job", later=False)
        loop = asyncio.get_running_loop()
        self._heard_s[report.name] = loop.time()
        version = self.lead.version
        self.lead.hear(report)
        if version != self.lead.version:
            self.run_later(self.tell())
        elif report.waits and report.seen == version and not self._closed:
            await self.moved(WAIT_S)
            self._heard_s[report.name] = loop.time()
        return codec(Standing).encode(self.lead.standing())

    def order(self, flush: FlushOrder) -> None:
        """Order all keepers to write this flush. Only for the leader."""
        self.lead.order(flush)
        self.run_later(self.tell())

    def end(self, flush: FlushEnd) -> None:
        """Announce the end of a flush. Only for the leader."""
        self.lead.end(flush)
        self.run_later(self.tell())

    def unheard(self) -> list[str]:
        """Return the other keepers that have not reported for long."""
        now_s = asyncio.get_running_loop().time()
        others = self.lead.names - {self.name}
        for name in others:
            self._heard_s.setdefault(name, now_s)
        return sorted(name for name in others if now_s - self._heard_s[name] > UNHEARD_S)

    async def moved(self, timeout_s: float) -> None:
        """Wait until something changes at this leader, or the timeout ends."""
        moved = self._moved
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await moved.wait()

    def wake(self) -> None:
        """Answer all requests that wait for news."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _report_news(self) -> None:
        while True:
            await self._news.wait()
            for tried in itertools.count():
                self._news.clear()
                if await self._reported(waits=False):
                    break
                await asyncio.sleep(PAUSES_S[min(tried, len(PAUSES_S) - 1)])

    async def _wait_for_news(self) -> None:
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        failed = 0
        while True:
            if await self._reported(waits=True):
                answered_s = loop.time()
                failed = 0
                continue
            if loop.time() - answered_s > UNHEARD_S:
                await self._unheard("the lead keeper has stopped answering")
            await asyncio.sleep(PAUSES_S[min(failed, len(PAUSES_S) - 1)])
            failed += 1

    async def _reported(self, *, waits: bool) -> bool:
        """Report once, and act on the answer. Return whether there was one."""
        host = self._lead_host
        assert host is not None
        report = self._compose()
        asked = next(self._asked)
        try:
            standing = await self._sent(host, replace(report, seen=self._seen, waits=waits))
        except (CoordinationError, OSError, TimeoutError) as error:
            self.failures += 1
            _log.info("the lead keeper %s has not answered: %s", host.name, error)
            return False
        async with self._turn:
            if self._is_news(standing, asked):
                if incarnation_of(standing.version) != incarnation_of(self._seen):
                    self._since = next(self._asked)
                self._seen = standing.version
                await self._follow(standing)
        return True

    def _is_news(self, standing: Standing, asked: int) -> bool:
        """Return whether to act on a standing. The answer of a dead leader may arrive after one of
        its successor; it is stale if its question was sent before the successor's first answer."""
        if standing.epoch != self.lead.epoch:
            return False
        is_another = incarnation_of(standing.version) != incarnation_of(self._seen)
        if is_another and asked < self._since:
            return False
        return is_newer(standing.version, self._seen)

    async def _sent(self, host: KeeperHost, report: Report) -> Standing:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        scheme = "https" if host.tls else "http"
        tls: ssl.SSLContext | bool = True
        if host.tls and self.certificate:
            tls = ssl.create_default_context(cafile=self.certificate)
        try:
            async with self._session.post(
                f"{scheme}://{host.address}/v1/report",
                data=codec(Report).encode(report),
                headers={"Authorization": f"Bearer {host.token}"},
                ssl=tls,
            ) as answer:
                if (answer.content_length or 0) > REPORT_NBYTES_MAX:
                    raise CoordinationError(f"an answer of {answer.content_length:,} bytes")
                body = await answer.read()
                if answer.status != 200:
                    text = body[:200].decode(errors="replace").strip()
                    raise CoordinationError(f"status {answer.status}: {text}")
        except aiohttp.ClientError as error:
            raise CoordinationError(str(error) or type(error).__name__) from error
        return codec(Standing).decode(body, "a standing")

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def close(self) -> None:
        """Stop reporting, and answer pending requests. Safe to call twice."""
        self._closed = True
        self._moved.set()
        tasks = self._tasks
        self._stop()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("this keeper no longer reports", exc_info=task.exception())
