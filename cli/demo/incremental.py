"""``holdfast demo --incremental``: saves whole and incrementally, side by side.

One of the checkpoints is then deleted by hand, and the run resumes on another number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

from ...bench.place import clear
from ...core.units import size_text
from ...drivers.uri import parse, redact
from ...storage.operations.reading.reader import open as open_checkpoint
from ..progress import last_line
from ..tables import columns
from ..text import one_of
from .account import Account
from .jobs import Job
from .journal import Event
from .plan import INCREMENTAL, WHOLE, Plan, checkpoint_uri

TITLES = (
    "step",
    *("whole: written", "seconds", "space"),
    *("incremental: written", "seconds", "space"),
)


class Outcome:
    """Outcome of a job: ``losses`` by step, ``digests`` of the last states of its ranks, and the
    reports of ``saves`` by folder and step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.digests: set[str] = set()
        self.saves: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, event: Event) -> None:
        """Add an event."""
        told = event.told
        if event.kind == "step" and event.rank == 0:
            self.losses[told["step"]] = told["loss"]
        elif event.kind == "saved":
            self.saves[told["into"], told["step"]].append(told)
        elif event.kind == "ended":
            self.digests.add(told["digest"])

    def continues(self, earlier: Outcome) -> bool:
        """Return whether each loss and the last state equal those of ``earlier`` bit for bit."""
        same = all(loss == earlier.losses[step] for step, loss in self.losses.items())
        return same and len(self.digests) == 1 and self.digests == earlier.digests


def show_incremental(plan: Plan, root: str, folder: Path) -> int:
    """Run the demo. Return 0 if each remaining checkpoint verifies and the run resumes bit for bit,
    else 1. Raises a HoldfastError."""
    account = Account()
    account.title("A language model is fine-tuned with LoRA, and a save costs what has changed.")
    account.chapter(
        f"Train on {one_of(plan.before, 'rank')}, and save every {plan.every} steps, "
        "whole and incrementally"
    )
    account.say("random frozen weights under FSDP2, trained adapters; checkpoints go to")
    account.say(redact(root))
    before = _run(folder / "logs" / "before", plan, plan.before, root)
    steps = range(plan.every, plan.steps + 1, plan.every)
    for line in columns(TITLES, _rows(before, root, steps), left=()):
        print(f"   {line}", flush=True)
    for why in sorted({save["why_whole"] for save in before.saves[INCREMENTAL, steps[-1]]} - {""}):
        account.say(f"saves were whole: {why}")

    middle, last = steps[len(steps) // 2], steps[-2]
    account.chapter(f"Delete step {middle} by hand, and verify the other checkpoints")
    clear(parse(checkpoint_uri(root, middle, INCREMENTAL)))
    damaged = [step for step in steps if step != middle and not _verifies(root, step)]
    if damaged:
        account.say(f"damaged: {', '.join(map(str, damaged))}", "red")
        return 1
    account.say("every other one is whole: each byte was read and checked", "green")

    account.chapter(f"Resume from step {last} on {one_of(plan.after, 'rank')}")
    after = _run(folder / "logs" / "after", plan, plan.after, root, "--resume", str(last))
    span = f"the losses of steps {last + 1} to {plan.steps}, and all weights and moments after them"
    if not after.continues(before):
        account.say(f"no: {span} are not those of {plan.before} ranks", "red")
        return 1
    account.say(f"yes: {span}", "green")
    account.say(f"are bit for bit those of {one_of(plan.before, 'rank')}", "green")
    return 0


def _run(folder: Path, plan: Plan, ranks: int, root: str, *options: str) -> Outcome:
    parts = lcm(plan.before, plan.after)
    arguments = ["--uri", root, "--steps", plan.steps, "--every", plan.every, "--parts", parts]
    outcome = Outcome()
    with last_line(lines=False) as show:
        show("torchrun starts the ranks")

        def on_event(event: Event) -> None:
            outcome.add(event)
            if event.kind == "step" and event.rank == 0:
                show(f"step {event.told['step']}/{plan.steps}  loss {event.told['loss']:.3f}")

        script = "holdfast.cli.demo.train_incremental"
        Job(folder, ranks, [*map(str, arguments), *options], script=script).run(on_event)
    return outcome


def _rows(outcome: Outcome, root: str, steps: Sequence[int]) -> list[list[str]]:
    rows = []
    seen: set[int] = set()
    for step in steps:
        row = [str(step)]
        for kind in (WHOLE, INCREMENTAL):
            reports = outcome.saves[kind, step]
            written = sum(report["written"] for report in reports)
            seconds = max(report["durable_s"] for report in reports)
            space = space_nbytes(
                checkpoint_uri(root, step, kind),
                seen,
                sum(report["stored_nbytes"] for report in reports),
                sum(report["borrowed_nbytes"] for report in reports),
            )
            row += [size_text(written), f"{seconds:.2f}", size_text(space)]
        rows.append(row)
    return rows


def space_nbytes(uri: str, seen: set[int], stored_nbytes: int, borrowed_nbytes: int) -> int:
    """Return the bytes that the checkpoint at ``uri`` adds to its storage, and add its files to
    ``seen``.

    A file counts once, however many checkpoints link to it. Without links, borrowed bytes are
    clones on a file system, and take no space. Other storage stores its copies.
    """
    where = parse(uri)
    if where.scheme != "file":
        return stored_nbytes
    found = [path.stat() for path in Path(where.location).rglob("*") if path.is_file()]
    files = {status.st_ino: status.st_blocks * 512 for status in found}
    linked = not seen.isdisjoint(files)
    added = sum(nbytes for inode, nbytes in files.items() if inode not in seen)
    seen.update(files)
    return added if linked else added - borrowed_nbytes


def _verifies(root: str, step: int) -> bool:
    with open_checkpoint(checkpoint_uri(root, step, INCREMENTAL)) as checkpoint:
        return checkpoint.verify().ok
