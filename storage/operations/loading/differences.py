"""Decides whether a checkpoint fits a state: ranks report, the leader judges. Scope: names, shapes
and dtypes. :mod:`...state.filling.targets` maps tensors to their places."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
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
from .renames import Renaming, find_renaming, misspellings

Strict = bool | Literal["state", "checkpoint"]
"""Names that must exist on both sides: True: all; "state", "checkpoint": all names of that side;
False: none, common names are loaded."""

SHOWN = 3
REPORTED = 100
LOGGED = 5
"""Names of a kind shown in an error, in a report, in a log line."""

_KINDS = {
    "left": "with values of a failed load",
    "mismatched": "that do not fit",
    "castable": "of another dtype",
    "missing": "that the checkpoint does not have",
    "shared": "that share memory",
    "unexpected": "that the state has no place for",
}
"""Kinds of differences, and the words for names of each."""

_Found = Mapping[str, Sequence[tuple[str, str]]]
"""Differences by kind: names, with a text for people."""

_log = logging.getLogger(__name__)


def wants_state(strict: Strict) -> bool:
    """Return whether the checkpoint must have every name of the state."""
    return strict in (True, "state")


def _wants_checkpoint(strict: Strict) -> bool:
    return strict in (True, "checkpoint")


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
        found = {
            kind: _once([getattr(report, kind) for report in told])
            for kind in _KINDS
            if kind != "unexpected"
        }
        names = self._unexpected(told)
        found["unexpected"] = [entry for entry in names if self._is_wanted(entry[0])]
        missing, unexpected = ([*dict(found[kind])] for kind in ("missing", "unexpected"))
        nothing = self._nothing(told)
        stored = [*dict(names)] if nothing else unexpected
        renaming = find_renaming(missing, stored)
        refused = {kind: found[kind] for kind in self._refused(nothing) if found[kind]}
        if refused or nothing:
            hints = [] if renaming is None else [str(renaming)]
            if renaming is None or renaming.count < renaming.of:
                hints += misspellings(missing, stored)
            advice = _advice(refused, found, renaming, nothing=nothing)
            raise self._error(refused, nothing, advice, hints)
        left = Differences(
            tuple(missing[:REPORTED]), tuple(unexpected[:REPORTED]), len(missing), len(unexpected)
        )
        self._log(left, renaming)
        for text in dict.fromkeys(text for _, text in found["shared"]):
            _log.warning("%s: the last of them was loaded (from %s)", text, self._uri)
        return left

    def _refused(self, nothing: bool) -> list[str]:
        """Return the kinds of differences that are errors, in the order of the message."""
        accepted = set()
        if not (wants_state(self._strict) or nothing):
            accepted.add("missing")
        if not (_wants_checkpoint(self._strict) or nothing):
            accepted |= {"shared", "unexpected"}
        return [kind for kind in _KINDS if kind not in accepted]

    def _error(
        self, refused: _Found, nothing: bool, advice: str, hints: Sequence[str]
    ) -> MismatchError:
        texts = {kind: [text for _, text in entries] for kind, entries in refused.items()}
        differences = tuple(itertools.chain.from_iterable(texts.values()))
        lines = [f"the state and the checkpoint differ in {counted(len(differences), 'place')}:"]
        if nothing:
            lines[0] = f"the checkpoint has nothing of the state: {lines[0]}"
        for kind, of_kind in texts.items():
            lines += [f"  {text}" for text in of_kind[:SHOWN]]
            if len(of_kind) > SHOWN:
                lines.append(f"  and {len(of_kind) - SHOWN:,} more {_KINDS[kind]}")
        lines += [hint[0].upper() + hint[1:] for hint in hints]
        return MismatchError(
            "\n".join(lines) + "\n", uri=self._uri, advice=advice, differences=differences
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
        return out

    def _is_wanted(self, name: str) -> bool:
        return self._part is None or self._part.holds(name)


def _advice(refused: _Found, found: _Found, renaming: Renaming | None, *, nothing: bool) -> str:
    """Return the next step, mentioning only options with which the load succeeds."""
    if "left" in refused:
        return (
            "Do not use the state as it is: create it again, or load a checkpoint that has "
            "all of these names."
        )
    advice = ["Nothing was loaded."]
    if renaming and renaming.advice:
        advice.append(renaming.advice)
    if "mismatched" in refused or nothing:
        return " ".join(advice)
    if "castable" in refused:
        advice.append("cast=True converts dtypes.")
    if refused.keys() & {"missing", "unexpected"}:
        if not found["missing"]:
            advice.append(
                'strict="state" loads what the state has, and leaves the rest of the checkpoint.'
            )
        elif found["unexpected"] or found["shared"]:
            advice.append("strict=False loads what both have.")
        else:
            advice.append('strict="checkpoint" or strict=False loads what both have.')
    if "shared" in refused:
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
