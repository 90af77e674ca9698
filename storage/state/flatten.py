"""A state, flattened: one row per tensor, and a tree of everything else.

Flattening reads no tensor data and does no I/O. What cannot be saved is refused here, by its path.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ...core.lru import LruCache
from ...errors import StateError
from ..format.kinds import kind_of
from ..format.tree import ROOT, Container, Key, Tree, Value, format_path
from ..format.values import encode_value
from .adapters.dtensor import LocalPart, local_part, local_tensor, placement_texts
from .adapters.foreign import is_suspect, refuse_object, refuse_stale, refuse_tensor, refuse_value
from .adapters.module_names import Walked
from .adapters.stateful import expand, fills_in_place, has_state, present_state
from .dtypes import numpy_to_torch, refusal
from .flat_state import FlatState, Subtree
from .placeholders import find_placeholders
from .signature import NoSignatureError, SignatureScan

__all__ = ["flatten"]

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LEAVES = (*_TENSORS, DTensor, int, float, str, bool, type(None))
"""Where there are no modules."""
_DEPTH_MAX = 200


def flatten(state: Any, *, loading: bool = False) -> FlatState:
    """Flatten ``state``: a dict, list or tuple, or an object with a state.

    With ``loading``: only modules and optimizers are expanded; other objects with a state become
    subtrees as they are. Raises StateError naming the path of what cannot be saved.
    """
    modules = functools.cache(lambda: [Walked(module) for module in _modules(state)])
    glance = SignatureScan(modules)
    trace: tuple[Hashable, ...] | None = None
    if not loading:
        with contextlib.suppress(NoSignatureError):
            glance.look(state)
            trace = tuple(glance.trace)
    known = None if trace is None else _known.get(trace)
    if known is not None:
        return _again(known, glance, modules() if glance.opened else [])
    flat = FlatState(modules=modules())
    _walk(state, _Walker(flat, loading, glance.opened))
    if loading:
        _refuse_stale(flat)
    flat.placeholders = {} if loading else find_placeholders(flat)
    if trace is not None:
        flat.layout_id, flat.parts = object(), glance.parts
        _known.put(trace, _again(flat, None, []))
    return flat


def _refuse_stale(flat: FlatState) -> None:
    owners = [subtree.owner for subtree in flat.subtrees]
    for subtree in flat.subtrees:
        if isinstance(subtree.owner, torch.nn.Module):
            path = (
                "the state"
                if subtree.parent < 0
                else format_path((*flat.tree.paths()[subtree.parent], subtree.key))
            )
            refuse_stale(subtree.owner, owners, path)


_known: LruCache[FlatState] = LruCache(8)
"""States flattened lately, without what is in them, by their trace."""


def _again(known: FlatState, glance: SignatureScan | None, modules: list[Walked]) -> FlatState:
    """A state that is laid out like a known one, with what a glance has seen; None: with nothing in
    it."""
    opened = glance.opened if glance else [(None, None)] * len(known.subtrees)
    values = glance.values if glance else [None] * len(known.tree.values)
    tree, t = Tree(), known.tree
    tree.containers, tree.tensor_keys = (
        list(t.containers),
        {c: dict(keys) for c, keys in t.tensor_keys.items()},
    )
    tree.arrays, tree.orders = set(t.arrays), {c: list(runs) for c, runs in t.orders.items()}
    tree.kinds, tree.placements = dict(t.kinds), dict(t.placements)
    tree.values = [
        Value(v.container, v.key, [([ROOT], encoded)])
        for v, encoded in zip(t.values, values, strict=True)
    ]
    return FlatState(
        names=list(known.names),
        containers=list(known.containers),
        shapes=list(known.shapes),
        dtypes=list(known.dtypes),
        locals=glance.locals if glance else [],
        origins=glance.origins if glance else [],
        parts=list(known.parts),
        alias=list(known.alias),
        tree=tree,
        nodes=glance.nodes if glance else [],
        subtrees=[
            Subtree(s.parent, s.key, *pair) for s, pair in zip(known.subtrees, opened, strict=True)
        ],
        modules=modules,
        placeholders=known.placeholders,
        layout_id=known.layout_id,
    )


def _walk(state: Any, walker: _Walker) -> None:
    if has_state(state):
        if walker.loading and not fills_in_place(state):
            walker.only(state)
            return
        walker.inside = _inside(state)
        state = walker.opened(state, -1, None)
    if not isinstance(state, Mapping | list | tuple):
        what = "filled" if walker.loading else "saved"
        raise StateError(
            f"the state is a {type(state).__name__}", advice=f"Pass a dict of what is to be {what}."
        )
    walker.container(state, -1, None, "")
    _make_canonical(walker.flat)


def _make_canonical(flat: FlatState) -> None:
    """Of tied tensors, the first by name is stored: so ranks that walk their state in another order
    agree."""
    alias = np.array(flat.alias, np.int64)
    for root in sorted({row for row in flat.alias if row >= 0}):
        tied = [root, *np.flatnonzero(alias == root).tolist()]
        first = min(tied, key=flat.names.__getitem__)
        alias[tied] = first
        alias[first] = -1
    flat.alias = alias.tolist()


def _modules(state: Any) -> Iterator[torch.nn.Module]:
    """The modules in ``state``, outermost ones, in the order of a walk."""
    seen, left = set[int](), [(state, 0)]
    while left:
        node, depth = left.pop()
        if isinstance(node, torch.nn.Module):
            yield node
        elif (
            isinstance(node, Mapping | list | tuple)
            and id(node) not in seen
            and depth <= _DEPTH_MAX
        ):
            seen.add(id(node))
            items = node.values() if isinstance(node, Mapping) else node
            left += [(item, depth + 1) for item in items if type(item) not in _LEAVES][::-1]


Inside = Literal["containers", "module", "object"]
"""What a walk is in: the user's own containers, or the state of an object."""


def _inside(owner: object) -> Inside:
    return "module" if fills_in_place(owner) else "object"


class _Walker:
    """One walk over one state."""

    def __init__(self, flat: FlatState, loading: bool, opened: Sequence[tuple[Any, Any]]) -> None:
        """``opened`` are the first objects with a state, in order, and their state, where that is
        known."""
        self.already = iter(opened)
        self.flat = flat
        self.loading = loading
        self.tree = flat.tree
        self.tree.containers = []
        self.open_ids: set[int] = set()
        self.keys: list[Key] = []  # that lead to the container at hand
        self.rows: dict[str, int] = {}
        self.seen: dict[int, int] = {}  # address -> first row
        self.sharing: dict[int, list[int]] = {}
        self.inside: Inside = "containers"

    def path(self, key: Key) -> str:
        return format_path((*self.keys, key))

    def container(self, node: Any, parent: int, key: Key, prefix: str) -> None:
        number = len(self.tree.containers)
        kind = (
            "dict" if isinstance(node, Mapping) else "list" if isinstance(node, list) else "tuple"
        )
        self.tree.containers.append(Container(parent, key, kind))
        self.flat.nodes.append(node)
        where = self.path(key) if number else "the state"
        self.keys += [key] if number else []
        self.check_container(node, where)
        self.note_kind(node, number, kind, where)
        self.open_ids.add(id(node))
        runs: list[tuple[str, int]] = []
        for child, item in node.items() if kind == "dict" else enumerate(node):
            if type(item) in _TENSORS:
                self.tensor(item, number, child, prefix, None)
                emitted = "t"
            else:
                emitted = self.other(item, number, child, prefix)
            if runs and runs[-1][0] == emitted:
                runs[-1] = (emitted, runs[-1][1] + 1)
            else:
                runs.append((emitted, 1))
        if kind == "dict" and len(runs) > 1:
            self.tree.orders[number] = runs
        self.open_ids.remove(id(node))
        del self.keys[-1:]

    def check_container(self, node: Any, where: str) -> None:
        if id(node) in self.open_ids:
            raise StateError(f"{where} contains itself")
        if len(self.keys) > _DEPTH_MAX:
            raise StateError(f"{where[:200]}… is nested more than {_DEPTH_MAX} deep")
        if isinstance(node, tuple) and type(node) is not tuple:
            raise StateError(
                f"{where} is a {type(node).__name__}; save it as a plain tuple or a dict"
            )
        if self.loading and isinstance(node, Mapping) and not isinstance(node, MutableMapping):
            raise StateError(f"{where} is a {type(node).__name__}, which cannot be assigned to")

    def only(self, item: Any) -> None:
        """The state is an object that is given what is stored."""
        refuse_object(item, self.flat.modules, "the state", loading=True)
        self.tree.containers = [Container(-1, None, "dict")]
        self.flat.nodes.append({})
        self.flat.subtrees.append(Subtree(-1, None, item, None, present_state(item, "the state")))

    def note_kind(self, node: Any, number: int, kind: str, where: str) -> None:
        """Note what a container is beyond a plain dict. A module is loaded into the containers that
        it has."""
        if self.loading or self.inside == "module":
            return
        name = kind_of(node) if kind == "dict" else None
        if name:
            self.tree.kinds[number] = name
        elif name is None and type(node) not in (list, tuple) and self.inside == "object":
            raise StateError(
                f"{where} is a {type(node).__name__}, and would come back as a plain {kind}",
                advice=(
                    "Return a dict, list or tuple from state_dict(), and make the other type "
                    "in load_state_dict()."
                ),
            )

    def other(self, item: Any, number: int, key: Key, prefix: str) -> str:
        """Add what is no plain tensor; say what it became: (t)ensor, (v)alue or (c)ontainer."""
        if not has_state(item):
            return self.stateless(item, number, key, prefix)
        if self.loading and not fills_in_place(item):
            refuse_object(item, self.flat.modules, self.path(key), loading=True)
            self.flat.subtrees.append(
                Subtree(number, self.key(key), item, None, present_state(item, self.path(key)))
            )
            return "c"
        outside = self.inside
        self.inside = _inside(item)
        emitted = self.stateless(self.opened(item, number, key), number, key, prefix)
        self.inside = outside
        return emitted

    def stateless(self, item: Any, number: int, key: Key, prefix: str) -> str:
        """As :meth:`other`, for what is no object with a state."""
        if isinstance(item, DTensor):
            local = local_tensor(item)
            self.check(local, key)  # first: a wrapper around other tensors has a shape of its own
            part = local_part(item, local, lambda: self.path(key))
            if self.inside == "object":
                self.tree.placements.setdefault(number, {})[str(key)] = placement_texts(item)
            self.tensor(local, number, key, prefix, part, item)
        elif isinstance(item, torch.Tensor):
            self.tensor(item, number, key, prefix, None)
        elif isinstance(item, np.ndarray):
            self.array(item, number, key, prefix)
        elif isinstance(item, Mapping | list | tuple) and not isinstance(item, torch.Size):
            self.container(item, number, self.key(key), f"{prefix}{key}.")
            return "c"
        else:
            self.tree.values.append(
                Value(number, self.key(key), [([ROOT], self.encoded(item, key))])
            )
            return "v"
        return "t"

    def encoded(self, item: Any, key: Key) -> Any:
        try:
            return encode_value(item, "")
        except StateError:
            path = self.path(key)  # made for the error only: it costs more than the value
            refuse_value(item, path)
            return encode_value(item, path)

    def array(self, item: np.ndarray[Any, Any], number: int, key: Key, prefix: str) -> None:
        path = self.path(key)
        if self.loading and (
            not item.flags.writeable or any(stride < 0 for stride in item.strides)
        ):
            raise StateError(
                f"{path} is an array that cannot be filled: it is read-only, or runs backwards"
            )
        self.tree.arrays.add(f"{prefix}{key}")
        self.tensor(numpy_to_torch(item, path), number, key, prefix, None)

    def opened(self, item: Any, number: int, key: Key) -> Any:
        owner, state = next(self.already, (None, None))
        if owner is not item:
            where = "the state" if number < 0 else self.path(key)
            state = expand(item, self.flat.modules, where, loading=self.loading)
        self.flat.subtrees.append(Subtree(number, key, item, state))
        return state

    def key(self, key: Any) -> Key:
        if key is None or type(key) in (str, int, float, bool):
            return key  # type: ignore[no-any-return]
        raise StateError(f"{self.path(key)}: a key of type {type(key).__name__} cannot be saved")

    def tensor(
        self,
        item: torch.Tensor,
        number: int,
        key: Key,
        prefix: str,
        part: LocalPart | None,
        origin: DTensor | None = None,
    ) -> None:
        if origin is not None:
            refuse_tensor(origin, lambda: self.path(key), loading=self.loading)
        elif type(item) not in _TENSORS or is_suspect(item):
            refuse_tensor(item, lambda: self.path(key), loading=self.loading)
        self.check(item, key)
        name = f"{prefix}{key}"
        if type(key) is not str and self.tree.containers[number].kind == "dict":
            self.tree.tensor_keys.setdefault(number, {})[str(key)] = self.key(key)
        flat, row = self.flat, len(self.rows)
        if self.rows.setdefault(name, row) != row:
            raise StateError(
                f"{self.path(key)} and {flat.path(self.rows[name])} have the same name, {name!r}"
            )
        flat.names.append(name)
        flat.containers.append(number)
        flat.shapes.append(tuple((item if origin is None else origin).shape))
        flat.dtypes.append(item.dtype)
        flat.locals.append(item.detach() if item.requires_grad else item)
        flat.origins.append(item if origin is None else origin)
        flat.parts.append(part)
        flat.alias.append(self.alias_of(item, part, row))

    def check(self, item: torch.Tensor, key: Key) -> None:
        """Raise the StateError for a tensor that has no bytes of its own."""
        reason = refusal(item)
        if reason is None:
            return
        advice = None
        if self.loading and item.is_meta:
            advice = "Call to_empty(device=...) on its module first, which gives it memory."
        elif hasattr(item, "wait"):
            advice = "Pass tensor.wait()."
        elif hasattr(item, "__tensor_flatten__"):
            advice = (
                "Pass the tensors that it is made of, or the module as it was before it was "
                "converted."
            )
        verb = "filled" if self.loading else "saved"
        raise StateError(f"{self.path(key)} is {reason}, which cannot be {verb}", advice=advice)

    def alias_of(self, item: torch.Tensor, part: LocalPart | None, row: int) -> int:
        """The earlier row with the very same bytes in memory, laid out the same way; -1 if there is
        none."""
        address = item.data_ptr()
        if not address or not item.numel():
            return -1
        first = self.seen.setdefault(address, row)
        if first == row:
            return -1
        rows = self.sharing.setdefault(address, [first])  # views of one storage, which begin alike
        same = (
            r
            for r in rows
            if self.flat.parts[r] == part
            and self.flat.shapes[r] == self.flat.shapes[row]
            and _same_bytes(self.flat.locals[r], item)
        )
        root = next(same, -1)
        if root < 0 and row not in rows:
            rows.append(row)
        return root


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors at one address: whether they are the same elements in the same order."""
    return (
        (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
