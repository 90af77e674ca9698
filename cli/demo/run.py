"""``holdfast demo``: train, kill a rank during a save, resume with fewer ranks, and compare."""

from __future__ import annotations

import re
import time
from pathlib import Path

from ...core.units import size_text
from ...drivers.uri import parse, redact
from ...errors import SaveError
from ...storage.operations.maintenance.listing import list_checkpoints
from ..progress import last_line
from ..text import one_of
from .account import Account
from .incremental import show_incremental
from .jobs import Job
from .journal import Event, Record
from .picture import draw
from .plan import Plan, checkpoint_uri, checkpoints_uri, prepare
from .torn import Found, find
from .weights import show_weights

DIFFERENCE_MAX = 0.01
"""Limit of the difference in loss. A different order of additions causes rounding errors only; a
step lost or repeated causes far more."""
_LOOK_AFTER_S = 1.0
"""Time after the kill. By then the other ranks have written their images, and have not noticed the
loss yet."""


def main(
    *,
    uri: str | None,
    out: str,
    steps: int,
    ranks_before: int,
    ranks_after: int,
    incremental: bool,
    weights: bool,
) -> int:
    """Run the demo. Return 0 if training continues as without an interruption, else 1. Raises a
    HoldfastError."""
    plan = Plan(steps, ranks_before, ranks_after)
    root = checkpoints_uri(uri, Path(out).absolute())
    folder = prepare(out)
    if weights:
        return show_weights(root, folder)
    if incremental:
        return show_incremental(plan, root, folder)
    demo = _Demo(plan, root, folder)
    demo.run()
    return int(demo.difference() > DIFFERENCE_MAX)


class _Demo:
    def __init__(self, plan: Plan, root: str, folder: Path) -> None:
        self.plan = plan
        self.root = root
        self.folder = folder
        self.account = Account()
        self.before = Record(plan.before)
        self.after = Record(plan.after)
        self.reference = Record(plan.before)
        self.killed_at = plan.kill_at
        self.torn: list[Found] = []
        self.missed = True
        """True if the kill came after the commit."""

    def run(self) -> None:
        began_s = time.monotonic()
        self.account.title(
            "A language model in training loses a rank during a save, and resumes with fewer ranks."
        )
        self._train_and_kill()
        self._look_at_what_is_left()
        self._go_on()
        self._compare()
        picture = self.folder / "loss.svg"
        victim = self.plan.victim
        draw(
            self.before, self.after, self.reference,
            killed_at=self.killed_at, victim=victim, file=picture,
        )  # fmt: skip
        self.account.chapter(f"Results ({time.monotonic() - began_s:.0f} s in total)")
        self.account.say(f"{picture}  the loss across the kill")

    def difference(self) -> float:
        """Return the greatest difference in loss, after the kill, from the uninterrupted run."""
        return self.after.difference(self.reference)

    def _train_and_kill(self) -> None:
        plan = self.plan
        self.account.chapter(
            f"Train on {one_of(plan.before, 'rank')}, and save every {plan.every} steps"
        )
        self.account.say("FSDP2 and AdamW under torchrun, gloo on loopback; checkpoints go to")
        self.account.say(redact(self.root))
        for self.killed_at in range(plan.kill_at, plan.steps + 1, plan.every):
            kill = ["--kill-at", str(self.killed_at), "--victim", str(plan.victim)]
            self._job(
                f"before-{self.killed_at}", self.before, "--uri", self.root, *kill, survives=False
            )
            if not self.missed:
                return
            self.account.say(
                f"the kill came too late, step {self.killed_at} was committed: trying again",
                "red",
            )
            self.before.failures.clear()
        raise SaveError(
            "no kill came before the commit",
            advice="Look at the logs; or try again, with more --steps.",
        )

    def _job(self, name: str, record: Record, *options: str, survives: bool = True) -> None:
        plan = self.plan
        arguments = ["--steps", str(plan.steps), "--every", str(plan.every)]
        with last_line(lines=False) as show:
            show("torchrun starts the ranks")

            def on_event(event: Event) -> None:
                self._note(record, event)
                if event.kind == "step" and event.rank == 0:
                    show(f"step {event.told['step']}/{plan.steps}  {record.progress()}")

            Job(self.folder / "logs" / name, record.ranks, [*arguments, *options]).run(
                on_event, survives=survives
            )

    def _note(self, record: Record, event: Event) -> None:
        saves = len(record.saves)
        record.add(event)
        for saved in record.saves[saves:]:
            rate = f"{size_text(int(saved.nbytes / saved.durable_s))}/s"
            self.account.say(
                f"step {saved.step:2}  {record.progress()}  saved {size_text(saved.nbytes)} in "
                f"{saved.durable_s:.2f} s ({rate}), training waited {saved.captured_s:.2f} s"
            )
        if event.kind == "loaded" and len(record.loads) == record.ranks:
            self._say_resumed(record)
        if event.kind == "killed":
            self.account.say(
                f"step {self.killed_at:2}  rank {event.rank} is killed while its image is "
                f"being written",
                "red",
            )
            time.sleep(_LOOK_AFTER_S)
            self.torn = find(self._torn_uri())
            self.missed = self.killed_at in self._committed()

    def _torn_uri(self) -> str:
        return checkpoint_uri(self.root, self.killed_at)

    def _committed(self) -> list[int]:
        return [
            c.step for c in list_checkpoints(self.root) if c.step is not None and c.problem is None
        ]

    def _look_at_what_is_left(self) -> None:
        self.account.chapter("What the kill left, and what the other ranks reported")
        self.account.say(f"below {redact(self._torn_uri())}, a second later:")
        width = max((len(f.key) for f in self.torn), default=0)
        for f in self.torn:
            state = "whole" if f.finished else f"unfinished, {f.stored_nbytes:,} stored"
            self.account.say(f"  {f.key:<{width}} {f.nbytes:>12,} bytes  {state}")
        steps = " and ".join(map(str, self._committed()))
        self.account.say(
            f"no manifest, so no checkpoint: holdfast.list_checkpoints finds steps {steps}"
        )
        self._say_failures()
        left = len(find(self._torn_uri()))
        if left:
            self.account.say(
                f"{one_of(left, 'file')} of it remain; the next save of this step deletes them"
            )
        else:
            self.account.say("rank 0, which leads the save, then aborted it and deleted its files")

    def _say_failures(self) -> None:
        """Print the first error of torch, and the first of ours, from the surviving ranks."""
        for whose, ours in (("torch", False), ("holdfast", True)):
            said = [e for e in self.before.failures if e.told["ours"] == ours]
            if said:
                first = min(said, key=lambda e: e.time_s)
                message = " ".join(first.told["message"].split())
                if not ours:  # drop the C++ source line and the guesses
                    message = re.sub(r"^\[\S+\] ", "", message).partition(". ")[0]
                self.account.say(f"{whose}, on rank {first.rank}: {message}")

    def _go_on(self) -> None:
        self.account.chapter(f"Resume on {one_of(self.plan.after, 'rank')}")
        self._job("after", self.after, "--uri", self.root)
        left = {f.key for f in self.torn} & {f.key for f in find(self._torn_uri())}
        rest = "nothing of the torn attempt is left"
        if left:
            rest = f"{one_of(len(left), 'file')} of the torn attempt stay"
        self.account.say(f"step {self.killed_at} is complete now, and {rest}")

    def _say_resumed(self, record: Record) -> None:
        wanted, read = record.loaded_nbytes()
        name = parse(record.loads[0]["uri"]).location.rpartition("/")[2]
        seconds = max(load["seconds"] for load in record.loads)
        figures = (
            f"wanted {size_text(wanted)} and read {size_text(read)} ({read / wanted:.1%}) "
            f"in {seconds:.2f} s"
        )
        self.account.say(
            f"resumed from {name}, resharded from {self.plan.before} ranks to {record.ranks}: "
            f"{figures}"
        )

    def _compare(self) -> None:
        steps = self.plan.steps
        after = self.after
        reference = self.reference
        self.account.chapter("Compare with an uninterrupted run")
        self._job("reference", reference)
        ours = after.losses[steps]
        theirs = reference.losses[steps]
        self.account.say(f"loss at step {steps}: {ours:.6f}; in an uninterrupted run: {theirs:.6f}")
        before, since = (f"{record.difference(reference):.1e}" for record in (self.before, after))
        found = f"losses differ by at most {before} before the kill, and by {since} after it"
        if self.difference() <= DIFFERENCE_MAX:
            self.account.say(f"yes: {found} (ranks add in a different order)", "green")
        else:
            self.account.say(f"no: {found} (that is more than rounding)", "red")
