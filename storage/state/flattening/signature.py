"""Signatures of states: they tell whether a state is laid out like one flattened before.

A training loop saves the same state over and over. One scan takes from it everything that is new
each time (tensors, values, the state of objects) and a *signature* of the rest: the type and keys
of every container; the type of every leaf; the dtype, shape, strides, device and layout of every
tensor, and which earlier tensor begins at the same address. Names, tree and ties follow from the
signature alone, so they are cached by it. Any difference results in another signature.

Scope: the common kinds of containers and leaves. Anything else is no error here; a state that
contains it is flattened each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....errors import StateError
from ....planner.layout import Layout
from ...format.values import encode_value
from ..adapters.foreign import is_suspect
from ..adapters.megatron import keyed_parts_of, megatron_kind
from ..adapters.module_names import Walked
from ..adapters.stateful import expand, has_state
from ..adapters.tensors import PLAIN_TYPES, TENSOR_TYPES, Adapters, TensorLike
from ..dtypes import numpy_to_torch
from ..flat_state import DEPTH_MAX

_KEYS = {str, int, bool, type(None)}
"""Types whose equal keys have the same text; 0.0 and -0.0 do not."""
_VALUES = (type(None), bool, int, float, str)


class NoSignatureError(Exception):
    """The state holds something without a signature. Never leaves this package."""


class SignatureScan:
    """One scan of a state. The lists follow the order of flattening."""

    def __init__(self, modules: Callable[[], Sequence[Walked]]) -> None:
        """Prepare a scan. ``modules()`` returns all modules of the state; called only if needed."""
        self._signature: list[Hashable] = []
        self.nodes: list[object] = []
        """The containers."""
        self.locals: list[torch.Tensor] = []
        self.origins: list[TensorLike] = []
        self.layouts: list[Layout] = []
        """Layouts of tensors that are not plain, one object per distinct layout. The signature
        contains their ids, so its owner has to keep them alive."""
        self.values: list[object] = []
        """The encoded values."""
        self.opened: list[tuple[object, object]] = []
        """The objects with a state, each with that state."""
        self._modules = modules
        self._first: dict[int, int] = {}  # by address: the first tensor that begins there
        self._adapters = Adapters()

    def signature_of(self, state: object) -> tuple[Hashable, ...]:
        """Scan all of ``state``, once.

        Raises NoSignatureError; the objects opened until then are in ``opened``.
        """
        try:
            with torch.no_grad():
                self._container(self._plain(state), 0)
        except (StateError, RecursionError, RuntimeError) as error:
            # Flattening raises it again, naming the path.
            raise NoSignatureError from error
        return tuple(self._signature)

    def _plain(self, item: object) -> object:
        if not has_state(item):
            return item
        self._signature.append(("opened", type(item)))
        state = expand(item, self._modules(), "the state")
        self.opened.append((item, state))
        return state

    def _container(self, node: object, depth: int) -> None:
        self.nodes.append(node)
        items: Iterable[object]
        if type(node) is dict or type(node) is OrderedDict:
            keys = tuple(node)
            types = tuple(map(type, keys))
            self._signature.append((type(node), keys, types))
            if not _KEYS.issuperset(types):
                raise NoSignatureError
            items = node.values()
        elif type(node) is list or type(node) is tuple:
            self._signature.append((type(node), len(node)))
            items = node
        else:
            raise NoSignatureError
        if depth > DEPTH_MAX:
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
        elif kind in TENSOR_TYPES:
            self._laid_out(item)
        elif kind in _VALUES:
            self._value(item)
        else:
            self._unusual(item, depth)

    def _unusual(self, item: object, depth: int) -> None:
        if type(item) is np.ndarray:
            self._signature.append("array")
            tensor = numpy_to_torch(item, "")
            self._tensor(tensor, tensor, None)
        elif isinstance(item, torch.Tensor | np.ndarray):
            raise NoSignatureError
        elif has_state(item):
            self._item(self._plain(item), depth)
        elif isinstance(item, Mapping | list | tuple) and type(item) is not torch.Size:
            self._container(item, depth + 1)
        elif megatron_kind(item):
            self._of_megatron(item)
        else:
            self._value(item)

    def _of_megatron(self, item: object) -> None:
        parts = keyed_parts_of(item, str, loading=False)
        self._signature.append(tuple(part.key for part in parts))
        for part in parts:
            self._laid_out(part)

    def _laid_out(self, item: TensorLike) -> None:
        adapter = self._adapters[type(item)]
        local = adapter.local(item)
        if type(local) not in PLAIN_TYPES:
            raise NoSignatureError
        layout = adapter.layout(item, local, str)
        self.layouts.append(layout)
        self._tensor(local, item, layout)

    def _value(self, item: object) -> None:
        self._signature.append("value")
        self.values.append(encode_value(item, ""))

    def _tensor(self, item: torch.Tensor, origin: TensorLike, layout: Layout | None) -> None:
        # A sparse or nested tensor has no address or shape and raises RuntimeError here.
        row = len(self.locals)
        first = row
        address = item.data_ptr()
        if address:
            first = self._first.setdefault(address, row)
        strides = None if item.is_contiguous() else item.stride()
        self._signature.append(
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
