"""A state, flattened: one row per tensor, and a tree of everything else.

Flattening reads no tensor data and does no I/O. What cannot be saved is refused here, by its path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ...core.lru import LruCache
from ...errors import StateError
from ...planner.layout import Layout, local_layout
from ..format.kinds import kind_of
from ..format.tree import ROOT, Container, Key, Value, format_path
from ..format.values import encode_value
from .adapters.foreign import is_suspect, refuse_object, refuse_stale, refuse_tensor
from .adapters.in_parts import InParts, is_in_parts, parts_of
from .adapters.made_of import is_made_of, parts_by_name
from .adapters.megatron import KeyedParts, ObjectData, keyed_parts_of, megatron_kind, misplaced
from .adapters.module_names import Walked
from .adapters.shards import Shard
from .adapters.stateful import expand, fills_in_place, has_state, present_state
from .adapters.tensors import PLAIN_TYPES, TENSOR_TYPES, Adapters, TensorLike
from .compat import ShardedTensor
from .dtypes import numpy_to_torch, refusal
from .flat_state import FlatState, Subtree
from .known_state import emptied, filled
from .memoryless import without_memory
from .placeholders import find_placeholders
from .signature import NoSignatureError, SignatureScan

__all__ = ["Default", "KnownStates", "flatten"]

_LEAVES = (*TENSOR_TYPES, int, float, str, bool, type(None))
"""Where there are no modules."""
_FORMS = (torch.Tensor, Shard, np.ndarray, Mapping, list, tuple)
_DEPTH_MAX = 200
_CONVERTING_MAX = 50

Default = Callable[[Any], object]
"""As the ``default`` of Python's ``json.dumps``: called with a value that cannot be stored as it
is, returns what is stored of it, or raises TypeError."""

KnownStates = LruCache[FlatState]
"""States flattened lately, without what was in them, by their signatures."""

_KNOWN = KnownStates(8)

Node = Mapping[Key, object] | list[object] | tuple[object, ...]
"""A container of a state."""


def flatten(
    state: object,
    *,
    loading: bool = False,
    default: Default | None = None,
    known_states: KnownStates = _KNOWN,
) -> FlatState:
    """Flatten ``state``: a dict, list or tuple, or an object with a state.

    With ``loading``: only modules are expanded; other objects with a state become subtrees as they
    are. ``default`` gives what is stored of a value that cannot be stored as it is. A state that is
    laid out like one of ``known_states`` (by default, those of this process) is not walked again.
    Raises StateError naming the path of what cannot be saved.
    """
    modules = functools.cache(lambda: [Walked(module) for module in _modules(state)])
    scan = SignatureScan(modules)
    signature = None if loading else _signature(scan, state)
    if signature is not None:
        known = known_states.get(signature)
        if known is not None:
            return filled(known, scan, modules() if scan.opened else [])
    flat = FlatState(modules=modules())
    walker = _Walker(flat, loading, scan.opened, default)
    _walk(state, walker)
    if loading:
        _refuse_stale(flat)
        _find_without_memory(flat, walker.meta)
    else:
        flat.placeholders = find_placeholders(flat)
    if signature is not None:
        flat.layout_id = _LayoutId(scan.layouts)
        known_states.put(signature, emptied(flat))
    return flat


def _signature(scan: SignatureScan, state: object) -> Hashable | None:
    try:
        return scan.signature_of(state)
    except NoSignatureError:
        return None


@dataclass(frozen=True, eq=False, slots=True)
class _LayoutId:
    """Stands for a signature. It keeps alive the layouts that this names by their ids."""

    layouts: list[Layout]


def _refuse_stale(flat: FlatState) -> None:
    owners = [subtree.owner for subtree in flat.subtrees]
    for subtree in flat.subtrees:
        if isinstance(subtree.owner, torch.nn.Module):
            path = "the state"
            if subtree.parent >= 0:
                path = format_path((*flat.tree.paths()[subtree.parent], subtree.key))
            refuse_stale(subtree.owner, owners, path)


def _find_without_memory(flat: FlatState, meta: Sequence[tuple[int, str]]) -> None:
    """Find the tensors of modules that are on the meta device, in the rows ``meta``. Raises
    StateError for one that is no parameter or buffer under its own name."""
    if not meta:
        return
    flat.without_memory = without_memory(flat)
    for row, path in meta:
        if flat.names[row] not in flat.without_memory:
            raise _on_meta(path)


def _on_meta(path: str) -> StateError:
    return StateError(
        f"{path} is a meta tensor without data, which cannot be filled",
        advice=(
            "Pass the module that has it, whose parameters and buffers are given memory; or call "
            "to_empty(device=...) on that first."
        ),
    )


def _walk(state: object, walker: _Walker) -> None:
    if has_state(state):
        if walker.loading and not fills_in_place(state):
            walker.only(state)
            return
        walker.inside = _inside(state)
        state = walker.opened(state, -1, None)
    if not isinstance(state, Mapping | list | tuple):
        raise StateError(
            f"the state is a {type(state).__name__}",
            advice=f"Pass a dict of what is to be {walker.verb}.",
        )
    walker.container(state, -1, None, "")
    walker.keyed.check(walker.rows, walker.flat.locals, loading=walker.loading)
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


def _modules(state: object) -> Iterator[torch.nn.Module]:
    """The modules in ``state``, outermost ones, in the order of a walk."""
    seen = set[int]()
    left: list[tuple[object, int]] = [(state, 0)]
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

    def __init__(
        self,
        flat: FlatState,
        loading: bool,
        opened: Sequence[tuple[object, object]],
        default: Default | None,
    ) -> None:
        """``opened`` are the first objects with a state, in order, and their state, where that is
        known."""
        self.already = iter(opened)
        self.default = default
        self.meta: list[tuple[int, str]] = []
        """Rows of tensors without memory that modules have, and their paths."""
        self.converting = 0  # so many values that are being converted, each within the other
        self.flat = flat
        self.adapters = Adapters()
        self.loading = loading
        self.verb = "filled" if loading else "saved"
        self.tree = flat.tree
        self.tree.containers = []
        self.open_ids: set[int] = set()
        self.keys: list[Key] = []  # those that lead to the current container
        self.rows: dict[str, int] = {}
        self.keyed = KeyedParts()
        self.first: dict[int, int] = {}  # by address: the first row that begins there
        self.sharing: dict[int, list[int]] = {}  # by address: rows with different views
        self.inside: Inside = "containers"

    def path(self, key: Key) -> str:
        return format_path((*self.keys, key))

    def container(self, node: Node, parent: int, key: Key, prefix: str) -> None:
        number = len(self.tree.containers)
        kind = _kind(node)
        self.tree.containers.append(Container(parent, key, kind))
        self.flat.nodes.append(node)
        where = "the state"
        if number:
            where = self.path(key)
            self.keys.append(key)
        self.check_container(node, where)
        self.note_kind(node, number, kind, where)
        self.open_ids.add(id(node))
        runs: list[tuple[str, int]] = []
        item: Any
        for child, item in node.items() if isinstance(node, Mapping) else enumerate(node):
            if type(item) in PLAIN_TYPES:
                self.plain_tensor(item, number, child, prefix)
                emitted = "t"
            else:
                emitted = self.other(item, number, child, prefix)
            if not emitted:
                continue
            if runs and runs[-1][0] == emitted:
                runs[-1] = (emitted, runs[-1][1] + 1)
            else:
                runs.append((emitted, 1))
        if kind == "dict" and len(runs) > 1:
            self.tree.orders[number] = runs
        self.open_ids.remove(id(node))
        del self.keys[-1:]

    def check_container(self, node: object, where: str) -> None:
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

    def only(self, item: object) -> None:
        """The state is an object that is given what is stored."""
        refuse_object(item, self.flat.modules, "the state", loading=True)
        self.tree.containers = [Container(-1, None, "dict")]
        self.flat.nodes.append({})
        self.flat.subtrees.append(Subtree(-1, None, item, None, present_state(item, "the state")))

    def note_kind(self, node: object, number: int, kind: str, where: str) -> None:
        """Note what a container is beyond a plain dict. A module is loaded into the containers that
        it has."""
        if self.loading or self.inside == "module":
            return
        name = None
        if isinstance(node, Mapping):
            name = kind_of(node)
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

    def other(self, item: object, number: int, key: Key, prefix: str) -> str:
        """Add what is no plain tensor; say what it became: (t)ensor, (v)alue or (c)ontainer; "" for
        what went elsewhere."""
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

    def stateless(self, item: object, number: int, key: Key, prefix: str) -> str:
        """As :meth:`other`, for what is no object with a state."""
        if megatron_kind(item):
            self.of_megatron(item, key)
            return ""
        if self.default is not None and _lacks_form(item):
            self.converting += 1
            emitted = self.other(self.converted(item, key), number, key, prefix)
            self.converting -= 1
            return emitted
        if is_in_parts(item):
            self.in_parts(item, number, key, prefix)
        elif is_made_of(item):
            self.flat.made_of.add(len(self.tree.containers))
            refuse_tensor(item, lambda: self.path(key), loading=self.loading)
            parts = parts_by_name(item, self.path(key))
            self.container(parts, number, self.key(key), f"{prefix}{key}.")
            return "c"
        elif isinstance(item, torch.Tensor | Shard):
            self.tensor(item, number, key, prefix)
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

    def converted(self, item: object, key: Key) -> object:
        """What the caller stores of ``item``, which cannot be stored as it is."""
        assert self.default is not None
        path = self.path(key)
        kind = type(item).__qualname__
        if self.converting > _CONVERTING_MAX:
            raise StateError(
                f"{path[:200]}… is a {kind} within {_CONVERTING_MAX} others that default() has "
                f"converted: they seem to lead in a circle"
            )
        try:
            made = self.default(item)
        except TypeError as error:
            raise StateError(
                f"{path} is a {kind}, which cannot be saved, nor converted by default(): {error}"
            ) from error
        if _lacks_form(made):
            raise StateError(
                f"{path} is a {kind}, of which default() has made a {type(made).__qualname__}, "
                f"which cannot be saved either"
            )
        return made

    def encoded(self, item: object, key: Key) -> object:
        try:
            return encode_value(item, "")
        except StateError:
            if self.loading:
                return None  # whatever is there, what is stored takes its place
            return encode_value(item, self.path(key))

    def array(self, item: np.ndarray, number: int, key: Key, prefix: str) -> None:
        path = self.path(key)
        if self.loading and (
            not item.flags.writeable or any(stride < 0 for stride in item.strides)
        ):
            raise StateError(
                f"{path} is an array that cannot be filled: it is read-only, or runs backwards"
            )
        self.tree.arrays.add(f"{prefix}{key}")
        self.plain_tensor(numpy_to_torch(item, path), number, key, prefix)

    def opened(self, item: object, number: int, key: Key) -> object:
        owner, state = next(self.already, (None, None))
        if owner is not item:
            where = self.path(key) if number >= 0 else "the state"
            state = expand(item, self.flat.modules, where, loading=self.loading)
        self.flat.subtrees.append(Subtree(number, key, item, state))
        return state

    def key(self, key: Key) -> Key:
        """``key``, if it is of a type that can be saved. Raises StateError."""
        if key is None or type(key) in (str, int, float, bool):
            return key
        raise StateError(f"{self.path(key)}: a key of type {type(key).__name__} cannot be saved")

    def plain_tensor(self, item: torch.Tensor, number: int, key: Key, prefix: str) -> None:
        """Add a tensor that is its own memory. Most are, and none needs an adapter."""
        if is_suspect(item):
            if is_in_parts(item):
                self.in_parts(item, number, key, prefix)
                return
            refuse_tensor(item, lambda: self.path(key), loading=self.loading)
        self.check(item, key)
        self.add(item, local_layout(item.shape), item, number, key, prefix)

    def tensor(self, item: TensorLike, number: int, key: Key, prefix: str) -> None:
        """Add a tensor of any type."""
        if isinstance(item, torch.Tensor):
            refuse_tensor(item, lambda: self.path(key), loading=self.loading)
        adapter = self.adapters.of(item)
        local = adapter.local(item)
        self.check(local, key)  # first: a wrapper around other tensors has a shape of its own
        layout = adapter.layout(item, local, lambda: self.path(key))
        if self.inside == "object":
            recorded = adapter.recorded(item)
            if recorded is not None:
                self.tree.placements.setdefault(number, {})[str(key)] = recorded
        self.add(local, layout, item, number, key, prefix)

    def in_parts(self, item: ShardedTensor | InParts, number: int, key: Key, prefix: str) -> None:
        """Add a row for each part of a tensor, all of its name."""
        first, *others = parts_of(item, lambda: self.path(key))
        self.tensor(first, number, key, prefix)
        for part in others:
            self.check(part.tensor, key)
            self.row(part.tensor, part.layout, part, number, f"{prefix}{key}")

    def of_megatron(self, item: Any, key: Key) -> None:
        """Add what stands in the outermost dict under a name of its own."""
        if self.inside != "containers" or self.tree.containers[ROOT].kind != "dict":
            raise misplaced(item, self.path(key))
        if megatron_kind(item) == "ShardedObject":
            name = item.unique_key
            self.container(ObjectData(item), ROOT, name, f"{name}.")
            return
        for part in keyed_parts_of(item, lambda: self.path(key), loading=self.loading):
            self.check(part.tensor, key)
            self.keyed.add(part, lambda: self.path(key))
            # Whether others share its memory says nothing of the parts that other ranks hold.
            self.row(part.tensor, part.layout, part, ROOT, part.key, may_be_tied=False)

    def add(
        self,
        local: torch.Tensor,
        layout: Layout,
        origin: TensorLike,
        number: int,
        key: Key,
        prefix: str,
    ) -> None:
        """Add the first row of a name."""
        name = f"{prefix}{key}"
        if type(key) is not str and self.tree.containers[number].kind == "dict":
            self.tree.tensor_keys.setdefault(number, {})[str(key)] = self.key(key)
        row = len(self.flat.names)
        if self.rows.setdefault(name, row) != row:
            raise StateError(
                f"{self.path(key)} and {self.flat.path(self.rows[name])} have the same name, "
                f"{name!r}"
            )
        self.row(local, layout, origin, number, name)

    def row(
        self,
        local: torch.Tensor,
        layout: Layout,
        origin: TensorLike,
        number: int,
        name: str,
        *,
        may_be_tied: bool = True,
    ) -> None:
        """Add a row."""
        flat = self.flat
        row = len(flat.names)
        flat.names.append(name)
        flat.containers.append(number)
        flat.shapes.append(layout.shape)
        flat.dtypes.append(local.dtype)
        flat.locals.append(local.detach() if local.requires_grad else local)
        flat.origins.append(origin)
        flat.layouts.append(layout)
        flat.alias.append(self.alias_of(local, layout, row) if may_be_tied else -1)

    def check(self, item: torch.Tensor, key: Key) -> None:
        """Raise the StateError for a tensor that has no bytes of its own."""
        reason = refusal(item)
        if reason is None:
            return
        if self.loading and self.inside == "module" and type(item) in PLAIN_TYPES and item.is_meta:
            self.meta.append((len(self.flat.names), self.path(key)))
            return  # the load gives it memory
        advice = None
        if self.loading and item.is_meta:
            raise _on_meta(self.path(key))
        if hasattr(item, "wait"):
            advice = "Pass tensor.wait()."
        elif hasattr(item, "__tensor_flatten__"):
            advice = (
                "Pass the tensors that it is made of, or the module as it was before it was "
                "converted."
            )
        raise StateError(
            f"{self.path(key)} is {reason}, which cannot be {self.verb}", advice=advice
        )

    def alias_of(self, item: torch.Tensor, layout: Layout, row: int) -> int:
        """The earlier row with the very same bytes in memory, laid out the same way; -1 if there is
        none."""
        address = item.data_ptr()
        if not address or not item.numel():
            return -1
        first = self.first.setdefault(address, row)
        if first == row:
            return -1
        rows = self.sharing.setdefault(address, [first])
        same = (
            r
            for r in rows
            if self.flat.layouts[r] == layout
            and self.flat.shapes[r] == self.flat.shapes[row]
            and _same_bytes(self.flat.locals[r], item)
        )
        root = next(same, -1)
        if root < 0 and row not in rows:
            rows.append(row)
        return root


def _lacks_form(item: object) -> bool:
    """Whether there is no form in which ``item`` can be stored. Whether a tensor can be is found
    out later."""
    if isinstance(item, tuple) and type(item) is not tuple and not isinstance(item, torch.Size):
        return True  # with names
    if isinstance(item, _FORMS) or has_state(item) or is_in_parts(item):
        return False
    try:
        encode_value(item, "")
    except StateError:
        return True
    return False


def _kind(container: object) -> str:
    """What a tree calls a container."""
    if isinstance(container, Mapping):
        return "dict"
    return "list" if isinstance(container, list) else "tuple"


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors at one address: whether they are the same elements in the same order."""
    return (
        (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
