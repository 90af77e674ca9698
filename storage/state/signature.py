"""A state seen before is not flattened again: one look tells whether it is laid out as it was.

A training loop saves the same state over and over. A look takes from it what is new each time
(tensors, values, the state of objects) and a *trace* of all else: of every container its type and
keys, of every leaf its type, of every tensor dtype, shape, strides, device, placement, and which
came before it at the same address. Names, tree and ties follow from the trace alone. So they are
kept by it, and any difference is another trace.

Scope: the common kinds of containers and leaves. What else a state holds is no error here; it is
flattened as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import StateError
from ...planner.layout import Layout
from ..format.values import encode_value
from .adapters.foreign import is_suspect
from .adapters.module_names import Walked
from .adapters.stateful import expand, has_state
from .adapters.tensors import PLAIN_TYPES, Adapters
from .dtypes import numpy_to_torch

__all__ = ["NoSignatureError", "SignatureScan"]

_DEPTH_MAX = 200
_MAPPINGS = (dict, OrderedDict)
_KEYS = {
    str,
    int,
    bool,
    type(None),
}  # equal keys of one of these types are the same text; 0.0 and -0.0 are not
_VALUES = (type(None), bool, int, float, str)


class NoSignatureError(Exception):
    """There is something in the state that a look does not know. Not seen outside of this package."""


class SignatureScan:
    """One look at a state. The lists are in the order in which flattening meets things."""

    def __init__(self, modules: Callable[[], Sequence[Walked]]) -> None:
        """``modules()`` are all that the state has; asked for if there is an object with a state."""
        self._trace: list[Hashable] = []
        self.nodes: list[Any] = []
        self.locals: list[torch.Tensor] = []
        self.origins: list[torch.Tensor] = []
        self.layouts: list[Layout] = []
        """Of tensors that are not plain. Each is the same object as long as the layout is the same.
        They are in the trace by their ids, so whatever keeps the trace has to keep these."""
        self.values: list[Any] = []
        """Encoded."""
        self.opened: list[tuple[Any, Any]] = []
        """Objects with a state, and that state."""
        self._modules = modules
        self._first: dict[int, int] = {}  # address -> the first that begins there
        self._adapters = Adapters()

    def signature_of(self, state: Any) -> tuple[Hashable, ...]:
        """Scan all of ``state``, once. Raises NoSignatureError; what was opened until then is in
        ``opened``."""
        try:
            with torch.no_grad():
                self._container(self._plain(state), 0)
        except (
            StateError,
            RecursionError,
            RuntimeError,
        ) as error:  # to be told by who knows where it is
            raise NoSignatureError from error
        return tuple(self._trace)

    def _plain(self, item: Any) -> Any:
        """``item``, or its state where it has one."""
        if not has_state(item):
            return item
        self._trace.append(("opened", type(item)))
        state = expand(item, self._modules(), "the state")
        self.opened.append((item, state))
        return state

    def _container(self, node: Any, depth: int) -> None:
        kind = type(node)
        self.nodes.append(node)
        items: Iterable[Any] = node
        if kind in _MAPPINGS:
            keys = tuple(node)
            types = tuple(map(type, keys))
            self._trace.append((kind, keys, types))
            items, known = node.values(), _KEYS.issuperset(types)
        elif known := kind is list or kind is tuple:
            self._trace.append((kind, len(node)))
        if not known or depth > _DEPTH_MAX:
            raise NoSignatureError
        for item in items:
            self._item(item, depth)

    def _item(self, item: Any, depth: int) -> None:
        kind = type(item)
        if kind in PLAIN_TYPES:
            if is_suspect(item):
                raise NoSignatureError
            self._tensor(item, item, None)
        elif kind is dict:
            self._container(item, depth + 1)
        elif (adapter := self._adapters.of_type(kind)) is not None:
            local = adapter.local(item)
            if type(local) not in PLAIN_TYPES:
                raise NoSignatureError
            layout = adapter.layout(item, local, str)
            self.layouts.append(layout)
            self._tensor(local, item, layout)
        elif kind in _VALUES:
            self._value(item)
        elif kind is np.ndarray:
            self._trace.append("array")
            tensor = numpy_to_torch(item, "")
            self._tensor(tensor, tensor, None)
        elif isinstance(item, torch.Tensor | np.ndarray):
            raise NoSignatureError
        elif has_state(item):
            self._item(self._plain(item), depth)
        elif isinstance(item, Mapping | list | tuple) and kind is not torch.Size:
            self._container(item, depth + 1)
        else:
            self._value(item)

    def _value(self, item: Any) -> None:
        self._trace.append("value")
        self.values.append(encode_value(item, ""))

    def _tensor(self, item: torch.Tensor, origin: torch.Tensor, layout: Layout | None) -> None:
        # What is sparse, or of another layout, has no address, and what is nested no shape:
        # RuntimeError.
        row, address = len(self.locals), item.data_ptr()
        first = self._first.setdefault(address, row) if address else row
        strides = None if item.is_contiguous() else item.stride()
        self._trace.append(
            (
                id(layout),
                row - first,
                item.shape,
                strides,
                item.dtype,
                item.device,
                item.is_conj(),
                item.is_neg(),
            )
        )
        self.locals.append(item.detach() if item.requires_grad else item)
        self.origins.append(origin)
