"""Resuming a run from its newest whole checkpoint, or an earlier one; the same on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from ...drivers.uri import join
from ...errors import DamagedError, UsageError
from ..arenas.hosts import KeeperHost
from ..keeper.decisions.choice import Choice, Stock
from ..keeper.reading import Unheard
from ..operations.loading.start_load import load_state
from ..operations.location import Place
from ..operations.maintenance.listing import ListedCheckpoint
from ..operations.options import LoadOptions
from ..operations.report import LoadReport
from ..ranks.calls import Call
from ..ranks.messages import Nothing, Round
from .epochs import Epochs, put_epochs, read_epochs
from .keeper_inventory import (
    GuardOption,
    InMemory,
    Meeting,
    Tried,
    asked,
    awaited,
    kept_in_memory,
    meeting,
    next_epoch,
    silent_among,
    stocks_of,
)
from .load_attempts import (
    Attempted,
    Outcome,
    Prepare,
    held_round,
    ready,
    tried,
    tried_here,
    verdict_and_skips,
)
from .memory_level import LoadedBytes, MemoryLevel
from .run_identity import run_id
from .run_lineage import Back, RunLineage, Survey, is_own

_NAMED = 10
"""The most steps or paths that a message names."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint to try. ``own``: its name was given by this run's Checkpointer."""

    path: str
    step: int | None
    own: bool


@dataclass(frozen=True, slots=True)
class Choices:
    """Generations in memory newer than storage, best first, and the hosts to read from. ``waits``:
    look again, since keepers that have not answered may hold a newer one. ``problem``: the keepers
    that were waited for in vain."""

    kept: tuple[Choice, ...] = ()
    peers: tuple[KeeperHost, ...] = ()
    waits: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The leader's findings in the run's folder and in memory, for all ranks. ``broken``: how many
    checkpoints cannot be opened. ``refused``: why nothing can be resumed. ``epoch``: the epoch
    about to begin; ``meeting``: its keepers. ``gone_back``: why newer steps are not tried."""

    tried: tuple[Candidate, ...]
    broken: int
    refused: str | None = None
    advice: str | None = None
    memory: Choices = field(default_factory=Choices)
    epoch: int = 0
    meeting: Meeting = field(default_factory=Meeting)
    gone_back: str = ""


@dataclass(frozen=True, slots=True)
class RunId:
    """The id of the run."""

    id: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a resume.

    ``step``: None if there was nothing to resume. ``tier``: ``memory`` or ``storage``. ``nbytes``:
    bytes read by this rank. ``seconds``: duration. ``tiers``: bytes by source: memory of this host
    (``own``) or of others (``peer``), or ``storage``; ``parity`` is the size of the images that
    this rank's keeper rebuilt. ``problem``: keepers that have not answered, so that a newer step in
    memory may have been missed; that steps are not kept in memory for now; or that repeated resumes
    without a newer step made this one go further back; "" if all is well. ``stored``: name of the
    resumed checkpoint, or of the newest one before a step in memory; None without any.
    """

    step: int | None
    tier: str
    nbytes: int
    seconds: float
    tiers: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    stored: str | None = None


RUN = Round.of("run", Nothing, RunId)
OFFER = Round.of("resume", InMemory, Nothing)
LOOK = Round.of("resume", InMemory, Candidates)
CHOOSE = Round.of("resume", InMemory, Choices)
TAKE_UP = Round.of("resume", Nothing, Nothing)


class _Leader:
    """The leader's part of a resume. ``guards``: the protection; None without keepers.
    ``patience_s``: how long to wait for keepers that do not answer but may hold a newer step.
    ``goes_back_after``: see :class:`.keeper_option.Keeper`."""

    def __init__(
        self,
        lineage: RunLineage,
        root: Place,
        back: Back,
        guards: GuardOption | None,
        patience_s: float = 0.0,
        goes_back_after: int | None = None,
    ) -> None:
        self._lineage = lineage
        self._root = root
        self._asked = self._back = back
        self._guards = guards
        self._patience_s = patience_s
        self._goes_back_after = goes_back_after
        self._until_s: float | None = None
        self._awaited = ""
        self._epochs = Epochs()
        self._survey: Survey | None = None
        self._tried: Sequence[ListedCheckpoint] = ()
        self._others: Sequence[Stock] = ()
        self._unheard: Sequence[Unheard] = ()
        self.failed: set[Choice] = set()
        """Choices in memory that have been tried in vain."""

    async def hear_offers(self, statements: Sequence[InMemory]) -> Nothing:
        """Ask keepers that no rank owns for their inventories, after all ranks have joined theirs.
        This must precede the second look at the job's own keepers: if another keeper has dropped a
        step by now because a newer one is protected, that look finds the newer one."""
        assert self._guards is not None
        self._others, self._unheard = await asked(statements, self._guards)
        return Nothing()

    async def look(self, statements: Sequence[InMemory]) -> Candidates:
        """Survey storage and memory, and return the candidates to resume."""
        self._back = self._asked
        exact = self._back.step is not None
        survey = self._survey = await self._lineage.survey(may_be_unknown=exact)
        if self._guards is None:
            self._tried = self._back.among(survey)
            return _candidates(self._back, self._root, survey, self._tried)
        async with self._root.opened() as driver:
            self._epochs = await read_epochs(driver)
        return self._go_back(survey, statements) or self._candidates(survey, statements)

    def _go_back(self, survey: Survey, statements: Sequence[InMemory]) -> Candidates | None:
        """Return the candidates before the steps that epochs have repeatedly resumed from; None if
        that is not due, or without any."""
        if self._back.asked or self._goes_back_after is None:
            return None
        before = self._epochs.go_back_before(self._goes_back_after)
        if before is None:
            return None
        self._back = Back(before=before)
        candidates = self._candidates(survey, statements)
        memory = candidates.memory
        if not memory.waits and not memory.kept and (candidates.refused or not candidates.tried):
            self._back = self._asked
            return None
        problem = (
            f"the last {self._epochs.repeats} starts have brought no newer step, so this resume "
            f"goes back to one before step {before}"
        )
        _log.warning("%s", problem)
        return replace(candidates, gone_back=problem)

    def go_back_no_more(self) -> None:
        """Let the next look find the newest steps."""
        self._goes_back_after = None
        self.failed.clear()

    def _candidates(self, survey: Survey, statements: Sequence[InMemory]) -> Candidates:
        assert self._guards is not None
        tried = self._tried = self._back.among(survey)
        candidates = _candidates(self._back, self._root, survey, tried)
        stocks, others = stocks_of(statements), self._others
        candidates = replace(
            candidates,
            epoch=next_epoch([*stocks, *others], self._epochs),
            meeting=meeting(stocks, len(statements), self._guards),
        )
        choices = self._choices(statements)
        if not choices.kept:
            return replace(candidates, memory=choices)
        return replace(candidates, memory=choices, refused=None, advice=None)

    async def choose(self, statements: Sequence[InMemory]) -> Choices:
        """Return the generations left in memory, after some were found damaged."""
        assert self._guards is not None
        self._others, self._unheard = await asked(statements, self._guards)
        return self._choices(statements)

    def _choices(self, statements: Sequence[InMemory]) -> Choices:
        if self._back.step is not None and self._tried:
            return Choices()  # storage has that very step
        stocks, others = stocks_of(statements), self._others
        newest = max((c.step or 0 for c in self._tried), default=-1)
        damaged = {one for statement in statements for one in statement.damaged}
        tried = Tried(damaged, self.failed)
        kept, problems = kept_in_memory(
            stocks, others, len(statements), newest, self._epochs, tried, self._back.allows
        )
        found = (*stocks, *others)
        if kept:
            newest = kept[0].generation.step
        unheard = [*silent_among(statements), *self._unheard]
        waits = awaited(
            found,
            unheard,
            newest,
            self._epochs,
            in_memory=bool(kept),
            tried=tried,
            allows=self._back.allows,
        )
        given_up = ""
        if waits:
            if self._may_wait(unheard):
                return Choices(waits=True)
            given_up = (
                f"newer steps may be lost: these keepers have not answered within "
                f"{self._patience_s:g} s: {_names(unheard)}"
            )
            _log.warning("%s", given_up)
        for problem in problems:
            _log.warning("%s", problem)
        return Choices(tuple(kept), tuple(stock.host for stock in found), problem=given_up)

    def _may_wait(self, unheard: Sequence[Unheard]) -> bool:
        """Return whether there is time left to wait for these keepers, and log their names."""
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + self._patience_s
        if now_s >= self._until_s:
            return False
        names = _names(unheard)
        if names != self._awaited:
            self._awaited = names
            _log.warning(
                "waiting for these keepers, at most %.0f s, since they may hold newer steps: %s",
                *(self._until_s - now_s, names),
            )
        return True

    async def take_up(self, taken: _Taken) -> None:
        assert self._survey is not None
        resumed_from = None if taken.chosen is None else self._tried[taken.chosen]
        if self._guards is not None:
            async with self._root.opened() as driver:
                epochs = self._epochs.with_next(taken.epoch, taken.step, asked=self._asked.asked)
                await put_epochs(driver, epochs)
        kept_step = taken.step if taken.tier == "memory" else None
        await self._lineage.take_up(
            resumed_from, self._survey, record=self._back.asked, kept_step=kept_step
        )


def _names(unheard: Sequence[Unheard]) -> str:
    return ", ".join(f"{one.host.name} {one.host.address}".strip() for one in unheard)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The point at which a run resumes. ``step``: None for nothing. ``chosen``: the index of the
    checkpoint in storage among those tried. ``loaded``: bytes by source, for a step in memory.
    ``epoch``: the epoch about to begin."""

    epoch: int
    step: int | None = None
    chosen: int | None = None
    loaded: LoadedBytes | None = None

    @property
    def tier(self) -> str:
        return "memory" if self.step is not None and self.chosen is None else "storage"


@dataclass(slots=True)
class _Target:
    """The state to load into. ``touched``: names that failed loads have begun to fill on this rank.
    ``failed``: steps in memory whose load began and failed on any rank; the same on all ranks."""

    state: object
    options: LoadOptions
    touched: set[str] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)


def resumed(
    lineage: RunLineage,
    root: Place,
    back: Back,
    state: object,
    options: LoadOptions,
    memory: MemoryLevel | None = None,
) -> Resumed:
    """Load a checkpoint of the run into ``state``; return where it came from.

    Steps in ``memory`` come first if they are newer than all checkpoints in storage that match the
    request. If a candidate is damaged on any rank, all ranks skip it with a warning, unless it was
    requested by its step. A checkpoint that does not fit is skipped too if its name was not given
    by this run's Checkpointer. Later checkpoints are abandoned.

    Raises UsageError if no checkpoint matches the request; DamagedError if none is whole, in
    storage or in memory: ``state`` may then be partly filled, and no epoch begins. ``state`` may
    also be partly filled after a MismatchError, if the next candidate lacks values that the load of
    a damaged one began to fill. Raises any other error of :func:`load`, since the next candidate
    would fit no better.
    """
    began_s = time.perf_counter()
    call = Call("resume", root.uri.redacted, back.step)
    if memory is None:
        leader = _Leader(lineage, root, back, None)
        look = ready(InMemory())
        candidates = held_round(LOOK, call, options.deadline_s, look, leader.look)
    else:
        limits = memory.gives_up_after_s, memory.goes_back_after
        leader = _Leader(lineage, root, back, memory.guards, *limits)
        candidates = _survey(leader, memory, root, call, options.deadline_s)
    _check_allowed(candidates, root)
    reports: list[LoadReport] = []
    target = _Target(state, replace(options, on_report=reports.append))
    taken = None
    if candidates.gone_back and memory is not None:
        try:
            taken = _load_best(leader, root, candidates, target, back, memory)
        except DamagedError as error:
            _log.warning("no earlier step can be resumed, so the newest is: %s", error)
            leader.go_back_no_more()
            candidates = _survey(leader, memory, root, call, options.deadline_s)
            _check_allowed(candidates, root)
    if taken is None:
        taken = _load_best(leader, root, candidates, target, back, memory)

    async def take_up(_: Sequence[Nothing]) -> Nothing:
        await leader.take_up(taken)
        return Nothing()

    call = Call("resume", root.uri.redacted, taken.step)
    held_round(TAKE_UP, call, options.deadline_s, ready(Nothing()), take_up)
    if memory is not None:
        memory.begin_at(taken.step)
        memory.begin_epoch(taken.epoch, taken.step, candidates.meeting)
    nbytes = 0 if taken.step is None else reports[-1].bytes_read
    tiers = {"storage": nbytes} if nbytes else {}
    if taken.loaded is not None:
        tiers = asdict(taken.loaded)
    seconds = time.perf_counter() - began_s
    problems = [candidates.gone_back, candidates.memory.problem, candidates.meeting.problem]
    problem = "; ".join(filter(None, problems))
    stored = candidates.tried[taken.chosen or 0].path if candidates.tried else None
    return Resumed(taken.step, taken.tier, nbytes, seconds, tiers, problem, stored)


def _check_allowed(candidates: Candidates, root: Place) -> None:
    if candidates.refused is not None:
        raise UsageError(candidates.refused, uri=root.uri.redacted, advice=candidates.advice)


def _survey(
    leader: _Leader, memory: MemoryLevel, root: Place, call: Call, deadline_s: float
) -> Candidates:
    """Look at memory and storage, again and again while keepers may still answer with a newer
    step."""
    join: Prepare[InMemory] = partial(memory.join, identified(root, deadline_s))
    while True:
        # From here on, no keeper drops what it holds. The offers may be out of date: a keeper that
        # was asked later may have dropped a step once all had parity of the next one. So look
        # again.
        held_round(OFFER, call, deadline_s, join, leader.hear_offers)
        candidates = held_round(LOOK, call, deadline_s, ready(memory.look()), leader.look)
        if not candidates.memory.waits:
            return candidates
        join = memory.look_later


def _load_best(
    leader: _Leader,
    root: Place,
    candidates: Candidates,
    target: _Target,
    back: Back,
    memory: MemoryLevel | None,
) -> _Taken:
    """Load the best whole candidate, from memory, else storage. Raises DamagedError."""
    if memory is not None:
        kept = _load_kept(leader, root, candidates, target, memory)
        if kept is not None:
            step, loaded = kept
            return _Taken(candidates.epoch, step, loaded=loaded)
    chosen = _load_first(root, candidates, target, back)
    failed = target.failed or [one.generation.step for one in candidates.memory.kept]
    if chosen is None and failed:
        # All ranks tried the same steps, so all raise, however far each of them got.
        raise DamagedError(
            f"the steps that this run could resume are in memory only, and none of them can be "
            f"read: {', '.join(map(str, failed[:_NAMED]))}. The state may be partly filled",
            uri=root.uri.redacted,
            advice=(
                "Rebuild the state before you use it. The steps stay in memory; the log says what "
                "is wrong with each. To start over, stop the keepers of this run "
                "(`holdfast keeper stop`), or use another folder."
            ),
        )
    if chosen is None:
        return _Taken(candidates.epoch)
    return _Taken(candidates.epoch, candidates.tried[chosen].step, chosen)


def identified(root: Place, deadline_s: float) -> str:
    """Return the id of the run. Every rank calls this."""

    async def identify(_: Sequence[Nothing]) -> RunId:
        async with root.opened() as driver:
            return RunId(await run_id(driver))

    call = Call("join", root.uri.redacted)
    return held_round(RUN, call, deadline_s, ready(Nothing()), identify).id


def begin_run(memory: MemoryLevel, root: Place, deadline_s: float) -> None:
    """Begin an epoch on every rank without resuming; steps in memory are discarded.

    If one has begun without the keepers of some ranks, begin another one at the same step, unless
    keepers are still missing.
    """
    again = memory.joined

    async def decide(statements: Sequence[InMemory]) -> Candidates:
        stocks = stocks_of(statements)
        together = meeting(stocks, len(statements), memory.guards)
        if again and together.problem:
            return Candidates((), 0, meeting=together)
        others, _ = ([], []) if again else await asked(statements, memory.guards)
        async with root.opened() as driver:
            epochs = await read_epochs(driver)
            epoch = next_epoch([*stocks, *others], epochs)
            epochs = epochs.with_next(epoch, memory.since, again=again, asked=not again)
            await put_epochs(driver, epochs)
        return Candidates((), 0, epoch=epoch, meeting=together)

    call = Call("begin", root.uri.redacted)
    if again:
        join = ready(memory.look())
    else:
        join = partial(memory.join, identified(root, deadline_s))
    try:
        candidates = held_round(LOOK, call, deadline_s, join, decide)
    except BaseException:
        if not again:
            memory.close()  # no epoch has begun, so the next attempt starts from scratch
        raise
    if again and candidates.meeting.problem:
        memory.problem = candidates.meeting.problem
        memory.release()
    else:
        memory.begin_epoch(candidates.epoch, memory.since, candidates.meeting)


def _candidates(
    back: Back, root: Place, survey: Survey, tried: Sequence[ListedCheckpoint]
) -> Candidates:
    for c in survey.broken:
        _log.warning("the checkpoint %s cannot be opened: %s", c.path, c.problem)
    refused = advice = None
    if not tried and (back.asked or any(c.abandoned for c in survey.steps)):
        asked = "that is not abandoned"
        if back.step is not None:
            asked = f"of step {back.step}"
        elif back.before is not None:
            asked = f"before step {back.before}"
        refused = f"this run has no checkpoint {asked}"
        steps = ", ".join(f"{c.step}{' (abandoned)' * c.abandoned}" for c in survey.steps[:_NAMED])
        advice = (
            f"It has these steps: {steps or 'none'}. resume(state, step=…) resumes from any "
            f"of them."
        )
    elif not tried and not survey.broken and survey.others:
        _log.warning(
            "there is nothing to resume in %s, though it has checkpoints in deeper folders or "
            "without a step: %s",
            *(root.uri.redacted, ", ".join(path or "." for path in survey.others[:_NAMED])),
        )
    candidates = tuple(Candidate(c.path, c.step, is_own(c)) for c in tried)
    return Candidates(candidates, len(survey.broken), refused, advice)


def _load_kept(
    leader: _Leader, root: Place, candidates: Candidates, target: _Target, memory: MemoryLevel
) -> tuple[int, LoadedBytes] | None:
    """Load the newest whole generation in memory; return its step, and the bytes by source. None if
    memory holds none. After a failure all ranks look again: a damaged image may exist on another
    host, or be rebuilt, and a keeper may have disappeared. No choice is tried twice."""
    choices = candidates.memory
    options = target.options
    while choices.kept:
        choice = choices.kept[0]
        step = choice.generation.step
        call = Call("resume", root.uri.redacted, step)
        rebuild = partial(memory.rebuild, choice, choices.peers)
        load = partial(memory.load, choice, choices.peers, target.state, options, target.touched)
        verdict, error = Attempted(Outcome.WHOLE), None
        if choice.rebuilt:
            verdict, error = tried(call, options.deadline_s, rebuild)
        loads = verdict.outcome is Outcome.WHOLE
        if loads:
            verdict, error = tried_here(call, options.deadline_s, load)
        if verdict.outcome is Outcome.WHOLE:
            return step, memory.loaded
        leader.failed.add(choice)
        if loads and step not in target.failed:
            target.failed.append(step)
        _log.warning(
            "step %d in memory is damaged, looking for another copy or step: %s", step, error
        )
        look = ready(memory.look())
        choices = held_round(CHOOSE, call, options.deadline_s, look, leader.choose)
        while choices.waits:
            look = memory.look_later
            choices = held_round(CHOOSE, call, options.deadline_s, look, leader.choose)
    return None


def _load_first(root: Place, candidates: Candidates, target: _Target, back: Back) -> int | None:
    """Load the first whole checkpoint that fits; return its index, or None without any."""
    if not candidates.tried and not candidates.broken:
        return None
    misfit: Exception | None = None
    place = -1
    while (place := place + 1) < len(candidates.tried):
        candidate = candidates.tried[place]
        may_misfit = not candidate.own and back.step is None
        uri = str(join(root.uri, candidate.path))
        load = partial(load_state, uri, target.state, target.options, target.touched)
        call = Call("resume", root.uri.redacted, candidate.step)
        deadline_s = target.options.deadline_s
        others = [other.path for other in candidates.tried[place + 1 :]]
        decide = partial(verdict_and_skips, root, others)
        verdict, error = tried_here(call, deadline_s, load, decide, may_misfit=may_misfit)
        if verdict.outcome is Outcome.WHOLE:
            return place
        if verdict.outcome is Outcome.MISFIT:
            misfit = misfit or error
            _log.warning("the checkpoint %s does not fit, trying the previous one", candidate.path)
        else:
            _log.warning(
                "the checkpoint of step %d is damaged, trying the previous one: %s",
                candidate.step,
                error,
            )
        place += verdict.skip
    if misfit is not None:
        raise misfit
    if back.step is not None:
        raise DamagedError(
            f"the checkpoint of step {back.step} is damaged",
            uri=root.uri.redacted,
            advice=(
                "`holdfast verify` says what is wrong with it. resume(state, before=…) "
                "resumes from an earlier one."
            ),
        )
    raise DamagedError(
        f"none of the {len(candidates.tried) + candidates.broken} checkpoints of this run is whole",
        uri=root.uri.redacted,
        advice="`holdfast verify` says what is wrong with each. To start over, use another folder.",
    )
