"""Whether a checkpoint fits a state: what each rank states of it, how the leader judges that, and
how it is said.

Scope: names, shapes and dtypes. Which tensor goes where is ``capture.targets``.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...errors import MismatchError
from ..format.manifest import Manifest
from ..format.tree import Key, dotted, format_path
from ..state.targets import Match
from .renames import Renaming, find_renaming

__all__ = ["Differences", "Referee", "Strict", "counted", "statement_of"]

Strict = bool | Literal["state"]
"""Which names must be on both sides: True: all; "state": those of the state; False: none, what both
have is loaded."""

SHOWN = 50
REPORTED = 100
LOGGED = 5
"""Names in an error, in a report, in a line of the log."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Differences:
    """What a load has left: names that only the state has (``missing``), or only the checkpoint
    (``unexpected``); of all ranks together, ``REPORTED`` at most of each, and how many there are.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing_count: int = 0
    unexpected_count: int = 0

    def encode(self) -> bytes:
        """As bytes without a newline."""
        return json.dumps(
            [self.missing, self.unexpected, self.missing_count, self.unexpected_count]
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Differences:
        """The inverse of :meth:`encode`."""
        missing, unexpected, missing_count, unexpected_count = json.loads(data)
        return cls(tuple(missing), tuple(unexpected), missing_count, unexpected_count)


def statement_of(match: Match, manifest: Manifest) -> dict[str, Any]:
    """What a rank states before anything is read: what does not fit, and what of the checkpoint it
    has a place for."""
    rows = np.zeros(len(manifest.tensors), bool)
    rows[list(match.tensors)] = True
    values = np.zeros(len(manifest.tree.values), bool)
    values[list(match.values)] = True
    return {
        "missing": match.missing,
        "mismatched": match.mismatched,
        "castable": match.castable,
        "shared": match.shared,
        "left": match.left,
        "tensors": base64.b64encode(np.packbits(rows).tobytes()).decode(),
        "values": base64.b64encode(np.packbits(values).tobytes()).decode(),
    }


class Referee:
    """The leader's judgement: does the checkpoint fit the state, seen from all ranks together?"""

    def __init__(self, manifest: Manifest, strict: Strict, uri: str) -> None:
        self._manifest = manifest
        self._strict = strict
        self._uri = uri

    def judge(self, told: Sequence[Mapping[str, Any]]) -> Differences:
        """What is left by a load that may go on; logs it. Raises MismatchError where it may not."""
        found = {
            kind: _once(told, kind)
            for kind in ("left", "mismatched", "castable", "shared", "missing")
        }
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
        """The kinds of differences with which nothing may be loaded."""
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
            what = f"nothing of the state is in the checkpoint: {what}"
        hint = f"\n{str(renaming)[0].upper()}{str(renaming)[1:]}" if renaming else ""
        return MismatchError(
            f"{what}:{listed}{hint}\n", uri=self._uri, advice=advice, differences=tuple(refused)
        )

    def _log(self, left: Differences, renaming: Renaming | None) -> None:
        if left.missing_count:
            hint = f"; {renaming}" if renaming else ""
            names = _listed(left.missing, left.missing_count)
            _log.warning(
                "%s of the state %s not in %s and stayed as before: %s%s",
                counted(left.missing_count, "name"), _are(left.missing_count), self._uri, names, hint,
            )  # fmt: skip
        if left.unexpected_count:
            names = _listed(left.unexpected, left.unexpected_count)
            _log.info(
                "%s of %s %s not in the state and not loaded: %s",
                counted(left.unexpected_count, "name"), self._uri, _are(left.unexpected_count), names,
            )  # fmt: skip

    def _nothing(self, told: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the checkpoint holds something, and the state has a place for nothing of it."""
        m = self._manifest
        if not len(m.tensors) and not m.tree.values:
            return any(t["missing"] for t in told)
        tensors, values = self._places(told)
        return not tensors.any() and not values.any()

    def _places(
        self, told: Sequence[Mapping[str, Any]]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        m = self._manifest
        return _union(told, "tensors", len(m.tensors)), _union(told, "values", len(m.tree.values))

    def _unexpected(self, told: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """What only the checkpoint has: (name, text)."""
        m = self._manifest
        tensors, values = self._places(told)
        paths = m.tree.paths()
        names = dict.fromkeys(m.tensors.names[row] for row in np.flatnonzero(~tensors).tolist())
        out = [
            (name, f"tensor {name!r} of the checkpoint: no place for it in the state")
            for name in names
        ]
        for i in np.flatnonzero(~values).tolist():
            v = m.tree.values[i]
            path: tuple[Key, ...] = (*paths[v.container], v.key)
            out.append(
                (
                    dotted(path),
                    f"value {format_path(path)} of the checkpoint: no place for it in the state",
                )
            )
        return out


def _advice(strict: Strict, found: set[str], renaming: Renaming | None, *, nothing: bool) -> str:
    """What to do next: only what would help with the kinds of differences that were ``found``."""
    if "left" in found:
        return (
            "The state is not to be used as it is: make it anew, or load a checkpoint that has "
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
            'With strict="state" or False, memory that is shared gets the values of the last name.'
        )
    return " ".join(advice)


def counted(count: int, what: str) -> str:
    """``1 place``, ``2 places``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _listed(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:LOGGED])
    return f"{shown} and {count - LOGGED:,} more" if count > LOGGED else shown


def _union(
    told: Sequence[Mapping[str, Any]], name: str, n: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    bits = [np.frombuffer(base64.b64decode(t[name]), np.uint8) for t in told]
    return np.unpackbits(np.bitwise_or.reduce(bits), count=n).astype(bool)


def _once(told: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[str, str]]:
    """All ranks' entries (name, text) in order, each once, with the rank where not all ranks have
    it."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, t in enumerate(told):
        for entry in t[kind].items():
            ranks.setdefault(entry, []).append(rank)
    return [
        (name, text if len(on) == len(told) else f"{text} (rank {', '.join(map(str, on))})")
        for (name, text), on in ranks.items()
    ]
