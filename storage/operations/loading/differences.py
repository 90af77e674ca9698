"""Decides whether a checkpoint fits a state: ranks report, the leader judges. Scope: names, shapes
and dtypes. :mod:`...state.filling.targets` maps tensors to their places."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ....errors import MismatchError
from ...format.manifest import Manifest
from ...format.part import Part
from ...format.tree import Key, dotted, format_path
from ...state.filling.targets import Match
from ..rounds import Differences, FitReport
from .renames import Renaming, find_renaming

Strict = bool | Literal["state"]
"""Names that must exist on both sides: True: all; "state": the state's own; False: none,
common names are loaded."""

SHOWN = 50
REPORTED = 100
LOGGED = 5
"""Names shown in an error, in a report, in a log line."""

_log = logging.getLogger(__name__)


def report_of(match: Match, manifest: Manifest, checksum: bytes, peers: str | None) -> FitReport:
    """Report what does not fit, and what this rank has a place for, before tensors are filled."""
    rows = np.zeros(len(manifest.tensors), bool)
    rows[list(match.tensors)] = True
    values = np.zeros(len(manifest.tree.values), bool)
    values[list(match.values)] = True
    return FitReport(
        checksum,
        peers,
        match.missing,
        match.mismatched,
        match.castable,
        match.shared,
        match.left,
        np.packbits(rows).tobytes(),
        np.packbits(values).tobytes(),
    )


@dataclass(eq=False)
class DifferenceCheck:
    """The leader's check of all ranks' reports: does the checkpoint, or the part of it that is
    loaded, fit the state?"""

    _manifest: Manifest
    _strict: Strict
    _uri: str
    _part: Part | None = None

    def judge(self, told: Sequence[FitReport]) -> Differences:
        """Return what the load leaves out, and log it. Raises MismatchError."""
        kinds = ("left", "mismatched", "castable", "shared", "missing")
        found = {kind: _once([getattr(report, kind) for report in told]) for kind in kinds}
        found["unexpected"] = self._unexpected(told)
        missing, unexpected = ([*dict(found[kind])] for kind in ("missing", "unexpected"))
        renaming = find_renaming(missing, unexpected)
        nothing = self._nothing(told)
        refused = [text for kind in self._refused(nothing) for _, text in found[kind]]
        if refused or nothing:
            advice = _advice(
                self._strict, {kind for kind in found if found[kind]}, renaming, nothing=nothing
            )
            raise self._error(refused, nothing, advice, renaming)
        left = Differences(
            tuple(missing[:REPORTED]), tuple(unexpected[:REPORTED]), len(missing), len(unexpected)
        )
        self._log(left, renaming)
        for text in dict.fromkeys(text for _, text in found["shared"]):
            _log.warning("%s: the last of them was loaded (from %s)", text, self._uri)
        return left

    def _refused(self, nothing: bool) -> list[str]:
        kinds = ["left", "mismatched", "castable"]
        if self._strict or nothing:
            kinds.append("missing")
        if self._strict is True or nothing:
            kinds += ["shared", "unexpected"]
        return kinds

    def _error(
        self, refused: list[str], nothing: bool, advice: str, renaming: Renaming | None
    ) -> MismatchError:
        listed = "".join(f"\n  {text}" for text in refused[:SHOWN])
        if len(refused) > SHOWN:
            listed += f"\n  and {len(refused) - SHOWN:,} more"
        what = f"the state and the checkpoint differ in {counted(len(refused), 'place')}"
        if nothing:
            what = f"the checkpoint has nothing of the state: {what}"
        hint = ""
        if renaming is not None:
            text = str(renaming)
            hint = f"\n{text[0].upper()}{text[1:]}"
        return MismatchError(
            f"{what}:{listed}{hint}\n", uri=self._uri, advice=advice, differences=tuple(refused)
        )

    def _log(self, left: Differences, renaming: Renaming | None) -> None:
        if left.missing_count:
            hint = f"; {renaming}" if renaming else ""
            names = _listed(left.missing, left.missing_count)
            _log.warning(
                "%s of the state %s not in %s and stayed as before: %s%s",
                counted(left.missing_count, "name"),
                _are(left.missing_count),
                self._uri,
                names,
                hint,
            )
        if left.unexpected_count:
            names = _listed(left.unexpected, left.unexpected_count)
            _log.info(
                "%s of %s %s not in the state and not loaded: %s",
                counted(left.unexpected_count, "name"),
                self._uri,
                _are(left.unexpected_count),
                names,
            )

    def _nothing(self, told: Sequence[FitReport]) -> bool:
        """Return whether the state has a place for nothing of a non-empty checkpoint."""
        m = self._manifest
        if not len(m.tensors) and not m.tree.values:
            return any(report.missing for report in told)
        tensors, values = self._places(told)
        return not tensors.any() and not values.any()

    def _places(
        self, told: Sequence[FitReport]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        m = self._manifest
        tensors = _union([report.tensors for report in told], len(m.tensors))
        return tensors, _union([report.values for report in told], len(m.tree.values))

    def _unexpected(self, told: Sequence[FitReport]) -> list[tuple[str, str]]:
        m = self._manifest
        tensors, values = self._places(told)
        paths = m.tree.paths()
        names = dict.fromkeys(m.tensors.names[row] for row in np.flatnonzero(~tensors).tolist())
        out = [
            (name, f"tensor {name!r} of the checkpoint: the state has no place for it")
            for name in names
        ]
        for i in np.flatnonzero(~values).tolist():
            v = m.tree.values[i]
            path: tuple[Key, ...] = (*paths[v.container], v.key)
            out.append(
                (
                    dotted(path),
                    f"value {format_path(path)} of the checkpoint: the state has no place for it",
                )
            )
        if self._part is None:
            return out
        return [(name, text) for name, text in out if self._part.holds(name)]


def _advice(strict: Strict, found: set[str], renaming: Renaming | None, *, nothing: bool) -> str:
    """Return the next step, mentioning only remedies for the differences that were ``found``."""
    if "left" in found:
        return (
            "Do not use the state as it is: create it again, or load a checkpoint that has "
            "all of these names."
        )
    advice = ["Nothing was loaded."]
    if renaming and renaming.advice:
        advice.append(renaming.advice)
    if "mismatched" in found or nothing:
        return " ".join(advice)
    if "castable" in found:
        advice.append("cast=True converts dtypes.")
    if "missing" in found and strict:
        advice.append("strict=False loads what both have.")
    elif "unexpected" in found and strict is True:
        advice.append(
            'strict="state" loads what the state has, and leaves the rest of the checkpoint.'
        )
    if "shared" in found and strict is True:
        advice.append(
            'With strict="state" or False, shared memory gets the values of the last name.'
        )
    return " ".join(advice)


def counted(count: int, what: str) -> str:
    """Format a count: ``1 place``, ``2 places``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _listed(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:LOGGED])
    if count > LOGGED:
        shown += f" and {count - LOGGED:,} more"
    return shown


def _union(masks: Sequence[bytes], n: int) -> npt.NDArray[np.bool_]:
    bits = [np.frombuffer(mask, np.uint8) for mask in masks]
    return np.unpackbits(np.bitwise_or.reduce(bits), count=n).astype(bool)


def _once(told: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """Return distinct (name, text) entries of all ranks in order, with the ranks unless all have
    it."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, texts in enumerate(told):
        for entry in texts.items():
            ranks.setdefault(entry, []).append(rank)
    return [
        (name, text if len(on) == len(told) else f"{text} (rank {', '.join(map(str, on))})")
        for (name, text), on in ranks.items()
    ]
