"""Runs ``holdfast bench URI --tune`` and ``--forget``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.units import size_text
from ...errors import UsageError
from ..commands import print_json
from ..progress import last_line
from ..text import one_of, paint, printable
from .choices import runs_of, size_of

if TYPE_CHECKING:
    from ...bench.tuned.tuning import Gain, Tuning


VERSION = 1
DEFAULT_LIMIT_S = 60.0


def run_tuning(uri: str, given: Mapping[str, Any]) -> int:
    """Tune, or remove a profile, as the command-line arguments ``given`` say. Return the exit
    status."""
    if given["tune"] and given["forget"]:
        raise UsageError(
            "--tune and --forget exclude each other", advice="--tune replaces an earlier profile."
        )
    if given["html"] is not None or given["workload"] is not None:
        raise UsageError(
            "--tune and --forget go with neither --html nor --workload",
            advice="--json prints the full result.",
        )
    if given["forget"]:
        return _forget(uri, json_output=given["json_output"])
    return _tune(uri, given)


def _tune(uri: str, given: Mapping[str, Any]) -> int:
    from ...bench.tuned.plan import TuningPlan, check_tuning
    from ...drivers.configuration.tuned import check_keeping, keep_profile

    plan = TuningPlan(
        uri,
        size_of(given),
        runs_of(given),
        time_limit_s=DEFAULT_LIMIT_S if given["time_limit"] is None else given["time_limit"],
    )
    file = None if given["only_show"] else check_keeping(os.environ)
    space = check_tuning(plan)  # before importing torch, which takes seconds

    from ...bench.tuned.tuning import tuned

    with last_line() as say:
        found = tuned(plan, space, say)
    kept = file is not None and found.is_worth_keeping
    if file is not None and kept:
        keep_profile(file, found.profile())
    if given["json_output"]:
        print_json(_document(found, file if kept else None))
    else:
        _print(found, file if kept else None)
    return 0


def _forget(uri: str, *, json_output: bool) -> int:
    from ...drivers.configuration.tuned import forget_profiles, tuned_file
    from ...drivers.registry import tuned_place
    from ...drivers.uri import parse

    file = tuned_file(os.environ)
    place = tuned_place(parse(uri))
    count = 0 if file is None else forget_profiles(file, place)
    if json_output:
        print_json({"place": place.uri, "where": dict(place.where), "removed": count})
    else:
        print(f"{printable(place.uri)}: {one_of(count, 'profile')} removed")
    return 0


def _print(found: Tuning, kept: Path | None) -> None:
    from ...bench.tuned.tuning import options_text

    print(f"{printable(found.place.uri)}: {_tried(found)}")
    for name, source in found.space.fixed.items():
        print(paint(printable(f"not tried: {name}, which {source} sets"), "dim"))
    print(f"defaults  {options_text(found.space.default)}")
    print(f"best      {options_text(found.best)}")
    for line in verdict_lines(found):
        print(line)
    if kept is not None:
        print(f"kept in {printable(str(kept))}")


def _tried(found: Tuning) -> str:
    most = size_text(max(entry.taken.nbytes for entry in found.entries))
    return (
        f"{found.tried} of {len(found.space.candidates)} candidates tried in "
        f"{found.seconds:.0f} s, with up to {most}"
    )


def verdict_lines(found: Tuning) -> list[str]:
    """Return the conclusions in words."""
    lines = []
    if found.tried < len(found.space.candidates):
        lines.append("The others were not tried in this time. Give a larger --time-limit.")
    if found.gain is None or found.save is None or found.load is None:
        return [*lines, "The defaults were the best, so there is nothing to keep."]
    lines += [
        f"saves and loads of {size_text(found.nbytes)}: {_gain_text(found.gain)}",
        f"  saves alone: {_gain_text(found.save)}",
        f"  loads alone: {_gain_text(found.load)}",
    ]
    if not found.is_worth_keeping:
        lines.append("No gain over the defaults is shown, so there is nothing to keep.")
    return lines


def _gain_text(gain: Gain) -> str:
    if gain.low == 0:
        return (
            f"{gain.ratio:.2f} × as fast as with the defaults (from {gain.pairs} pairs, too few to "
            f"be sure)"
        )
    return (
        f"{gain.ratio:.2f} × as fast as with the defaults (from {gain.low:.2f} to {gain.high:.2f} "
        f"with 95 % confidence, from {gain.pairs} pairs)"
    )


def _document(found: Tuning, kept: Path | None) -> dict[str, Any]:
    return {
        "version": VERSION,
        "uri": found.uri,
        "place": found.place.uri,
        "where": dict(found.place.where),
        "created_s": found.created_s,
        "seconds": found.seconds,
        "nbytes": found.nbytes,
        "candidates": len(found.space.candidates),
        "fixed": dict(found.space.fixed),
        "default": dict(found.space.default),
        "best": dict(found.best),
        "gain": _gain_document(found.gain),
        "save": _gain_document(found.save),
        "load": _gain_document(found.load),
        "kept": None if kept is None else str(kept),
        "trials": [
            {
                "rung": entry.rung + 1,
                "options": dict(entry.options),
                "nbytes": entry.taken.nbytes,
                "save_s": entry.taken.save_s,
                "load_s": entry.taken.load_s,
            }
            for entry in found.entries
        ],
    }


def _gain_document(gain: Gain | None) -> dict[str, float | None] | None:
    if gain is None:
        return None
    bounded = gain.low > 0
    return {
        "ratio": gain.ratio,
        "low": gain.low if bounded else None,
        "high": gain.high if bounded else None,
        "pairs": gain.pairs,
    }
