"""Measures durable saves of a whole state by one process: this library, its peers, and the limit of
the storage.

Data that a contestant leaves in the page cache is synced, file by file and folder by folder, within
the measured time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import holdfast

from ..drivers.uri import parse
from .contest import Contestant, contest, header, rows
from .limits import best_setting
from .machine import describe, sync_tree
from .options import TINY_GIB, Options, work_folder
from .options import parse as parse_options
from .peers.choice import beside_ours
from .peers.peer import Peer
from .report import Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

__all__ = ["contestant", "targets"]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def contestant(peer: Peer, path: Path, state: State, *, check: bool) -> Contestant:
    """Return a contestant that saves. Its checkpoint is removed after each run."""
    uri = parse(path)

    def run() -> None:
        peer.save(uri, state)
        if not peer.durable:
            sync_tree(path)

    def after() -> None:
        if check:
            expected = digests(state)
            zero(state)
            peer.load(uri, state)
            if digests(state) != expected:
                raise AssertionError(f"{peer.name}: what was loaded is not what was saved")
        _remove(path)

    return Contestant(peer.name, run, after=after)


def _saving(folder: Path, alone: bool) -> list[Peer]:
    return [peer for peer in beside_ours(parse(folder), alone=alone) if peer.saves]


def _warm_up(folder: Path, alone: bool) -> None:
    """Import everything and start all threads before any timing."""
    small = build(TINY_GIB)
    for peer in _saving(folder, alone):
        entered = contestant(peer, folder / "small", small, check=True)
        entered.run()
        entered.after()
    holdfast.release_memory()


def _contestants(folder: Path, state: State, options: Options) -> list[Contestant]:
    raw = best_setting(folder / "raw", nbytes_of(state), reading=False, settle_s=options.settle_s)
    others = [
        contestant(peer, folder / "saved", state, check=options.tiny)
        for peer in _saving(folder, options.alone)
    ]
    return [Contestant("limit", raw.write, after=raw.path.unlink), *others]


def targets(found: Sequence[Series], of_limit: float, of_dcp: float) -> list[Target]:
    """Return the targets against the limit, and against DCP with its defaults."""
    by_name = {series.name: series for series in found}
    ours = by_name["holdfast"]
    out = [
        Target(
            "rate, as a share of the limit", ratio(by_name["limit"], ours), of_limit, at_least=True
        )
    ]
    if "DCP" in by_name:
        out.append(
            Target("times faster than DCP", ratio(by_name["DCP"], ours), of_dcp, at_least=True)
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse_options("save", __doc__, argv)
    with work_folder(options.folder) as folder:
        _warm_up(folder, options.alone)
        state = build(options.gib)
        found = contest(_contestants(folder, state, options), options.runs, options.settle_s)
        nbytes = nbytes_of(state)
        title = (
            f"Durable save: {nbytes / 1e9:.2f} GB in {len(digests(state))} tensors, one "
            f"process, {options.runs} rounds"
        )
        if options.tiny:
            judged = []
        else:
            judged = targets(found, 0.85, 5.0)
        report = Report(
            "save", title, describe(folder), header(), rows(found, nbytes), judged, series=found
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
