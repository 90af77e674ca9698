"""Explore schedules, replay one, or show that broken engines are caught.

make sim SEEDS=5000          this many runs, with about twenty schedules each, on all cores
make sim SEED=4711           one run, with its whole log
make sim SEED=4711 SIM_ARGS=--channels
                             the same for weight channels, which make sim also explores
make sim-broken              broken engines, and the number of schedules until each is caught
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the tests' shared helpers

import torch
from support.simulation import channel_run, channel_schedule, channels
from support.simulation.breaking import seeds_until_violation
from support.simulation.broken import BROKEN, seeds_until_caught
from support.simulation.broken_channels import BROKEN_CHANNELS, schedule_of, violation
from support.simulation.engine import installed
from support.simulation.found import SCHEDULES
from support.simulation.run import Failure, Tally, explore, run
from support.simulation.schedule import Schedule, drawn

BATCH = 50
SHOW_S = 10.0
OneBatch = Callable[[range], tuple[Failure | None, Tally]]


def main() -> int:
    """Return the exit status: 1 if a promise was broken, or a broken engine was not caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one, with its log")
    parser.add_argument(
        "--broken",
        type=int,
        metavar="MOST",
        help="the broken engines, at most so many schedules each",
    )
    parser.add_argument(
        "--channels", action="store_true", help="weight channels, instead of saves and prunings"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    simulated = channels.installed if given.channels else installed
    with simulated():
        if given.broken:
            lines = channel_lines if given.channels else broken_lines
            return show_broken(lines(given.broken))
        if given.seed is not None:
            return replay_channel(given.seed) if given.channels else replay(drawn(given.seed))
        one_batch = batch_of_channels if given.channels else batch_of_saves
        return many(given.first, given.seeds, given.jobs, one_batch)


def many(first: int, seeds: int, jobs: int, one_batch: OneBatch) -> int:
    """Run this many seeds, and print the results."""
    began_s, total, shown_s = time.perf_counter(), Tally(), time.perf_counter()
    gc.collect()
    gc.freeze()  # otherwise a third of the time goes into visiting torch's objects,
    gc.set_threshold(50_000, 20, 1000)  # and those that a run still holds
    batches = [range(a, min(a + BATCH, first + seeds)) for a in range(first, first + seeds, BATCH)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for failure, tally in pool.imap_unordered(one_batch, batches):
            total.add(tally)
            if failure is not None:
                pool.terminate()
                print(f"\nFAILED: {failure.why}: make sim SEED={failure.schedule.seed}", end="")
                print(" SIM_ARGS=--channels" if one_batch is batch_of_channels else "")
                return 1
            if time.perf_counter() > shown_s + SHOW_S:
                shown_s = time.perf_counter()
                print(
                    f"{total.runs:>7,} runs, {total.schedules:>9,} schedules, "
                    f"{shown_s - began_s:,.0f} s",
                    flush=True,
                )
    print(*total.lines(), sep="\n")
    seconds = time.perf_counter() - began_s
    work, runs = total.schedules / total.cpu_s, total.runs / total.cpu_s
    print(
        f"{seconds:,.1f} s on {jobs} processes; in a second of one core {work:,.0f} schedules, of "
        f"them {runs:,.1f} whole runs"
    )
    return 0


def batch_of_saves(seeds: range) -> tuple[Failure | None, Tally]:
    """Explore seeds in a process of the pool."""
    return explored(explore, seeds)


def batch_of_channels(seeds: range) -> tuple[Failure | None, Tally]:
    """Explore seeds of weight channels in a process of the pool."""
    return explored(channel_run.explore, seeds)


def explored(
    explore: Callable[[range, Tally], Failure | None], seeds: range
) -> tuple[Failure | None, Tally]:
    """Explore seeds, and measure the processor time."""
    tally, began_s = Tally(), time.process_time()
    failure = explore(seeds, tally)
    tally.cpu_s = time.process_time() - began_s
    return failure, tally


def replay(schedule: Schedule) -> int:
    """Run one schedule, and print its whole log."""
    print(schedule)
    failure = run(schedule, log=print)
    print("all promises were kept" if failure is None else f"FAILED: {failure.why}")
    return int(failure is not None)


def replay_channel(seed: int) -> int:
    """Run the schedule of one weight channel, and print its whole log."""
    print(channel_schedule.drawn(seed))
    channel_run.run_seed(seed, log=print)
    print("all promises were kept")
    return 0


def show_broken(lines: Iterator[tuple[str, bool]]) -> int:
    """Print the table of broken engines."""
    shown, missed = 0, 0
    for line, caught in lines:
        print(line, flush=True)
        shown += 1
        missed += not caught
    print(f"{shown - missed} of {shown} broken engines were caught")
    return 1 if missed else 0


def channel_lines(most: int) -> Iterator[tuple[str, bool]]:
    """Yield a line for each broken weight channel."""
    for channel in BROKEN_CHANNELS:
        with channel.engine():
            why = violation(schedule_of(channel))
        how = "the known schedule"
        if not why:
            seed, why = seeds_until_violation(channel_run.run_seed, channel, most)
            how = f"seed {seed}"
        yield f"{channel.name:85} {how}: {why or 'NOT CAUGHT':.100}", bool(why)


def broken_lines(most: int) -> Iterator[tuple[str, bool]]:
    """Yield a line for each broken engine: the number of schedules, and the failure."""
    for engine in BROKEN:
        tried, seed, failure = seeds_until_caught(engine, most)
        how = f"{tried:6} schedules, seed {seed:6}"
        if failure is None and engine.name in SCHEDULES:
            with engine.engine():
                failure = run(SCHEDULES[engine.name])
            how = f"none of {tried:,}, but the one aimed at it"
        what = failure.why if failure else "NOT CAUGHT"
        yield f"{engine.name:85} {how}: {what:.100}", failure is not None


if __name__ == "__main__":
    sys.exit(main())
