"""The structure of a state: its containers and small values. Tensors are stored as columns.

A state is a tree of dicts, lists and tuples. Containers are numbered; each records its parent and
its key there. A tensor's row names its container; the tensor's key is its fqn after the container's
prefix, so even a hundred thousand tensors add nothing to the tree.

Ranks may hold different trees (pipeline stages do). Merging is a union by path; a value equal on
all ranks is stored once, others per rank.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.decoded_json import Json, int_in, ints_in, list_in, object_in, rows_in, str_in, strs_in
from ...errors import DamagedError, SaveError
from .values import decode_value, encode_text

Key = str | int | float | bool | None
"""Type of a dict key; list and tuple items have int keys."""

ByRank = list[tuple[list[int], object]]
"""(ranks, encoded value) pairs; a single entry if ranks agree."""

Placements = dict[str, tuple[str, ...]]
"""Per tensor, one text per mesh dimension: ``R`` for Replicate, ``S0`` for Shard(0)."""

ROOT = 0
_RUNS = ("t", "v", "c")
KINDS = ("dict", "list", "tuple")
_COUNT_MAX = 1 << 31
_KEY_BITS_MAX = 14_000  # beyond, Python refuses to convert an int to text
_PATH_CHARS_MEAN_MAX = 256
_PATH_CHARS_SPARE = 16 << 20


@dataclass(frozen=True, slots=True)
class Container:
    """One dict, list or tuple. ``parent`` is the number of its container (-1 for the root)."""

    parent: int
    key: Key
    kind: str


@dataclass(slots=True)
class Value:
    """One small value, encoded per rank: (ranks, encoded) pairs, a single entry if ranks agree."""

    container: int
    key: Key
    by_rank: ByRank

    def of(self, rank: int) -> object:
        """Return the value of ``rank``.

        If that rank saved none, the ranks that did supply theirs in turn, by rank modulo their
        number.
        """
        for ranks, encoded in self.by_rank:
            if rank in ranks:
                return decode_value(encoded)
        known = sorted({r for ranks, _ in self.by_rank for r in ranks})
        return self.of(known[rank % len(known)])


@dataclass(slots=True)
class Tree:
    """Containers (root first, parents before children), values, and facts that tensor names do
    not imply."""

    containers: list[Container] = field(default_factory=lambda: [Container(-1, None, "dict")])
    values: list[Value] = field(default_factory=list)
    tensor_keys: dict[int, dict[str, Key]] = field(default_factory=dict)
    """container -> text of a tensor's key -> the key, if it is not a str."""
    arrays: set[str] = field(default_factory=set)
    """Fqns of tensors that were numpy arrays."""
    orders: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """container -> order of a dict's items, if of mixed kinds: runs of tensors, values,
    containers."""
    kinds: dict[int, str] = field(default_factory=dict)
    """container -> kind of dict, if not a plain one; see ``kinds``."""
    placements: dict[int, Placements] = field(default_factory=dict)
    """container -> text of a tensor's key -> its placements, for DTensors."""

    def prefixes(self) -> list[str]:
        """Return the fqn prefix of the tensors in each container, including the dot."""
        out = [""]
        for c in self.containers[1:]:
            out.append(f"{out[c.parent]}{c.key}.")
        return out

    def paths(self) -> list[tuple[Key, ...]]:
        """Return the keys that lead from the root to each container."""
        out: list[tuple[Key, ...]] = [()]
        for c in self.containers[1:]:
            out.append((*out[c.parent], c.key))
        return out

    @property
    def paths_too_long(self) -> bool:
        """True if :meth:`prefixes` would take excessive memory.

        The prefixes of a long chain of containers, or of many containers in one with a long name,
        grow with the square of the stored size.
        """
        chars = [0]
        for c in self.containers[1:]:
            chars.append(chars[c.parent] + len(str(c.key)) + 1)
        return sum(chars) > _PATH_CHARS_MEAN_MAX * len(chars) + _PATH_CHARS_SPARE

    def tensor_key(self, container: int, text: str) -> Key:
        """Return the key of a tensor whose fqn continues with ``text`` after the prefix of
        ``container``."""
        if self.containers[container].kind != "dict":
            return int(text)
        return self.tensor_keys.get(container, {}).get(text, text)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types. Optional fields are omitted if empty."""
        record: dict[str, object] = {
            "containers": [[c.parent, _to_json(c.key), c.kind] for c in self.containers],
            "values": [[v.container, _to_json(v.key), v.by_rank] for v in self.values],
            "tensor_keys": [
                [c, text, key] for c, keys in self.tensor_keys.items() for text, key in keys.items()
            ],
            "arrays": [_to_json(name) for name in sorted(self.arrays)],
            "orders": [[c, runs] for c, runs in self.orders.items()],
        }
        if self.kinds:
            record["kinds"] = [[c, kind] for c, kind in self.kinds.items()]
        if self.placements:
            record["placements"] = _placements_to_json(self.placements)
        return record

    @classmethod
    def from_json(cls, data: Json) -> Tree:
        """Rebuild a tree. Raises DamagedError for input that :meth:`to_json` never produces."""
        try:
            tree = _from_json(object_in(data, "the tree"))
        except (KeyError, ValueError) as error:
            raise DamagedError("the manifest's tree is malformed") from error
        _check(tree)
        return tree


def _placements_to_json(placements: dict[int, Placements]) -> list[object]:
    """Return [containers, placements] entries; most containers of optimizer state share
    placements."""
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    for container, by_key in placements.items():
        alike.setdefault(tuple(by_key.items()), []).append(container)
    return [
        [containers, [[_to_json(key), axes] for key, axes in items]]
        for items, containers in alike.items()
    ]


def _from_json(record: Mapping[str, Json]) -> Tree:
    """Rebuild a tree, unchecked. Raises KeyError and ValueError."""
    tree = Tree(
        [
            Container(int_in(parent, "parent"), key_in(key), str_in(kind, "kind"))
            for parent, key, kind in rows_in(record["containers"], 3, "containers")
        ]
    )
    tree.values = [
        Value(
            int_in(container, "container"),
            key_in(key),
            [
                (ints_in(ranks, "ranks"), encoded)
                for ranks, encoded in rows_in(entries, 2, "values")
            ],
        )
        for container, key, entries in rows_in(record["values"], 3, "values")
    ]
    tree.arrays = {_text_in(name) for name in list_in(record["arrays"], "arrays")}
    for container, runs in rows_in(record["orders"], 2, "orders"):
        tree.orders[int_in(container, "container")] = [
            (str_in(kind, "kind"), int_in(count, "count"))
            for kind, count in rows_in(runs, 2, "runs")
        ]
    for container, text, key in rows_in(record["tensor_keys"], 3, "tensor_keys"):
        by_text = tree.tensor_keys.setdefault(int_in(container, "container"), {})
        by_text[str_in(text, "text")] = key_in(key)
    for container, kind in rows_in(record.get("kinds", []), 2, "kinds"):
        tree.kinds[int_in(container, "container")] = str_in(kind, "kind")
    tree.placements = _placements_from_json(record.get("placements", []))
    return tree


def key_in(encoded: Json) -> Key:
    """Decode a key from JSON. Raises ValueError and DamagedError."""
    if type(encoded) is str or type(encoded) is int:  # the common case
        return encoded
    key = decode_value(encoded)
    if key is None or isinstance(key, str | int | float):
        return key
    raise ValueError(f"{key!r:.100} is no key")


def _text_in(encoded: Json) -> str:
    key = key_in(encoded)
    if not isinstance(key, str):
        raise ValueError(f"{key!r:.100} is no text")
    return key


def _placements_from_json(value: Json) -> dict[int, Placements]:
    found: dict[int, Placements] = {}
    for containers, items in rows_in(value, 2, "placements"):
        by_key = {
            _text_in(key): tuple(strs_in(axes, "axes")) for key, axes in rows_in(items, 2, "items")
        }
        for container in ints_in(containers, "containers"):
            found[container] = by_key
    return found


def _to_json(key: Key) -> object:
    if isinstance(key, str):
        return encode_text(key)
    return key


def _check(tree: Tree) -> None:
    """Raise DamagedError for an invalid tree: numbers out of range, unknown kinds, cycles, keys
    that no list has."""
    if not all(_conditions(tree)):
        raise DamagedError("the manifest's tree contradicts itself")
    if tree.paths_too_long:
        raise DamagedError("the manifest's tree has paths that are far too long")


def _conditions(tree: Tree) -> Iterator[bool]:
    """Yield conditions that hold for every tree. A condition may rely on earlier ones."""
    containers = tree.containers
    n = len(containers)
    yield n > 0 and containers[0].parent == -1
    yield all(0 <= c.parent < i for i, c in enumerate(containers[1:], 1))
    yield {c.kind for c in containers}.issubset(KINDS)
    yield all(0 <= v.container < n for v in tree.values)
    yield all(v.by_rank and all(ranks for ranks, _ in v.by_rank) for v in tree.values)
    yield all(0 <= c < n for c in (*tree.tensor_keys, *tree.orders, *tree.placements, *tree.kinds))
    yield all(containers[c].kind == "dict" for c in tree.kinds)
    for runs in tree.orders.values():
        yield all(kind in _RUNS and 0 < count < _COUNT_MAX for kind, count in runs)
    for by_text in tree.tensor_keys.values():
        yield all(_fits("dict", key) for key in by_text.values())
    for keyed in (
        [(c.parent, c.key) for c in containers[1:]],
        [(v.container, v.key) for v in tree.values],
    ):
        yield all(_fits(containers[parent].kind, key) for parent, key in keyed)
        yield not _repeated(keyed)


def _repeated(keyed: Collection[tuple[int, Key]]) -> bool:
    """Return whether a key occurs twice. (It may be a value on one rank, a container on
    another.)"""
    seen = {(parent, type(key), key) for parent, key in keyed}
    return len(seen) < len(keyed)


def _fits(kind: str, key: object) -> bool:
    """Return whether a container of this kind can have such a key."""
    if kind == "dict":
        if isinstance(key, str):
            return True
        if isinstance(key, int):
            return key.bit_length() < _KEY_BITS_MAX
        return key is None or isinstance(key, float)
    return type(key) is int and 0 <= key < _COUNT_MAX


def dotted(keys: Iterable[Key]) -> str:
    """Join keys as in tensor names: ``optim.lr``."""
    return ".".join(map(str, keys))


def format_path(keys: Iterable[Key]) -> str:
    """Format keys as a user would write them: ``state["model"]["layers"][0]``."""
    steps = [f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in keys]
    return "state" + "".join(steps)


def merge_trees(trees: Sequence[Tree]) -> tuple[Tree, list[list[int]]]:
    """Return the union of trees, and the new container numbers of each tree.

    Values name the ranks that have them. Raises SaveError if ranks disagree on the kind of a
    container.
    """
    merged = Tree()
    merged.containers = [trees[0].containers[0]]
    numbers: dict[tuple[int, str, Key], int] = {}
    values: dict[tuple[int, str, Key], list[Value]] = {}
    renumbered = [_merge_containers(merged, tree, numbers) for tree in trees]
    for tree, number in zip(trees, renumbered, strict=True):
        merged.arrays |= tree.arrays
        for c, runs in tree.orders.items():
            merged.orders.setdefault(number[c], runs)
        for c, by_key in tree.placements.items():
            merged.placements[number[c]] = by_key | merged.placements.get(number[c], {})
        for c, keys in tree.tensor_keys.items():
            merged.tensor_keys.setdefault(number[c], {}).update(keys)
        for value in tree.values:
            container = number[value.container]
            values.setdefault((container, type(value.key).__name__, value.key), []).append(value)
    _merge_kinds(merged, trees, renumbered)
    merged.values = [
        Value(where[0], v[0].key, unite(each.by_rank for each in v)) for where, v in values.items()
    ]
    return merged, renumbered


def _merge_kinds(merged: Tree, trees: Sequence[Tree], renumbered: Sequence[Sequence[int]]) -> None:
    """Merge kinds of dicts. Raises SaveError if ranks disagree: one would get back another kind."""
    seen: dict[int, str] = {}
    for tree, number in zip(trees, renumbered, strict=True):
        for c, new in enumerate(number):
            kind = tree.kinds.get(c, "")
            if seen.setdefault(new, kind) != kind:
                kinds = " and a ".join(name or "dict" for name in (seen[new], kind))
                raise SaveError(
                    f"{format_path(merged.paths()[new])} is a {kinds} on different ranks"
                )
    merged.kinds = {new: kind for new, kind in seen.items() if kind}


def _merge_containers(
    merged: Tree, tree: Tree, numbers: dict[tuple[int, str, Key], int]
) -> list[int]:
    if tree.containers[0].kind != merged.containers[0].kind:
        raise SaveError("ranks disagree on the type of the state itself")
    number = [ROOT]
    for c in tree.containers[1:]:
        parent = number[c.parent]
        where = (parent, type(c.key).__name__, c.key)
        new = numbers.setdefault(where, len(merged.containers))
        if new == len(merged.containers):
            merged.containers.append(Container(parent, c.key, c.kind))
        elif merged.containers[new].kind != c.kind:
            path = format_path(merged.paths()[new])
            raise SaveError(
                f"{path} is a {merged.containers[new].kind} on one rank and a {c.kind} on another"
            )
        number.append(new)
    return number


def unite(values: Iterable[ByRank]) -> ByRank:
    """Merge the values of ranks at one place: each value once, with its ranks, ordered by first
    rank."""
    found: dict[str, tuple[list[int], object]] = {}
    for by_rank in values:
        for ranks, encoded in by_rank:
            # The text distinguishes 1, 1.0 and True, and 0.0 and -0.0.
            text = json.dumps(encoded, sort_keys=True)
            known_ranks, _ = found.setdefault(text, ([], encoded))
            known_ranks.extend(ranks)
    for ranks, _ in found.values():
        ranks.sort()
    return sorted(found.values(), key=lambda entry: entry[0][0])
