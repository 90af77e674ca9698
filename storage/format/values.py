"""JSON codecs for small values, which round-trip with equal value and type.

A value is plain JSON if JSON has its type, else ``{"$type": …}``. A value without a codec is
refused, naming its path. Nothing is pickled; decoding builds only the types listed here.
"""

from __future__ import annotations

import base64
import math
import re
import reprlib
from collections.abc import Callable

from ...core.decoded_json import Json, ints_in, strs_in
from ...errors import DamagedError, StateError

# numpy's own parser accepts far more, and invokes other parsers.
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Longer integers are stored as hexadecimal: Python refuses to convert long decimal strings.
_DECIMAL_BITS_MAX = 1024


def encode_value(value: object, path: str) -> object:
    """Encode ``value`` as JSON types. Raises StateError, naming ``path``, if it has no codec."""
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if value.bit_length() <= _DECIMAL_BITS_MAX else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is str:
        return encode_text(value)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is bytearray:
        return {"$bytearray": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    encoded = _encode_foreign(value)
    if encoded is None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise StateError(
            f"{path} is a {name}, which cannot be saved",
            advice=(
                "Save tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples "
                "of them."
            ),
        )
    return encoded


def decode_value(encoded: object) -> object:
    """Decode the output of :func:`encode_value`. Raises DamagedError for anything else."""
    if isinstance(encoded, list):  # lists of a state are containers
        raise DamagedError("a stored value is a list")
    if not isinstance(encoded, dict):
        return encoded
    try:
        ((name, content),) = encoded.items()
        if type(content) is str:
            return _TEXT_DECODERS[name](content)
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
            f"a stored value has an unknown form: {reprlib.repr(encoded)}"
        ) from error


def encode_text(value: str) -> object:
    """Encode text. JSON would join two adjacent lone surrogates, so text with surrogates is
    stored as bytes."""
    if _SURROGATE.search(value):
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _encode_foreign(value: object) -> dict[str, object] | None:
    """Encode a value of another library's type, or return None if it has no codec.

    The type is recognised by name, so that nothing is imported.
    """
    origin = type(value).__module__
    name = type(value).__name__
    if origin == "torch" and name in ("dtype", "device"):
        return {f"$torch.{name}": str(value).removeprefix("torch.")}
    if origin == "torch" and name == "Size" and isinstance(value, tuple):
        return {"$torch.Size": list(value)}
    if origin == "numpy":
        return _encode_numpy(value)
    return None


def _encode_numpy(value: object) -> dict[str, object] | None:
    import numpy as np

    if type(value) is np.str_:
        return {"$numpy.str": encode_text(str.__getitem__(value, slice(0, None)))}
    if type(value) is np.bytes_:
        return {"$numpy.bytes": base64.b64encode(bytes(value)).decode()}
    if not isinstance(value, np.generic | np.ndarray):
        return None
    if value.ndim == 0 and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    return None


def _decode_numpy(content: Json) -> object:
    import numpy as np

    text, data = strs_in(content, "a number of numpy")
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise ValueError(f"dtype {text}")
    (value,) = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(text))
    return value


def _decode_numpy_text(content: Json) -> object:
    import numpy as np

    return np.str_(decode_value(content))


def _decode_numpy_bytes(content: str) -> object:
    import numpy as np

    return np.bytes_(_decode_bytes(content))


def _decode_bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _decode_complex(content: Json) -> complex:
    real, imaginary = strs_in(content, "a complex number")
    return complex(float(real), float(imaginary))


def _decode_torch_dtype(content: str) -> object:
    import torch

    dtype = vars(torch)[content]  # getattr would import modules for some names
    if not isinstance(dtype, torch.dtype):
        raise ValueError(content)
    return dtype


def _decode_torch_device(content: str) -> object:
    import torch

    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError(content) from error


def _decode_torch_size(content: Json) -> object:
    import torch

    return torch.Size(ints_in(content, "a size"))


_TEXT_DECODERS: dict[str, Callable[[str], object]] = {
    "$int": lambda content: int(content, 16),
    "$str": lambda content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "$numpy.str": _decode_numpy_text,
    "$numpy.bytes": _decode_numpy_bytes,
    "$float": float,
    "$bytes": _decode_bytes,
    "$bytearray": lambda content: bytearray(_decode_bytes(content)),
    "$torch.dtype": _decode_torch_dtype,
    "$torch.device": _decode_torch_device,
}
_DECODERS: dict[str, Callable[[Json], object]] = {
    "$numpy.str": _decode_numpy_text,
    "$complex": _decode_complex,
    "$numpy": _decode_numpy,
    "$torch.Size": _decode_torch_size,
}
"""Decoders of contents that are not text."""
