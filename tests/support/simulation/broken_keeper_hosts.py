"""Keepers of several hosts that are wrong on purpose, each in one way. A simulator that does not
catch them proves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Inventory
from holdfast.storage.keeper.agreement import Agreement
from holdfast.storage.keeper.decisions import choice
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.standing import Report, Standing
from holdfast.storage.keeper.flushing import flush
from holdfast.storage.keeper.parity.guards import Guards
from holdfast.storage.keeper.reporting import Reporting
from holdfast.storage.training import keeper_inventory as memory_survey
from holdfast.storage.training.epochs import Epochs

from . import keeper_peers
from .breaking import Broken, Patch, listed_in
from .broken_keepers import contradicting, one_missing, one_raises, touched_goes_on
from .keeper_host import HostJob, HostKeeper, HostTrainer
from .keeper_hosts import Hosts
from .keepers import Held, Record

__all__ = ["BROKEN_KEEPER_HOSTS"]

BROKEN_KEEPER_HOSTS: list[Broken] = []

broken = listed_in(BROKEN_KEEPER_HOSTS)


broken("a step is agreed on before all hosts have sealed it")(one_missing)
broken("hosts whose replicas have diverged agree")(contradicting)
broken("a state that a failed load has touched begins an epoch")(touched_goes_on)
broken("one rank raises where a load has failed, and another goes on")(one_raises)


@broken("a keeper never says that a step will not come")
def _never_missing() -> Iterator[Patch]:
    yield Generations, "will_not_come", lambda self, id: False


@broken("what one keeper has made parity of is protected")
def _one_is_enough() -> Iterator[Patch]:
    real = Lead._note_guards

    def note(self: Lead, report: Report) -> None:
        if self._guard is not None and report.guarded == self._guard:
            self._have_guarded = set(self._names)
        real(self, report)

    yield Lead, "_note_guards", note


@broken("parity of another step counts as parity of this one")
def _any_parity() -> Iterator[Patch]:
    real = Lead._note_guards

    def note(self: Lead, report: Report) -> None:
        real(self, replace(report, guarded=self._guard) if report.guarded else report)

    yield Lead, "_note_guards", note


@broken("images that parity was made of may be written over")
def _images_go() -> Iterator[Patch]:
    yield Generations, "guarding", lambda self, ids: None


@broken("parity is given up for that of the next step before all have made that", first=30)
def _parity_goes() -> Iterator[Patch]:
    real = Guards.keep
    yield Guards, "keep", lambda self, ids: real(self, ())


@broken("a resume that all keepers take part in gives up what is protected")
def _resume_forgets() -> Iterator[Patch]:
    real = Agreement.enter

    def enter(self: Agreement, epoch: int, *given: Any) -> None:
        if epoch > self.reporting.lead.epoch:
            self._guarded, self._guarding, self.protected = set(), set(), None
            self._held.generations.guarding(())
        real(self, epoch, *given)

    yield Agreement, "enter", enter


@broken("a keeper tells the next lead keeper nothing of what is protected")
def _told_nothing() -> Iterator[Patch]:
    real = Agreement.report

    def report(self: Agreement) -> Report:
        said = real(self)
        return said if self.reporting.leads else replace(said, guarded_by_all=None)

    yield Agreement, "report", report


@broken("a keeper tells the next lead keeper nothing of what waits for it", first=40)
def _waits_in_silence() -> Iterator[Patch]:
    real = Agreement.report
    yield Agreement, "report", lambda self: replace(real(self), wanted=())


@broken("what a keeper is handed is not written to where it was to be")
def _asked_once() -> Iterator[Patch]:
    real = HostKeeper.wish
    first = set[tuple[HostTrainer, int]]()

    def wish(self: HostKeeper, trainer: HostTrainer, step: int) -> None:
        if (trainer, step) not in first:
            first.add((trainer, step))
            real(self, trainer, step)

    yield HostKeeper, "wish", wish


@broken("what a new lead keeper has not heard of is void")
def _unheard_of() -> Iterator[Patch]:
    def settled(self: Agreement, standing: Standing, agreed: Any) -> list[GenerationId]:
        named = {*agreed, *standing.open}
        return [id for id in self._held.generations.undecided if id not in named]

    yield Agreement, "_settled", settled


@broken("an image is made again without being compared with its checksums")
def _not_verified() -> Iterator[Patch]:
    yield keeper_peers, "is_sealed", lambda memory, label: True
    yield Record, "intact", lambda self, held, pieces: True


@broken("parity is made of what a keeper holds, of whatever step")
def _any_step() -> Iterator[Patch]:
    def images(self: Any, keeper: HostKeeper) -> list[Held]:
        newest: dict[int, Held] = {}
        for held in keeper.slots.values():
            if held.label is not None:
                before = newest.get(held.label.rank)
                label = None if before is None else before.label
                if label is None or held.label.generation > label.generation:
                    newest[held.label.rank] = held
        return list(newest.values())

    async def pieces(self: Any, name: str, number: int) -> Mapping[int, Any]:
        keeper = await keeper_peers._at(name)
        return {
            held.label.rank: held.memory.pieces[number]
            for held in images(self, keeper)
            if held.label is not None
        }

    yield keeper_peers.Peers, "pieces", pieces


@broken("a restart goes on from what is not agreed on", first=175)
def _not_agreed() -> Iterator[Patch]:
    real = HostKeeper.inventory

    def inventory(self: HostKeeper) -> Inventory:
        found = real(self)
        held = tuple(replace(one, agreed=True) for one in found.generations)
        return replace(found, generations=held)

    yield HostKeeper, "inventory", inventory


@broken("a restart goes on from a step that a later one has dropped", first=50)
def _dropped() -> Iterator[Patch]:
    yield Epochs, "has_left", lambda self, generation: False
    yield Generations, "_drop_later", lambda self, chosen: None


@broken("a restart does not look for parity")
def _no_parity() -> Iterator[Patch]:
    def rebuilt(rank: int, holders: Sequence[Sequence[str]], guards: Any) -> str:
        return "it is lost"

    yield choice, "_rebuilt", rebuilt


@broken("what a restart may choose is given up while it chooses", first=35)
def _not_offered() -> Iterator[Patch]:
    yield Generations, "offer", lambda self, client: None
    yield Guards, "offer", lambda self, client, ids: None


@broken("a restart goes by what a keeper offered before the others did", first=95)
def _early_look() -> Iterator[Patch]:
    def survey(self: Hosts, job: HostJob) -> Any:
        stocks = yield from self.look(job)
        for host in self.hosts.values():
            self.note_protected(host.keeper)
        others = yield from self.asked(stocks)
        return stocks, others, [one for one in (self.agreed, self.guarded) if one is not None]

    yield Hosts, "survey", survey


@broken("what one attempt has written counts for another")
def _any_attempt() -> Iterator[Patch]:
    real = Lead.hear

    def hear(self: Lead, report: Report) -> None:
        part, flush = report.written, self._flush
        if part is not None and flush is not None:
            report = replace(report, written=replace(part, attempt=flush.attempt))
        real(self, report)

    yield Lead, "hear", hear


@broken("a checkpoint is committed though a keeper has written nothing")
def _nobody_waits() -> Iterator[Patch]:
    async def written(given: Reporting, is_wanted: Any) -> Mapping[str, Any]:
        return {}

    yield flush, "_written", written


@broken("the next epoch is counted from what storage knows alone", first=18)
def _epochs_anew() -> Iterator[Patch]:
    yield Epochs, "newest", property(lambda self: -1)


@broken("a struck image counts as held", first=50)
def _struck_holder() -> Iterator[Patch]:
    real = memory_survey.kept_in_memory

    def kept(*given: Any) -> Any:
        *stocks, _ = given
        return real(*stocks)

    yield memory_survey, "kept_in_memory", kept


@broken("a keeper that holds a struck image says that it has rebuilt it", first=50)
def _struck_is_whole() -> Iterator[Patch]:
    real = choice.choices

    def anywhere(stocks: Any, rebuilders: Sequence[str], is_of_use: Any, struck: Any = ()) -> Any:
        names = [name for _, _, name in struck if name in rebuilders]
        return real(stocks, names[:1] or rebuilders, is_of_use, struck)

    yield memory_survey, "choices", anywhere
    yield HostKeeper, "is_whole", lambda self, held: True
