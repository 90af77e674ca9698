"""Measures cold loads of a whole state into existing tensors: this library, its peers, and the
limit of the storage.

Cold means an empty page cache. Before each run the tensors are zeroed, and afterwards they are
compared with the saved ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import holdfast

from ..drivers.uri import parse
from .contest import Contestant, contest, header, rows
from .limits import best_setting
from .machine import describe, drop_caches, sync_tree
from .options import TINY_GIB, Options, work_folder
from .options import parse as parse_options
from .peers.choice import beside_ours
from .peers.peer import Peer
from .report import Report
from .save import targets
from .states import State, build, digests, nbytes_of, zero

__all__ = ["contestant"]


def contestant(peer: Peer, path: Path, state: State, expected: dict[str, bytes]) -> Contestant:
    """Save now, and return a contestant that loads."""
    uri = parse(path)
    peer.save(uri, state)
    sync_tree(path)

    def before() -> None:
        zero(state)
        drop_caches(path)

    def after() -> None:
        if digests(state) != expected:
            raise AssertionError(f"{peer.name}: what was loaded is not what was saved")

    return Contestant(peer.name, lambda: peer.load(uri, state), before, after)


def _contestants(folder: Path, state: State, options: Options) -> list[Contestant]:
    expected = digests(state)
    others = [
        contestant(peer, folder / peer.name.replace(" ", ""), state, expected)
        for peer in beside_ours(parse(folder), alone=options.alone)
        if peer.loads
    ]
    holdfast.release_memory()  # or the load would reuse, uncounted, memory kept from the save
    raw = best_setting(folder / "raw", nbytes_of(state), reading=True, settle_s=options.settle_s)
    return [Contestant("limit", raw.read, before=lambda: drop_caches(folder)), *others]


def _warm_up(folder: Path, alone: bool) -> None:
    small = build(TINY_GIB)
    folder.mkdir()
    expected = digests(small)
    for peer in beside_ours(parse(folder), alone=alone):
        entered = contestant(peer, folder / peer.name.replace(" ", ""), small, expected)
        entered.before()
        entered.run()
        entered.after()
    holdfast.release_memory()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse_options("load", __doc__, argv)
    with work_folder(options.folder) as folder:
        _warm_up(folder / "small", options.alone)
        state = build(options.gib)
        found = contest(_contestants(folder, state, options), options.runs, options.settle_s)
        nbytes = nbytes_of(state)
        title = (
            f"Cold load: {nbytes / 1e9:.2f} GB in {len(digests(state))} tensors, one process, "
            f"{options.runs} rounds"
        )
        if options.tiny:
            judged = []
        else:
            judged = targets(found, 0.85, 3.0)
        report = Report(
            "load", title, describe(folder), header(), rows(found, nbytes), judged, series=found
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
