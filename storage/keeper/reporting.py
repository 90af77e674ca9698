"""How keepers of one job keep in step: each reports to the lead keeper, over HTTP, and follows how
things stand. The lead keeper, which is that of rank 0, reports to itself.

A keeper without news always has one request waiting with the lead keeper, which is answered as soon
as something changes. What is lost on the way is said again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import CoordinationError
from ..arenas.hosts import GuardedGroup, KeeperHost
from ..ranks.messages import codec
from .lead import Lead, incarnation_of, is_newer
from .standing import FlushEnd, FlushOrder, Report, Standing

if TYPE_CHECKING:
    import aiohttp

__all__ = ["REPORT_NBYTES_MAX", "Reporting", "StaleReportError"]

REPORT_NBYTES_MAX = 16 << 20
WAIT_S = 10.0
"""For so long the lead keeper has nothing to say, and answers all the same."""
ANSWER_S = 30.0
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""How long a keeper waits after each report that had no answer; then the last of them again and
again."""
UNHEARD_S = 60.0
"""A keeper that has not been heard for so long takes part in nothing."""

_log = logging.getLogger(__name__)


class StaleReportError(Exception):
    """A report that this keeper has no use for. ``later``: it may have, in a moment."""

    def __init__(self, text: str, *, later: bool) -> None:
        super().__init__(text)
        self.later = later


class Reporting:
    """One keeper's part. ``compose()`` says what it knows, ``follow(standing)`` makes use of
    how things stand; it is never called twice at a time. ``unheard(problem)`` is called where
    the lead keeper has not answered for long. ``run_later(work)`` runs a coroutine beside all else.
    ``certificate``: a file, of those whom other keepers are trusted by."""

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
        """Reports that had no answer."""
        self._compose = compose
        self._follow = follow
        self._unheard = unheard
        self.run_later = run_later
        self.certificate = certificate
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        """Set, and replaced, when something changes at the lead keeper."""
        self._seen = ""
        self._asked = itertools.count()
        self._since = 0
        """Which question was the next when the lead keeper that is followed now was first heard."""
        self._heard_s: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is no other keeper."""
        return len(self.hosts) < 2

    @property
    def leads(self) -> bool:
        """Whether this is the lead keeper."""
        return self._lead_host is None

    @property
    def _lead_host(self) -> KeeperHost | None:
        """The lead keeper, where that is another one."""
        for host in self.hosts:
            if 0 in host.ranks and host.name != self.name:
                return host
        return None

    def own_ranks(self, world: int) -> Sequence[int]:
        """Those whose images are held here."""
        for host in self.hosts:
            if host.name == self.name:
                return host.ranks
        return range(world)

    def group(self) -> GuardedGroup | None:
        """The group that this keeper is in."""
        return next((group for group in self.groups if self.name in group.names), None)

    def enter(
        self, epoch: int, hosts: Sequence[KeeperHost], groups: Sequence[GuardedGroup]
    ) -> None:
        """An epoch of these keepers begins, or goes on: one of its trainers has come."""
        if (epoch, tuple(hosts)) == (self.lead.epoch, self.hosts):
            return
        self.hosts = tuple(hosts)
        self.groups = tuple(groups)
        names = [host.name for host in hosts] or [self.name]
        self.lead.begin(epoch, names, guards=bool(groups))
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
        """There is something new here. Returns when the lead keeper, if it is this one, has taken
        it into account."""
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
        self._moved.set()
        self._moved = asyncio.Event()
        await self._follow(self.lead.standing())

    async def hear(self, body: bytes) -> bytes:
        """Take the report of another keeper; the answer is how things stand. Raises
        CoordinationError for what is no report, :class:`StaleReportError`."""
        report = codec(Report).decode(body, "a report")
        if not self.leads:
            raise StaleReportError("this is not the lead keeper", later=False)
        if report.epoch != self.lead.epoch:
            text = f"this is epoch {self.lead.epoch}, and the report is of epoch {report.epoch}"
            raise StaleReportError(text, later=report.epoch > self.lead.epoch)
        if report.name not in self.lead.names:
            raise StaleReportError(f"{report.name} is no keeper of this job", later=False)
        loop = asyncio.get_running_loop()
        self._heard_s[report.name] = loop.time()
        version = self.lead.version
        self.lead.hear(report)
        if version != self.lead.version:
            self.run_later(self.tell())
        elif report.waits and report.seen == version and not self._closed:
            moved = self._moved
            try:
                async with asyncio.timeout(WAIT_S):
                    await moved.wait()
            except TimeoutError:
                pass
            self._heard_s[report.name] = loop.time()
        return codec(Standing).encode(self.lead.standing())

    def order(self, flush: FlushOrder) -> None:
        """All keepers are to write this; for the lead keeper."""
        self.lead.order(flush)
        self.run_later(self.tell())

    def end(self, flush: FlushEnd) -> None:
        """A flush has ended; for the lead keeper."""
        self.lead.end(flush)
        self.run_later(self.tell())

    def unheard(self) -> list[str]:
        """The other keepers that have not been heard for long."""
        now_s = asyncio.get_running_loop().time()
        others = self.lead.names - {self.name}
        for name in others:
            self._heard_s.setdefault(name, now_s)
        return sorted(name for name in others if now_s - self._heard_s[name] > UNHEARD_S)

    async def moved(self, timeout_s: float) -> None:
        """Returns when something has changed at this lead keeper, or after a while."""
        moved = self._moved
        try:
            async with asyncio.timeout(timeout_s):
                await moved.wait()
        except TimeoutError:
            pass

    async def _report_news(self) -> None:
        """Say what is new, until the lead keeper has answered."""
        while True:
            await self._news.wait()
            for tried in itertools.count():
                self._news.clear()
                if await self._reported(waits=False):
                    break
                await asyncio.sleep(PAUSES_S[min(tried, len(PAUSES_S) - 1)])

    async def _wait_for_news(self) -> None:
        """Hear what is new at the lead keeper."""
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        failed = 0
        while True:
            if await self._reported(waits=True):
                answered_s = loop.time()
                failed = 0
                continue
            if loop.time() - answered_s > UNHEARD_S:
                await self._unheard("the lead keeper is not heard any more")
            await asyncio.sleep(PAUSES_S[min(failed, len(PAUSES_S) - 1)])
            failed += 1

    async def _reported(self, *, waits: bool) -> bool:
        """Report once, and follow the answer; whether there was one."""
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
        """Whether an answer is to be followed. That of a lead keeper which has died may come after
        that of the next one: it answers a question from before that one was heard."""
        if standing.epoch != self.lead.epoch:
            return False
        is_another = incarnation_of(standing.version) != incarnation_of(self._seen)
        if is_another and asked < self._since:
            return False
        return is_newer(standing.version, self._seen)

    async def _sent(self, host: KeeperHost, report: Report) -> Standing:
        """Raises CoordinationError, OSError, TimeoutError."""
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
        """Report no more, and answer those who wait. Safe to call twice."""
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
    """Reporting goes on until it is cancelled."""
    if not task.cancelled():
        _log.error("this keeper no longer reports", exc_info=task.exception())
