"""Finds the systematic difference between two sets of names of the same tensors.

Wrappers insert a word into the names of what they wrap: DistributedDataParallel ``module``,
torch.compile ``_orig_mod``, PEFT ``base_model.model``. One line that states this is more useful
than a list of all mismatched names.

Pure: takes names, returns text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile

WRAPPERS = frozenset(
    {
        "module",
        "_orig_mod",
        "_forward_module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_checkpoint_module",
    }
)
_SAMPLE = 32
_SCORED = 1000
_NEIGHBOURS = 3
_QUESTIONS = 3

Words = tuple[str, ...]
Change = tuple[Words, Words, Words]
"""(common leading words, words that follow in one name, words that follow in the other)"""


@dataclass(frozen=True, slots=True)
class Renaming:
    """A replacement that turns names of the state into stored names.

    It replaces the words ``ours``, which follow ``head``, with ``theirs``. ``count`` of the ``of``
    missing names are stored under the result; ``example`` is one such name and its stored name.
    ``scattered``: the words occur anywhere in the names.
    """

    head: Words
    ours: Words
    theirs: Words
    count: int
    of: int
    example: tuple[Words, Words]
    scattered: bool = False

    def __str__(self) -> str:
        name, stored = map(".".join, self.example)
        share = (
            "" if self.count == self.of else f" ({self.count:,} of {self.of:,} that are missing)"
        )
        return f"{self._rule()}: {stored!r} in the checkpoint is {name!r} in the state{share}"

    def _rule(self) -> str:
        head, ours, theirs = map(_dotted, (self.head, self.ours, self.theirs))
        where = "in them" if self.scattered else f"after {head!r}" if head else "before them"
        stored = f"the stored names have {theirs!r} {where}"
        state = f"the names of the state have {ours!r} {where}"
        if self.scattered:
            sides = [stored if theirs else "", state if ours else ""]
            return " and ".join(filter(None, sides))
        if not theirs:
            return f"{state}, the stored ones do not"
        if not ours:
            return stored
        return (
            f"the stored names have {head + theirs!r} where those of the state have {head + ours!r}"
        )

    @property
    def advice(self) -> str | None:
        """Advice on nesting a state so that its names match the stored ones; None if unknown."""
        if self.scattered or self.ours or len(self.head) > 1:
            return None
        keys = (*self.head, *self.theirs)
        inner = "{" + ": {".join(map(repr, keys)) + ": …" + "}" * len(keys)
        return f"A state that is nested likewise has those names: {inner}."


def find_renaming(missing: Iterable[str], unexpected: Iterable[str]) -> Renaming | None:
    """Return the change that maps most ``missing`` names of the state to ``unexpected`` ones. None
    if no change fits more names than chance would explain."""
    ours = [tuple(name.split(".")) for name in missing]
    theirs = {tuple(name.split(".")) for name in unexpected}
    found = [*_replaced(ours, theirs), *_unwrapped(ours, theirs)]
    best = max(found, key=lambda renaming: renaming.count, default=None)
    return best if best and best.count >= min(2, len(ours)) else None


def misspellings(missing: Sequence[str], unexpected: Iterable[str]) -> list[str]:
    """Return questions after likely misspellings in ``missing`` names of the state, one for each
    misspelt word: at most three. The stored name has a similar word in the same place."""
    below: dict[Words, dict[str, None]] = {}
    for name in unexpected:
        words = name.split(".")
        for depth, word in enumerate(words):
            below.setdefault(tuple(words[:depth]), {})[word] = None
    found: dict[Words, list[str]] = {}
    for name in missing[:_SCORED]:
        head: Words = ()
        for word in name.split("."):
            siblings = below.get(head, {})
            if word not in siblings:
                wrong = (*head, word)
                if wrong not in found and not word.isdecimal():
                    found[wrong] = get_close_matches(word, siblings, 1)
                break
            head = (*head, word)
    return [
        f"did you mean {'.'.join((*wrong[:-1], *near))!r} instead of {'.'.join(wrong)!r}?"
        for wrong, near in found.items()
        if near
    ][:_QUESTIONS]


def _replaced(ours: Sequence[Words], theirs: set[Words]) -> list[Renaming]:
    """Find the best replacement of one run of words at one place, from names that end alike."""
    backwards = sorted(words[::-1] for words in theirs)
    changes: set[Change] = set()
    for words in ours[:: max(1, len(ours) // _SAMPLE)]:
        at = bisect_left(backwards, words[::-1])
        for other in backwards[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]:
            changes |= _differences(words, other[::-1])
    scored = ours[:: max(1, len(ours) // _SCORED)]

    def merit(change: Change) -> tuple[int, int, int, Change]:
        hits = sum(_changed(change, words) in theirs for words in scored)
        return hits, -len(change[1]) - len(change[2]), len(change[0]), change

    best = max(changes, key=merit, default=None)
    if best is None:
        return []
    pairs = [(words, new) for words in ours if (new := _changed(best, words)) in theirs]
    return [Renaming(*best, len(pairs), len(ours), pair) for pair in pairs[:1]]


def _differences(words: Words, other: Words) -> set[Change]:
    """Return the replacements of one run of words that turn ``words`` into ``other``. None if their
    endings differ; two if a word may belong to either side of the run, as in ``a.x`` and
    ``a.b.a.x``."""
    tail = _common(words[::-1], other[::-1])
    if not tail:
        return set()
    head = _common(words, other)
    ends = (
        (_common(words[:-tail], other[:-tail]), tail),
        (head, _common(words[head:][::-1], other[head:][::-1])),
    )
    return {(words[:h], words[h : len(words) - t], other[h : len(other) - t]) for h, t in ends}


def _common(a: Words, b: Words) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _changed(change: Change, words: Words) -> Words:
    head, old, new = change
    length = len(head) + len(old)
    return head + new + words[length:] if words[:length] == head + old else ()


def _unwrapped(ours: Sequence[Words], theirs: set[Words]) -> list[Renaming]:
    """Match names after removing the words of wrappers."""
    bare = {_bare(words): words for words in theirs}
    pairs = [(words, bare[_bare(words)]) for words in ours if _bare(words) in bare]
    old = {word for words, _ in pairs for word in words if word in WRAPPERS}
    new = {word for _, words in pairs for word in words if word in WRAPPERS}
    change = (), tuple(sorted(old - new)), tuple(sorted(new - old))
    return [Renaming(*change, len(pairs), len(ours), pair, True) for pair in pairs[:1]]


def _bare(words: Words) -> Words:
    return tuple(word for word in words if word not in WRAPPERS)


def _dotted(words: Words) -> str:
    return "".join(f"{word}." for word in words)
