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

__all__ = ["Renaming", "find_renaming"]

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
    example: tuple[str, str]
    scattered: bool = False

    def __str__(self) -> str:
        name, stored = self.example
        share = ""
        if self.count != self.of:
            share = f" ({self.count:,} of {self.of:,} that are missing)"
        return f"{self._rule()}: {stored!r} in the checkpoint is {name!r} in the state{share}"

    def _rule(self) -> str:
        ours = _text(self.ours)
        theirs = _text(self.theirs)
        head = _text(self.head)
        if self.scattered:
            sides = []
            if self.theirs:
                sides.append(f"the stored names have {theirs!r} in them")
            if self.ours:
                sides.append(f"the names of the state have {ours!r} in them")
            return " and ".join(sides)
        if self.head:
            where = f"after {head!r}"
        else:
            where = "before them"
        if not self.ours:
            return f"the stored names have {theirs!r} {where}"
        if not self.theirs:
            return f"the names of the state have {ours!r} {where}, the stored ones do not"
        return (
            f"the stored names have {head + theirs!r} where those of the state have {head + ours!r}"
        )

    @property
    def advice(self) -> str | None:
        """Advice on nesting a state so that its names match the stored ones; None if unknown."""
        if self.scattered or self.ours or len(self.head) > 1:
            return None
        inner = (
            "{"
            + ": {".join(repr(word) for word in (*self.head, *self.theirs))
            + ": …"
            + "}" * len((*self.head, *self.theirs))
        )
        return f"A state that is nested likewise has those names: {inner}."


def find_renaming(missing: Iterable[str], unexpected: Iterable[str]) -> Renaming | None:
    """Return the change that maps most ``missing`` names of the state to ``unexpected`` stored
    names.

    None if no change fits more names than chance would explain.
    """
    ours = [tuple(name.split(".")) for name in missing]
    theirs = {tuple(name.split(".")) for name in unexpected}
    if not ours or not theirs:
        return None
    found = max(
        (_replaced(ours, theirs), _unwrapped(ours, theirs)), key=lambda r: r.count if r else 0
    )
    if found is None or (found.count < 2 and found.count < len(ours)):
        return None
    return found


def _replaced(ours: Sequence[Words], theirs: set[Words]) -> Renaming | None:
    """Find the best replacement of one run of words at one place."""
    sample = ours[:: max(1, len(ours) // _SAMPLE)]
    backwards = sorted(words[::-1] for words in theirs)
    candidates = {
        c
        for words in sample
        for other in _alike(words, backwards)
        for c in _differences(words, other)
    }
    scored = ours[:: max(1, len(ours) // _SCORED)]

    def merit(change: Change) -> tuple[int, int, int, Change]:
        return (
            _hits(change, scored, theirs),
            -len(change[1]) - len(change[2]),
            len(change[0]),
            change,
        )

    best = max(candidates, key=merit, default=None)
    if best is None:
        return None
    head, old, new = best
    stored = {words: _with(best, words) for words in ours}
    hits = [words for words in ours if stored[words] in theirs]
    if not hits:
        return None
    return Renaming(
        head, old, new, len(hits), len(ours), (_name(hits[0]), _name(stored[hits[0]] or ()))
    )


def _alike(words: Words, backwards: Sequence[Words]) -> Sequence[Words]:
    """Return the names whose endings are most like ``words``: its neighbours in reversed order."""
    at = bisect_left(backwards, words[::-1])
    return [other[::-1] for other in backwards[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]]


def _differences(words: Words, other: Words) -> list[Change]:
    """Return the replacements of one run of words that turn ``words`` into ``other``.

    Empty if their endings differ; two if a word may belong to either side of the run, as in ``a.x``
    and ``a.b.a.x``.
    """
    tail = _common(words[::-1], other[::-1])
    if tail == 0:
        return []
    head = _common(words, other)
    near = _common(words[head:][::-1], other[head:][::-1])
    return [
        _change(words, other, _common(words[:-tail], other[:-tail]), tail),
        _change(words, other, head, near),
    ]


def _change(words: Words, other: Words, head: int, tail: int) -> Change:
    return words[:head], words[head : len(words) - tail], other[head : len(other) - tail]


def _common(a: Words, b: Words) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def _with(change: Change, words: Words) -> Words | None:
    head, old, new = change
    if words[: len(head) + len(old)] != head + old:
        return None
    return head + new + words[len(head) + len(old) :]


def _hits(change: Change, ours: Sequence[Words], theirs: set[Words]) -> int:
    return sum(_with(change, words) in theirs for words in ours)


def _unwrapped(ours: Sequence[Words], theirs: set[Words]) -> Renaming | None:
    """Match names after removing the words of wrappers."""
    bare = {_bare(words): words for words in theirs}
    pairs = [(words, bare[_bare(words)]) for words in ours if _bare(words) in bare]
    if not pairs:
        return None
    old = sorted({word for words, _ in pairs for word in words if word in WRAPPERS})
    new = sorted({word for _, words in pairs for word in words if word in WRAPPERS})
    both = set(old) & set(new)
    old_only = tuple(word for word in old if word not in both)
    new_only = tuple(word for word in new if word not in both)
    example = (_name(pairs[0][0]), _name(pairs[0][1]))
    return Renaming((), old_only, new_only, len(pairs), len(ours), example, scattered=True)


def _bare(words: Words) -> Words:
    return tuple(word for word in words if word not in WRAPPERS)


def _name(words: Words) -> str:
    return ".".join(words)


def _text(words: Words) -> str:
    return "".join(f"{word}." for word in words)
