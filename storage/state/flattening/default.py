"""The option ``default``: converts values that cannot be stored as they are."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ....errors import StateError
from ...format.values import encode_value
from ..adapters.multipart import is_in_parts
from ..adapters.shards import Shard
from ..adapters.stateful import has_state
from ..dtypes import is_plain_array

Default = Callable[[Any], object]
"""Like the ``default`` of Python's ``json.dumps``: called with a value that cannot be stored as it
is, returns a storable replacement, or raises TypeError."""

_FORMS = (torch.Tensor, Shard, Mapping, list, tuple)
_DEPTH_MAX = 50


def lacks_form(item: object) -> bool:
    """Return whether ``item`` cannot be stored in any form. Tensors are checked later."""
    if isinstance(item, np.ndarray):
        return not is_plain_array(item)
    if isinstance(item, ChainMap):
        return True
    if isinstance(item, tuple) and type(item) is not tuple and not isinstance(item, torch.Size):
        return True  # a named tuple
    if isinstance(item, _FORMS) or has_state(item) or is_in_parts(item):
        return False
    try:
        encode_value(item, "")
    except StateError:
        return True
    return False


def converted(item: object, default: Default, path: str, depth: int) -> object:
    """Return the replacement that ``default`` makes of ``item``, which is at ``path`` and lacks a
    form.

    ``depth`` counts this conversion and the enclosing ones. Raises StateError if the replacement
    cannot be stored either.
    """
    kind = type(item).__qualname__
    if depth > _DEPTH_MAX:
        raise StateError(
            f"{path[:200]}… is a {kind} nested in {_DEPTH_MAX} conversions by default(), which "
            f"seem to be circular"
        )
    try:
        made = default(item)
    except TypeError as error:
        raise StateError(
            f"{path} is a {kind}, which can neither be saved nor converted by default(): {error}"
        ) from error
    if lacks_form(made):
        raise StateError(
            f"{path} is a {kind}, which default() has converted to a {type(made).__qualname__}, "
            f"which cannot be saved either"
        )
    return made
