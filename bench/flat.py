"""Compares flat ranges with boxes: the same state, held by 8 ranks as rows of each tensor or as
element ranges that begin and end inside rows.

The ranks are simulated: they save in one process, and load in it one after the other.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import holdfast

from ..drivers.registry import open_driver
from ..storage.operations.saving.save import run_save
from ..storage.operations.saving.save_job import SaveJob
from ..storage.ranks.keys import StoreLike
from ..storage.ranks.store_team import StoreTeam
from ..storage.runtime.engine import start
from ..storage.state.flattening.flatten import flatten
from .machine import describe
from .options import GIB, Options, parse, work_folder
from .report import Report, Series, Target, ratio

__all__: list[str] = []

WORLD = 8
ROWS = 1024
COLUMNS = 1000
BUDGET_NBYTES = 64 << 20
DEADLINE_S = 60.0
HOW = ("boxes", "flat ranges")
OFF_ROWS = 17
"""Offset of ranges from the beginning of a row, in elements."""


def _tensors(gib: float) -> list[torch.Tensor]:
    count = max(1, int(gib * GIB / (ROWS * COLUMNS * 4)))
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(ROWS, COLUMNS, generator=generator) for _ in range(count)]


def _part(tensor: torch.Tensor, how: str, rank: int) -> holdfast.Shard:
    """Return a rank's part of a tensor, in its own memory."""
    cuts = [ROWS * r // WORLD for r in range(WORLD + 1)]
    if how == "boxes":
        rows = tensor[cuts[rank] : cuts[rank + 1]].clone()
        return holdfast.Shard(rows, shape=tensor.shape, offset=(cuts[rank], 0))
    ends = [0, *(cut * COLUMNS + OFF_ROWS for cut in cuts[1:-1]), tensor.numel()]
    part = tensor.view(-1)[ends[rank] : ends[rank + 1]].clone()
    return holdfast.Shard(part, shape=tensor.shape, flat=(ends[rank], ends[rank + 1]))


def _state(tensors: Sequence[torch.Tensor], how: str, rank: int) -> dict[str, holdfast.Shard]:
    return {f"layers.{i}.weight": _part(tensor, how, rank) for i, tensor in enumerate(tensors)}


def _save(folder: Path, states: Sequence[dict[str, holdfast.Shard]]) -> None:
    """Save as the ranks of one job."""
    store = cast(StoreLike, HashStore())
    flats = [flatten(state) for state in states]

    async def run() -> None:
        driver = open_driver(str(folder))
        teams = [StoreTeam(store, rank, WORLD, "flat", DEADLINE_S) for rank in range(WORLD)]
        await asyncio.gather(
            *(
                run_save(driver, team, SaveJob(flat, None, BUDGET_NBYTES))
                for team, flat in zip(teams, flats, strict=True)
            )
        )
        await driver.close()

    start(run()).result()


def _load(folder: Path, states: Sequence[dict[str, holdfast.Shard]]) -> tuple[float, float]:
    """Load as each rank in turn. Return the seconds, and the processor's seconds."""
    expected = [shard.tensor.clone() for shard in states[-1].values()]
    for state in states:
        for shard in state.values():
            shard.tensor.zero_()
    began_s = time.perf_counter()
    began_processor_s = time.process_time()
    for state in states:
        holdfast.load(folder, into=state)
    took = (time.perf_counter() - began_s, time.process_time() - began_processor_s)
    if not all(map(torch.equal, expected, (shard.tensor for shard in states[-1].values()))):
        raise AssertionError("what was loaded is not what this rank should hold")
    return took


def _report(given: Options, folder: Path) -> Report:
    tensors = _tensors(given.gib)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    states = {how: [_state(tensors, how, rank) for rank in range(WORLD)] for how in HOW}
    del tensors
    wall = {how: Series(how) for how in HOW}
    processor = {how: Series(f"{how}, processor") for how in HOW}
    for how in HOW:
        _save(folder / how, states[how])
        _load(folder / how, states[how])
    for _ in range(given.runs):
        for how in HOW:
            seconds, processor_s = _load(folder / how, states[how])
            wall[how].seconds.append(seconds)
            processor[how].seconds.append(processor_s)
    boxes, flat = HOW
    rate = ratio(wall[boxes], wall[flat])
    processor_rate = ratio(processor[boxes], processor[flat])
    targets = [
        Target("rate of flat ranges, of that of boxes", rate, 0.9, at_least=True),
        Target("the same, by the processor", processor_rate, 0.9, at_least=True),
    ]
    if given.tiny:
        targets = []
    return Report(
        "flat",
        f"Loading {nbytes / GIB:.2f} GiB of {WORLD} ranks, one after the other, {given.runs} runs",
        describe(folder) | {"page cache": "kept"},
        ["", "median s", "GB/s", "processor s"],
        [
            [
                how,
                f"{wall[how].median:.2f}",
                f"{nbytes / wall[how].median / 1e9:.2f}",
                f"{processor[how].median:.2f}",
            ]
            for how in HOW
        ],
        targets,
        series=[*wall.values(), *processor.values()],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a load is wrong."""
    given = parse("flat", __doc__, argv, gib=1.0, runs=5)
    with work_folder(given.folder) as folder:
        _report(given, folder).emit(given.json, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
