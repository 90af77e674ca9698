"""Layout of a file for ``torch.load(weights_only=True)``: a zip of a pickle and tensor records.

The pickle describes a dict of tensors with a few opcodes; see :mod:`.torch_pickle`, which reads
them. Each tensor's elements are one uncompressed record. Checksums of records are zero, as with
``torch.serialization.set_crc32_options(False)``: torch ignores them.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence

from ...planner.image import PAGE_NBYTES
from .model_folder import ModelFile, ModelTensor, image_rank, joined
from .torch_pickle import NEW_DTYPES, STORAGES

TORCH_DTYPES = frozenset(NEW_DTYPES)
"""Torch's names of the dtypes that can be written."""

_ROOT = "archive"
_ALIGNMENT = 64
_PAGED_NBYTES = 64 << 10
"""Records of at least this size begin on a page boundary."""
_STORAGE_OF = {dtype: name for name, (dtype, _) in STORAGES.items()}
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_NEEDS_64 = 45
_FULL16 = 0xFFFF
_FULL32 = 0xFFFF_FFFF
"""Placeholders for numbers that follow as 64 bits, as all sizes and offsets do here."""
_DATE = (1 << 5) | 1  # 1 January 1980, so that equal tensors make equal files
_EXTRA64_ID = 1
_PADDING_ID = 0x4246


def torch_file(key: str, tensors: Sequence[ModelTensor], tied: Mapping[str, str]) -> ModelFile:
    """Return the file that holds ``tensors``; names in ``tied`` refer to the tensors they are tied
    to.

    Elements begin at multiples of :func:`alignment_of` their size; records are in image order.
    """
    ordered = sorted(tensors, key=image_rank)
    records = {tensor.name: str(number) for number, tensor in enumerate(ordered)}
    by_name = {tensor.name: tensor for tensor in tensors}
    items = [(tensor.name, tensor) for tensor in tensors]
    items += [(name, by_name[first]) for name, first in tied.items()]
    return ModelFile(key, joined(_Archive(_pickle(items, records), ordered).pieces))


def alignment_of(nbytes: int) -> int:
    """Return the alignment of a record of ``nbytes``: 64, as in torch, or a page if it is large.

    Page-aligned records can be read, mapped and written without copying across page boundaries.
    """
    return PAGE_NBYTES if nbytes >= _PAGED_NBYTES else _ALIGNMENT


Pieces = tuple[bytes | ModelTensor, ...]


def torch_pieces(tensor: ModelTensor) -> tuple[Pieces, int]:
    """Return the output of ``torch.save`` for a single tensor as consecutive pieces, and their
    size.

    The elements begin at a multiple of :func:`alignment_of` their size.
    """
    pieces, nbytes = _pieces(tensor.dtype, tensor.itemsize, tensor.shape)
    own = tuple(tensor if isinstance(piece, ModelTensor) else piece for piece in pieces)
    return own, nbytes


@functools.lru_cache(maxsize=256)
def _pieces(dtype: str, itemsize: int, shape: tuple[int, ...]) -> tuple[Pieces, int]:
    """Return :func:`torch_pieces` of an unnamed tensor. Cached: a model's tensors have few
    shapes."""
    tensor = ModelTensor("", dtype, itemsize, shape)
    archive = _Archive(b"\x80\x02" + _tensor(tensor, "0") + b".", [tensor])
    return joined(archive.pieces), archive.nbytes


class _Archive:
    """The consecutive pieces of a zip file: a pickle, and a record for each tensor in it."""

    def __init__(self, pickle: bytes, tensors: Sequence[ModelTensor]) -> None:
        self.pieces: list[bytes | ModelTensor] = []
        self._central: list[bytes] = []
        self.nbytes = 0
        self._add("data.pkl", pickle)
        self._add("byteorder", b"little")
        for number, tensor in enumerate(tensors):
            self._add(f"data/{number}", tensor)
        self._add("version", b"3\n")
        self._end()

    def _add(self, name: str, content: bytes | ModelTensor) -> None:
        nbytes = len(content) if isinstance(content, bytes) else content.nbytes
        path = f"{_ROOT}/{name}".encode()
        self._central.append(_central(path, nbytes, self.nbytes))
        self._put(_local(path, nbytes, self.nbytes))
        if nbytes:
            self._put(content)

    def _end(self) -> None:
        start = self.nbytes
        self._put(b"".join(self._central))
        count = len(self._central)
        directory_nbytes = self.nbytes - start
        end64 = self.nbytes
        versions = (_NEEDS_64, _NEEDS_64)
        ends = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, *versions, 0, 0, count, count, directory_nbytes, start
        )
        ends += _LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1)
        ends += _END.pack(b"PK\x05\x06", 0, 0, _FULL16, _FULL16, _FULL32, _FULL32, 0)
        self._put(ends)

    def _put(self, piece: bytes | ModelTensor) -> None:
        self.pieces.append(piece)
        self.nbytes += len(piece) if isinstance(piece, bytes) else piece.nbytes


def _local(path: bytes, nbytes: int, at: int) -> bytes:
    """Return the header before a record, padded so that the record is aligned."""
    extra = struct.pack("<HHQQ", _EXTRA64_ID, 16, nbytes, nbytes)
    unpadded = at + _LOCAL.size + len(path) + len(extra) + 4
    padding = -unpadded % alignment_of(nbytes)
    extra += struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    sizes = (0, _FULL32, _FULL32, len(path), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", _NEEDS_64, 0, 0, 0, _DATE, *sizes) + path + extra


def _central(path: bytes, nbytes: int, at: int) -> bytes:
    extra = struct.pack("<HHQQQ", _EXTRA64_ID, 24, nbytes, nbytes, at)
    versions = (_NEEDS_64, _NEEDS_64)
    sizes = (0, _FULL32, _FULL32, len(path), len(extra))
    head = _CENTRAL.pack(b"PK\x01\x02", *versions, 0, 0, 0, _DATE, *sizes, 0, 0, 0, 0, _FULL32)
    return head + path + extra


def _pickle(items: Sequence[tuple[str, ModelTensor]], records: Mapping[str, str]) -> bytes:
    texts = [_text(name) + _tensor(tensor, records[tensor.name]) for name, tensor in items]
    return b"\x80\x02}(" + b"".join(texts) + b"u."


def _tensor(tensor: ModelTensor, record: str) -> bytes:
    head, tail = _around_record(tensor.dtype, tensor.itemsize, tensor.shape)
    return head + _text(record) + tail


@functools.lru_cache(maxsize=256)
def _around_record(dtype: str, itemsize: int, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return those opcodes before and after the record's name. Cached: layers repeat shapes."""
    strides = [1] * len(shape)
    for dim in range(len(strides) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, shape[dim])
    numel = math.prod(shape)
    storage = _STORAGE_OF.get(dtype)
    if storage is None:
        function = b"_rebuild_tensor_v3"
        kind = b"ctorch.storage\nUntypedStorage\n"
        numel *= itemsize
        named = b"ctorch\n" + dtype.encode() + b"\n"
    else:
        function = b"_rebuild_tensor_v2"
        kind = b"ctorch\n" + storage.encode() + b"\n"
        named = b""
    head = b"ctorch._utils\n" + function + b"\n((" + _text("storage") + kind
    identity = _text("cpu") + _int(numel) + b"tQ"
    form = _int(0) + _tuple(shape) + _tuple(strides)
    rest = b"\x89" + b"ccollections\nOrderedDict\n)R" + named + b"tR"
    return head, identity + form + rest


def _tuple(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _int(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
