"""Small values as JSON: what can be saved beside tensors, and comes back equal and of the same
type.

A value is plain JSON where JSON has its type, and ``{"$type": …}`` where it has not. A value
without a codec is refused, and named by its path. Nothing is ever pickled, and decoding builds only
the types listed here.
"""

from __future__ import annotations

import base64
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

from ...errors import DamagedError, StateError

__all__ = ["decode_value", "encode_text", "encode_value"]

_PLAIN = (type(None), bool)
# numpy's own parser takes far more, and runs other parsers.
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Longer integers are hexadecimal, because Python refuses to convert long decimal strings.
_DECIMAL_BITS_MAX = 1024


def encode_value(value: object, path: str) -> object:
    """``value`` as a tree of JSON types. Raises StateError, which names ``path``, where there is no
    codec for it."""
    if type(value) in _PLAIN:
        return value
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        encoder = _foreign_encoder(value)
    if encoder is None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise StateError(
            f"{path} is a {name}, which cannot be saved",
            advice=(
                "Save tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples "
                "of them."
            ),
        )
    return encoder(value)


def decode_value(encoded: object) -> Any:
    """The value that :func:`encode_value` was given. Raises DamagedError for what it never
    produces."""
    if isinstance(encoded, list):  # those of a state are containers
        raise DamagedError("a stored value is a list")
    if not isinstance(encoded, dict):
        return encoded
    try:
        ((name, content),) = encoded.items()
        return _DECODERS[name](content)
    except (
        KeyError,
        IndexError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedError(
            f"a stored value is not of a known form: {reprlib.repr(encoded)}"
        ) from error


def _encode_int(value: int) -> object:
    if value.bit_length() <= _DECIMAL_BITS_MAX:
        return value
    return {"$int": hex(value)}


def _encode_float(value: float) -> object:
    if math.isfinite(value):
        return value
    return {"$float": repr(value)}


def _encode_complex(value: complex) -> object:
    return {"$complex": [repr(value.real), repr(value.imag)]}


def _encode_bytes(value: bytes | bytearray) -> object:
    return {"$bytes": base64.b64encode(value).decode()}


def encode_text(value: str) -> object:
    """JSON joins two adjacent lone surrogates into one character; so text with surrogates is kept
    as bytes."""
    if _SURROGATE.search(value):
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return value


_ENCODERS: dict[type, Callable[[Any], object]] = {
    int: _encode_int,
    str: encode_text,
    float: _encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode()},
}


def _foreign_encoder(value: Any) -> Callable[[Any], object] | None:
    """The codec of a type whose library may not be loaded. It is recognised by name, so that
    nothing is imported."""
    origin = type(value).__module__
    name = type(value).__name__
    if origin == "torch" and name in ("dtype", "device"):
        return lambda v: {f"$torch.{name}": str(v).removeprefix("torch.")}
    if origin == "torch" and name == "Size":
        return lambda v: {"$torch.Size": list(v)}
    if origin == "numpy" and name == "str_":
        return lambda v: {"$numpy.str": encode_text(str.__getitem__(v, slice(0, None)))}
    if origin == "numpy" and name == "bytes_":
        return lambda v: {"$numpy.bytes": base64.b64encode(bytes(v)).decode()}
    is_numpy_scalar = origin == "numpy" and hasattr(value, "dtype") and value.ndim == 0
    if is_numpy_scalar and value.dtype.kind in "biufc":
        return lambda v: {"$numpy": [v.dtype.str, base64.b64encode(v.tobytes()).decode()]}
    return None


def _decode_numpy(content: list[str]) -> object:
    import numpy as np

    text, data = content
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise ValueError(f"dtype {text}")
    (value,) = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(text))
    return value


def _decode_numpy_text(content: object) -> object:
    import numpy as np

    return np.str_(decode_value(content))


def _decode_numpy_bytes(content: str) -> object:
    import numpy as np

    return np.bytes_(base64.b64decode(content, validate=True))


def _decode_torch_dtype(content: str) -> object:
    import torch

    dtype = vars(torch)[content]  # getattr would import modules for some names
    if not isinstance(dtype, torch.dtype):
        raise ValueError(content)
    return dtype


def _decode_torch_device(content: str) -> object:
    import torch

    if not isinstance(content, str):
        raise TypeError(f"device {content!r}")
    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError(content) from error


def _decode_torch_size(content: list[int]) -> object:
    import torch

    return torch.Size(content)


_DECODERS: dict[str, Callable[[Any], object]] = {
    "$int": lambda c: int(c, 16),
    "$str": lambda c: bytes.fromhex(c).decode("utf-8", "surrogatepass"),
    "$numpy.str": _decode_numpy_text,
    "$numpy.bytes": _decode_numpy_bytes,
    "$float": float,
    "$complex": lambda c: complex(float(c[0]), float(c[1])),
    "$bytes": lambda c: base64.b64decode(c, validate=True),
    "$bytearray": lambda c: bytearray(base64.b64decode(c, validate=True)),
    "$numpy": _decode_numpy,
    "$torch.dtype": _decode_torch_dtype,
    "$torch.device": _decode_torch_device,
    "$torch.Size": _decode_torch_size,
}
