"""Which trial of the conformance kit must catch which broken driver.

Run as a program it holds each against that trial, and prints as JSON what failed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers import conformance
from holdfast.drivers.conformance import place
from support.broken import (
    Appends,
    Borrows,
    CommitsHoles,
    CutsAnywhere,
    DefaultsElsewhere,
    DeletesNeighbours,
    DeletesNoRoots,
    DeviationThatFails,
    DeviationThatPasses,
    EndsAnywhere,
    EndsAsDeclared,
    ErrorsSayNothing,
    ExclusiveNotAtomic,
    FetchesFewer,
    FirstPage,
    FoldsKeys,
    GetsAnything,
    Healthy,
    IgnoresStart,
    LeaksDescriptors,
    LeaksTasks,
    LeaksTemporaries,
    LeaksThreads,
    LooksTooLate,
    LosesEmptyObjects,
    OpenAfterClose,
    OptionsInUri,
    OverstatesItsLimit,
    PlainErrors,
    PrefixByLetters,
    ReadsOn,
    RefusesLate,
    RefusesLateAndKeeps,
    ReusesFetched,
    ShortRead,
    StaleReads,
    SwallowsCancellation,
    SwallowsErrors,
    SweepsTheLiving,
    TakesFewer,
    TakesHalfAPiece,
    TornByCancellation,
    TornPut,
    UnsafeKeys,
    VisibleEarly,
)

__all__ = ["CASES", "FAULTS", "main", "scheme_of"]

CASES: dict[type[Healthy], str] = {
    VisibleEarly: "an_upload_is_invisible_until_it_commits",
    TornPut: "a_reader_sees_the_old_or_the_new_object",
    ExclusiveNotAtomic: "an_exclusive_put_has_one_winner",
    IgnoresStart: "any_range_can_be_read",
    ShortRead: "a_read_past_the_end_is_damage",
    ReusesFetched: "fetched_memory_stays_as_it_is",
    FetchesFewer: "a_fetch_past_the_end_is_damage",
    CutsAnywhere: "pieces_hold_the_bytes_of_any_range",
    TakesFewer: "pieces_past_the_end_are_damage",
    TakesHalfAPiece: "pieces_past_the_end_are_damage",
    LeaksTemporaries: "an_aborted_upload_leaves_nothing",
    CommitsHoles: "an_incomplete_upload_does_not_commit",
    EndsAsDeclared: "an_upload_may_end_early",
    EndsAnywhere: "an_upload_that_lacks_its_end_does_not_commit",
    Appends: "parts_from_any_address_make_the_object",
    Borrows: "a_written_part_belongs_to_the_upload",
    PrefixByLetters: "a_listing_goes_by_whole_names",
    FirstPage: "a_listing_of_many_objects_is_complete",
    DeletesNeighbours: "deleting_all_takes_what_lies_below_and_no_more",
    UnsafeKeys: "an_unsafe_key_is_refused_everywhere",
    FoldsKeys: "strange_keys_are_stored_faithfully_or_refused",
    PlainErrors: "errors_say_where",
    SwallowsErrors: "an_object_comes_back",
    ErrorsSayNothing: "errors_say_where",
    SwallowsCancellation: "cancelled_looks_change_nothing",
    TornByCancellation: "a_cancelled_put_is_whole_or_absent",
    ReadsOn: "a_cancelled_read_leaves_the_buffer_alone",
    StaleReads: "a_replaced_or_deleted_object_is_not_read_again",
    SweepsTheLiving: "a_sweep_harms_nobody_alive",
    LeaksThreads: "nothing_outlives_close",
    LeaksDescriptors: "nothing_outlives_close",
    LeaksTasks: "nothing_outlives_close",
    OpenAfterClose: "a_closed_driver_says_so",
    GetsAnything: "what_is_not_small_is_not_got",
    LooksTooLate: "what_is_not_small_is_not_got",
    OverstatesItsLimit: "an_object_may_be_as_large_as_the_traits_say",
    OptionsInUri: "the_uri_is_without_options",
    DefaultsElsewhere: "every_option_takes_its_default",
    RefusesLateAndKeeps: "strange_keys_can_be_uploaded_to_or_are_refused",
    LosesEmptyObjects: "the_same_calls_give_the_same_results_as_memory",
}
"""Each broken driver, and the trial that must fail."""

FAULTS: dict[type[Healthy], str] = {
    DeviationThatPasses: "an_object_comes_back",
    DeviationThatFails: CASES[ShortRead],
    DeletesNoRoots: "an_object_comes_back",
    RefusesLate: "strange_keys_can_be_uploaded_to_or_are_refused",
}
"""Drivers that declare a deviation, wrongly and rightly; one that fails where no trial looks; one
that does not fail."""


class _Watch:
    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::test_")[2].partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.passed and report.when == "call":
            self.passed.add(name)


def _run(kind: type[Healthy], *trials: str) -> dict[str, Any]:
    watch = _Watch()
    options = [
        "-q",
        "-x",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "--import-mode=importlib",
        "-k",
        " or ".join(trials),
    ]
    driver = [
        "--driver-uri",
        f"{scheme_of(kind)}://here",
        "--driver-probe",
        "holdfast.drivers.conformance.probes:MemoryProbe",
    ]
    status = pytest.main([*options, "--pyargs", *_modules_of(trials), *driver], plugins=[watch])
    return {"status": int(status), "failed": sorted(watch.failed), "passed": sorted(watch.passed)}


def _modules_of(trials: Sequence[str]) -> list[str]:
    """Where these trials are: to collect all of the kit takes longer than most of them."""
    found = [
        f"{conformance.__name__}.{file.stem}"
        for file in sorted(Path(conformance.__file__).parent.glob("test_*.py"))
        if any(f"def test_{trial}(" in file.read_text() for trial in trials)
    ]
    assert found, trials
    return found


def scheme_of(kind: type[Healthy]) -> str:
    """The scheme under which a class is registered."""
    return f"broken-{kind.__name__.lower()}"


def main() -> None:
    """Print the outcomes by class name, on the last line."""
    place.GRACE_S = 1.0  # what leaks here never goes by itself
    outcomes = {kind.__name__: _run(kind, trial) for kind, trial in (CASES | FAULTS).items()}
    outcomes[Healthy.__name__] = _run(Healthy, *set(CASES.values()))
    print(f"\n{json.dumps(outcomes)}")


if __name__ == "__main__":
    main()
