"""Walks a state: decides how each item is stored, and under which name.

The walk descends into containers and into the states of objects. Every tensor becomes rows,
everything else goes into the tree, and anything that cannot be stored is refused by its path.
"""

from __future__ import annotations

import itertools
import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ....errors import StateError
from ....planner.layout import Layout, local_layout
from ...format.kinds import kind_of
from ...format.tree import ROOT, Container, Key, Value, format_path
from ...format.values import encode_value
from ..adapters.composite import is_made_of, parts_by_name
from ..adapters.dtensor import recorded_placements
from ..adapters.foreign import is_suspect, refuse_object, refuse_tensor
from ..adapters.megatron import KeyedParts, ObjectData, keyed_parts_of, megatron_kind, misplaced
from ..adapters.multipart import InParts, is_in_parts, parts_of
from ..adapters.shards import Shard
from ..adapters.stateful import expand, fills_in_place, has_state, present_state
from ..adapters.tensors import PLAIN_TYPES, Adapters, TensorLike
from ..compat import ShardedTensor
from ..dtypes import is_plain_array, numpy_to_torch, refusal
from ..filling.memoryless import cannot_be_filled
from ..flat_state import DEPTH_MAX, MAPPINGS, FlatState, Subtree

_log = logging.getLogger(__name__)
_warned_of = set[str]()
"""Types of containers that were reported as not restored, by name."""

_PLAIN_CONTAINERS = (dict, list, tuple)
"""Containers that never are objects with a state."""

_Node = Mapping[Key, object] | list[object] | tuple[object, ...]
"""A container of a state."""

_Inside = Literal["containers", "module", "object"]
"""The surroundings of the walk: the user's own containers, or the state of an object."""

_Emitted = Literal["t", "v", "c", ""]
"""The form an item took: a (t)ensor, a (v)alue or a (c)ontainer; "" if stored elsewhere."""


Default = Callable[[Any], object]
"""Like the ``default`` of Python's ``json.dumps``: called with a value that cannot be stored as it
is, returns a storable replacement, or raises TypeError."""

_FORMS = (torch.Tensor, Shard, Mapping, list, tuple)
_CONVERSIONS_MAX = 50
_DEFAULT_ADVICE = "default= of a save takes a function that converts it."


class Walker:
    """One walk over one state, filling ``flat``.

    An item is identified by the number of its container and its key there. ``prefix`` begins the
    names of all tensors in that container.
    """

    def __init__(
        self,
        flat: FlatState,
        loading: bool,
        opened: Sequence[tuple[object, object]],
        default: Default | None,
    ) -> None:
        """Prepare a walk.

        ``opened``: the first objects with a state, in order, with their states if known already.
        """
        self.on_meta: list[tuple[int, str]] = []
        """Rows of modules' tensors on the meta device, with their paths."""
        self._flat = flat
        self._tree = flat.tree
        self._tree.containers = []
        self._loading = loading
        self._verb = "filled" if loading else "saved"
        self._opened = iter(opened)
        self._default = default
        self._converting = 0  # depth of nested conversions in progress
        self._adapters = Adapters()
        self._rows = TensorRows(flat)
        self._first_rows: dict[str, int] = {}  # by name
        self._keyed = KeyedParts()
        self._open_ids: set[int] = set()
        self._keys: list[Key] = []  # keys that lead to the current container
        self._inside: _Inside = "containers"

    def walk(self, state: object) -> None:
        """Walk over all of ``state``, once. Raises StateError."""
        if has_state(state):
            if self._loading and not fills_in_place(state):
                self._tree.containers = [Container(-1, None, "dict")]
                self._flat.nodes.append({})
                self._add_given(state, -1, None, "the state")
                return
            self._inside = _inside(state)
            state = self._open(state, -1, None)
        if not isinstance(state, Mapping | list | tuple):
            raise StateError(
                f"the state is a {type(state).__name__}",
                advice=f"Pass a dict with the items to be {self._verb}.",
            )
        self._container(state, -1, None, "")
        self._keyed.check(self._first_rows, self._flat.locals, loading=self._loading)
        self._rows.store_first_by_name()

    def _path(self, key: Key) -> str:
        return format_path((*self._keys, key))

    def _key(self, key: Key) -> Key:
        """Return ``key`` if it has a type that can be saved. Raises StateError."""
        if key is None or type(key) in (str, int, float, bool):
            return key
        raise StateError(f"{self._path(key)}: a key of type {type(key).__name__} cannot be saved")

    # Containers.

    def _container(self, node: _Node, parent: int, key: Key, prefix: str) -> None:
        number = len(self._tree.containers)
        kind = _kind(node)
        self._tree.containers.append(Container(parent, key, kind))
        self._flat.nodes.append(node)
        if number:
            self._keys.append(key)
        self._check_container(node)
        self._note_kind(node, number, kind)
        self._open_ids.add(id(node))
        emitted: list[_Emitted] = []
        item: Any
        for child, item in node.items() if isinstance(node, MAPPINGS) else enumerate(node):
            kind_of_item = type(item)
            if kind_of_item in PLAIN_TYPES:
                self._plain_tensor(item, number, child, prefix)
                emitted.append("t")
            elif kind_of_item in _PLAIN_CONTAINERS:
                self._container(item, number, self._key(child), f"{prefix}{child}.")
                emitted.append("c")
            else:
                emitted.append(self._item(item, number, child, prefix))
        if kind == "dict":
            self._note_order(number, emitted)
        self._open_ids.remove(id(node))
        del self._keys[-1:]

    def _check_container(self, node: object) -> None:
        if id(node) in self._open_ids:
            raise StateError(f"{self._here()} contains itself")
        if len(self._keys) > DEPTH_MAX:
            raise StateError(f"{self._here()[:200]}… is nested more than {DEPTH_MAX} deep")
        if type(node) in _PLAIN_CONTAINERS:
            return
        if isinstance(node, tuple):
            raise StateError(
                f"{self._here()} is a {type(node).__name__}; save it as a plain tuple or a dict"
            )
        if isinstance(node, ChainMap) and not self._loading:
            raise StateError(
                f"{self._here()} is a {type(node).__name__}, whose dicts would be merged",
                advice="Save a list of its maps, or dict() of it.",
            )
        if self._loading and isinstance(node, Mapping) and not isinstance(node, MutableMapping):
            raise StateError(
                f"{self._here()} is a {type(node).__name__}, which cannot be assigned to"
            )

    def _here(self) -> str:
        if not self._keys:
            return "the state"
        return format_path(self._keys)

    def _note_kind(self, node: object, number: int, kind: str) -> None:
        """Record the type of a container that is not a plain dict.

        Modules are skipped: a load fills their existing containers.
        """
        if self._loading or self._inside == "module":
            return
        name = None
        if isinstance(node, Mapping):
            name = kind_of(node)
        if name:
            self._tree.kinds[number] = name
        elif name is None and type(node) not in (list, tuple) and self._inside == "object":
            raise StateError(
                f"{self._here()} is a {type(node).__name__}, and would come back as a plain {kind}",
                advice=(
                    "Return a dict, list or tuple from state_dict(), and create the other type "
                    "in load_state_dict()."
                ),
            )
        elif name is None and type(node) not in (list, tuple, ObjectData):
            self._warn_of_type(f"{type(node).__module__}.{type(node).__qualname__}", kind)

    def _warn_of_type(self, type_name: str, kind: str) -> None:
        """Warn, once per type, that a container of the state comes back as a plain one."""
        if type_name not in _warned_of:
            _warned_of.add(type_name)
            _log.warning(
                "%s is a %s. A load into a state that has one fills it; a load that builds the "
                "state makes a plain %s",
                self._here(),
                type_name,
                kind,
            )

    def _note_order(self, number: int, emitted: Sequence[_Emitted]) -> None:
        """Record the order of a dict's items if it mixes tensors, values and containers.

        Each kind is stored separately, so the order between them would be lost.
        """
        if len(set(emitted)) < 2:
            return
        runs: list[tuple[str, int]] = [
            (what, len(list(run))) for what, run in itertools.groupby(filter(None, emitted))
        ]
        if len(runs) > 1:
            self._tree.orders[number] = runs

    # Items of a container, and objects with a state.

    def _item(self, item: object, number: int, key: Key, prefix: str) -> _Emitted:
        if not has_state(item):
            return self._stateless(item, number, key, prefix)
        if self._loading and not fills_in_place(item):
            self._add_given(item, number, self._key(key), self._path(key))
            return "c"
        outside = self._inside
        self._inside = _inside(item)
        emitted = self._stateless(self._open(item, number, key), number, key, prefix)
        self._inside = outside
        return emitted

    def _open(self, item: object, number: int, key: Key) -> object:
        """Return the state of an object, to be flattened in the object's place."""
        owner, state = next(self._opened, (None, None))
        if owner is not item:
            where = self._path(key) if number >= 0 else "the state"
            state = expand(item, self._flat.modules, where, loading=self._loading)
        self._flat.subtrees.append(Subtree(number, key, item, state))
        return state

    def _add_given(self, item: object, number: int, key: Key, path: str) -> None:
        """Add an object that is to be given its stored state."""
        refuse_object(item, self._flat.modules, path, loading=True)
        present = present_state(item, path)
        self._flat.subtrees.append(Subtree(number, key, item, None, present))

    def _stateless(self, item: object, number: int, key: Key, prefix: str) -> _Emitted:
        """Add an item like :meth:`_item`, if it is no object with a state."""
        try:
            return self._added(item, number, key, prefix)
        except StateError as error:
            if not self._loading and self._default is None and _lacks_form(item):
                error.advice = f"{error.advice or ''} {_DEFAULT_ADVICE}".strip()
            raise

    def _added(self, item: object, number: int, key: Key, prefix: str) -> _Emitted:
        if megatron_kind(item):
            self._of_megatron(item, key)
            return ""
        if self._default is not None and _lacks_form(item):
            self._converting += 1
            made = _converted(item, self._default, self._path(key), self._converting)
            emitted = self._item(made, number, key, prefix)
            self._converting -= 1
            return emitted
        if is_in_parts(item):
            self._in_parts(item, number, key, prefix)
        elif is_made_of(item):
            self._flat.made_of.add(len(self._tree.containers))
            refuse_tensor(item, lambda: self._path(key), loading=self._loading)
            parts = parts_by_name(item, self._path(key))
            self._container(parts, number, self._key(key), f"{prefix}{key}.")
            return "c"
        elif isinstance(item, torch.Tensor | Shard):
            self._tensor(item, number, key, prefix)
        elif isinstance(item, np.ndarray):
            self._array(item, number, key, prefix)
        elif isinstance(item, Mapping | list | tuple) and not isinstance(item, torch.Size):
            self._container(item, number, self._key(key), f"{prefix}{key}.")
            return "c"
        else:
            self._tree.values.append(
                Value(number, self._key(key), [([ROOT], self._encoded(item, key))])
            )
            return "v"
        return "t"

    def _encoded(self, item: object, key: Key) -> object:
        try:
            return encode_value(item, "")
        except StateError:
            if self._loading:
                return None  # the stored value replaces it anyway
            return encode_value(item, self._path(key))

    # Tensors.

    def _plain_tensor(self, item: torch.Tensor, number: int, key: Key, prefix: str) -> None:
        """Add a tensor with its own memory. Most tensors are like that and need no adapter."""
        if is_suspect(item):
            if is_in_parts(item):
                self._in_parts(item, number, key, prefix)
                return
            refuse_tensor(item, lambda: self._path(key), loading=self._loading)
        self._check_bytes(item, key)
        self._add(item, local_layout(item.shape), item, number, key, prefix)

    def _array(self, item: np.ndarray, number: int, key: Key, prefix: str) -> None:
        path = self._path(key)
        if self._loading and (
            not item.flags.writeable or any(stride < 0 for stride in item.strides)
        ):
            raise StateError(
                f"{path} is an array that cannot be filled: it is read-only or has negative strides"
            )
        tensor = numpy_to_torch(item, path)
        if not self._loading and not is_plain_array(item):
            raise StateError(
                f"{path} is a {type(item).__name__}, and would come back as a plain array",
                advice="Save numpy.asarray() of it.",
            )
        self._tree.arrays.add(f"{prefix}{key}")
        self._plain_tensor(tensor, number, key, prefix)

    def _tensor(self, item: TensorLike, number: int, key: Key, prefix: str) -> None:
        if isinstance(item, torch.Tensor):
            refuse_tensor(item, lambda: self._path(key), loading=self._loading)
        adapter = self._adapters[type(item)]
        local = adapter.local(item)
        self._check_bytes(local, key)  # first: a wrapper around other tensors has its own shape
        layout = adapter.layout(item, local, lambda: self._path(key))
        if self._inside == "object" and isinstance(item, DTensor):
            recorded = recorded_placements(item)
            self._tree.placements.setdefault(number, {})[str(key)] = recorded
        self._add(local, layout, item, number, key, prefix)

    def _in_parts(self, item: ShardedTensor | InParts, number: int, key: Key, prefix: str) -> None:
        """Add a row for each part of a tensor, all under its name."""
        first, *others = parts_of(item, lambda: self._path(key))
        self._tensor(first, number, key, prefix)
        for part in others:
            self._check_bytes(part.tensor, key)
            self._rows.add(part.tensor, part.layout, part, number, f"{prefix}{key}")

    def _of_megatron(self, item: Any, key: Key) -> None:
        """Add an object of Megatron, stored in the outermost dict under its own name."""
        if self._inside != "containers" or self._tree.containers[ROOT].kind != "dict":
            raise misplaced(item, self._path(key))
        if megatron_kind(item) == "ShardedObject":
            name = item.unique_key
            self._container(ObjectData(item), ROOT, name, f"{name}.")
            return
        for part in keyed_parts_of(item, lambda: self._path(key), loading=self._loading):
            self._check_bytes(part.tensor, key)
            self._keyed.add(part, lambda: self._path(key))
            # Sharing memory here says nothing about the parts of other ranks.
            self._rows.add(part.tensor, part.layout, part, ROOT, part.key, may_be_tied=False)

    def _add(
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
        if type(key) is not str and self._tree.containers[number].kind == "dict":
            self._tree.tensor_keys.setdefault(number, {})[str(key)] = self._key(key)
        row = len(self._flat.names)
        if self._first_rows.setdefault(name, row) != row:
            raise StateError(
                f"{self._path(key)} and {self._flat.path(self._first_rows[name])} have the same "
                f"name, {name!r}"
            )
        self._rows.add(local, layout, origin, number, name)

    def _check_bytes(self, item: torch.Tensor, key: Key) -> None:
        """Raise StateError for a tensor without bytes of its own, unless the load allocates
        them."""
        reason = refusal(item)
        if reason is None:
            return
        if self._loading and item.is_meta:
            if self._inside != "module" or type(item) not in PLAIN_TYPES:
                raise cannot_be_filled(self._path(key))
            self.on_meta.append((len(self._flat.names), self._path(key)))
            return
        advice = None
        if hasattr(item, "wait"):
            advice = "Pass tensor.wait()."
        elif hasattr(item, "__tensor_flatten__"):
            advice = "Pass its inner tensors, or the module as it was before the conversion."
        raise StateError(
            f"{self._path(key)} is {reason}, which cannot be {self._verb}", advice=advice
        )


def _inside(owner: object) -> _Inside:
    return "module" if fills_in_place(owner) else "object"


def _kind(container: object) -> str:
    if isinstance(container, MAPPINGS):
        return "dict"
    return "list" if isinstance(container, list) else "tuple"


def _lacks_form(item: object) -> bool:
    """Return whether ``item`` cannot be stored in any form. Tensors are checked later."""
    if isinstance(item, ChainMap) or (isinstance(item, np.ndarray) and not is_plain_array(item)):
        return True
    if isinstance(item, tuple) and type(item) is not tuple and not isinstance(item, torch.Size):
        return True  # a named tuple
    if isinstance(item, _FORMS) or has_state(item) or is_in_parts(item):
        return False
    try:
        if isinstance(item, np.ndarray):
            numpy_to_torch(np.empty(0, item.dtype), "")
        else:
            encode_value(item, "")
    except StateError:
        return True
    return False


def _converted(item: object, default: Default, path: str, depth: int) -> object:
    """Return the replacement that ``default`` makes of ``item``, which is at ``path`` and lacks a
    form.

    ``depth`` counts this conversion and the enclosing ones. Raises StateError if the replacement
    cannot be stored either.
    """
    kind = type(item).__qualname__
    if depth > _CONVERSIONS_MAX:
        raise StateError(
            f"{path[:200]}… is a {kind} nested in {_CONVERSIONS_MAX} conversions by default(), "
            f"which seem to be circular"
        )
    try:
        made = default(item)
    except TypeError as error:
        raise StateError(
            f"{path} is a {kind}, which can neither be saved nor converted by default(): {error}"
        ) from error
    if _lacks_form(made):
        raise StateError(
            f"{path} is a {kind}, which default() has converted to a {type(made).__qualname__}, "
            f"which cannot be saved either"
        )
    return made


class TensorRows:
    """Adds rows to ``flat``, and finds the earlier row that each is tied to.

    Tied tensors have the same bytes in memory and the same layout. Only one of them is stored.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._first: dict[int, int] = {}  # by address: the first row that begins there
        self._sharing: dict[int, list[int]] = {}  # by address: rows with different views

    def add(
        self,
        local: torch.Tensor,
        layout: Layout,
        origin: TensorLike,
        container: int,
        name: str,
        *,
        may_be_tied: bool = True,
    ) -> None:
        flat = self._flat
        row = len(flat.names)
        flat.names.append(name)
        flat.containers.append(container)
        flat.shapes.append(layout.shape)
        flat.dtypes.append(local.dtype)
        flat.locals.append(local.detach() if local.requires_grad else local)
        flat.origins.append(origin)
        flat.layouts.append(layout)
        flat.alias.append(self._alias_of(local, layout, row) if may_be_tied else -1)

    def _alias_of(self, item: torch.Tensor, layout: Layout, row: int) -> int:
        """Return the earlier row that ``item`` is tied to, or -1."""
        address = item.data_ptr()
        if not address or not item.numel():
            return -1
        first = self._first.setdefault(address, row)
        if first == row:
            return -1
        rows = self._sharing.setdefault(address, [first])
        same = (
            r
            for r in rows
            if self._flat.layouts[r] == layout
            and self._flat.shapes[r] == self._flat.shapes[row]
            and _same_bytes(self._flat.locals[r], item)
        )
        root = next(same, -1)
        if root < 0 and row not in rows:
            rows.append(row)
        return root

    def store_first_by_name(self) -> None:
        """Store the first by name of each set of tied tensors.

        Ranks that walk their state in another order then agree.
        """
        flat = self._flat
        alias = np.array(flat.alias, np.int64)
        for root in sorted({row for row in flat.alias if row >= 0}):
            tied = [root, *np.flatnonzero(alias == root).tolist()]
            first = min(tied, key=flat.names.__getitem__)
            alias[tied] = first
            alias[first] = -1
        flat.alias = alias.tolist()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors at the same address have the same elements in the same order."""
    return (
        (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
