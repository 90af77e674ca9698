"""Parity of blocks in host memory, and blocks again out of parity.

P is the XOR of the blocks of a stripe, Q their sum weighted by the powers of 2 in GF(2⁸) with the
polynomial 0x11d, as in RAID-6 (Anvin, The mathematics of RAID-6, 2004). With both, any two of all
blocks can be made again. numpy does it at a third of the rate of a memcpy or better; ISA-L, where
its library is found, at the full rate, and its Q is the same, byte for byte, so hosts with and
without it may mix.

Everything works on arrays of bytes that the caller has, from place to place, without the
interpreter's lock, in pieces that stay in a processor's cache. A block that is shorter than the
output counts as followed by zeros. Outputs must not overlap with inputs.

Scope: arithmetic. Which blocks belong together is decided by ``planner/parity.py``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div

__all__ = ["XOR_PIECE_NBYTES", "Bytes", "Isal", "find_isal", "make_pq", "make_xor", "recover"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""One-dimensional and contiguous: ``np.frombuffer(view, np.uint8)`` makes one of a memoryview."""

POLYNOMIAL = 0x11D
ORDER = 255
BLOCKS_MAX = ORDER
"""Powers of 2 repeat after so many."""
XOR_PIECE_NBYTES = 256 << 10
PQ_PIECE_NBYTES = 128 << 10
PRODUCT_PIECE_NBYTES = 64 << 10
_REDUCTION = np.uint8(POLYNOMIAL & 0xFF)
_ISAL_NAMES = ("libisal.so.2",)
_ISAL_ALIGN_NBYTES = 64
"""What the widest of ISA-L's implementations wants of addresses and lengths."""
_ISAL_CALL_NBYTES = 256 << 20
"""Lengths are given to it as a C int."""


class Isal:
    """ISA-L's RAID functions, called without the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where ``library`` has no such functions."""
        self._functions = {1: library.xor_gen, 2: library.pq_gen}
        for function in self._functions.values():
            function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
            function.restype = ctypes.c_int

    def made_nbytes(self, outputs: Sequence[Bytes], blocks: Sequence[Bytes]) -> int:
        """Make P, or P and Q, in ``outputs``, as far as ISA-L can: as all blocks reach, in memory
        that is aligned. Returns how many bytes that were; the rest is left to the caller."""
        if len(blocks) < 2:
            return 0
        arrays = (*blocks, *outputs)
        nbytes = min(map(len, arrays)) // _ISAL_ALIGN_NBYTES * _ISAL_ALIGN_NBYTES
        addresses = [array.ctypes.data for array in arrays]
        if any(address % _ISAL_ALIGN_NBYTES for address in addresses):
            return 0
        make = self._functions[len(outputs)]
        for start in range(0, nbytes, _ISAL_CALL_NBYTES):
            pointers = (ctypes.c_void_p * len(arrays))(*(each + start for each in addresses))
            if make(len(arrays), min(_ISAL_CALL_NBYTES, nbytes - start), pointers):
                return start
        return nbytes


@functools.cache
def find_isal() -> Isal | None:
    """ISA-L, if this host has it in the version that is known."""
    for name in _ISAL_NAMES:
        try:
            return Isal(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None


def make_xor(out: Bytes, blocks: Sequence[Bytes], isal: Isal | None = None) -> None:
    """Fill ``out`` with the XOR of ``blocks``, with zeros where there are none; by ``isal`` where
    it can."""
    _check_lengths(len(out), blocks)
    blocks = [block for block in blocks if len(block)]
    done = 0
    if isal is not None:
        done = isal.made_nbytes((out,), blocks)
    for start in range(done, len(out), XOR_PIECE_NBYTES):
        stop = start + XOR_PIECE_NBYTES
        _xor_piece(out[start:stop], [block[start:stop] for block in blocks])


def make_pq(p: Bytes, q: Bytes, blocks: Sequence[Bytes], isal: Isal | None = None) -> None:
    """Fill ``p`` and ``q``, which are equally long, with the parity of ``blocks``: the block at
    position i counts 2ⁱ times in Q. By ``isal`` where it can.

    Raises ValueError for more blocks than there are powers.
    """
    _check_lengths(len(p), blocks)
    if len(p) != len(q):
        raise ValueError(f"P has {len(p)} bytes, and Q {len(q)}")
    if len(blocks) > BLOCKS_MAX:
        raise ValueError(f"{len(blocks)} blocks are more than {BLOCKS_MAX}")
    done = 0
    if isal is not None:
        done = isal.made_nbytes((p, q), blocks)
    spare = np.empty(min(PQ_PIECE_NBYTES, len(p) - done), np.uint8)
    for start in range(done, len(p), PQ_PIECE_NBYTES):
        stop = start + PQ_PIECE_NBYTES
        _pq_piece(p[start:stop], q[start:stop], [block[start:stop] for block in blocks], spare)


def recover(
    out: Bytes,
    wanted: int,
    data: Mapping[int, Bytes],
    parity: Mapping[int, Bytes],
    unknown: Sequence[int],
) -> None:
    """Fill ``out`` with the lost block at position ``wanted``.

    ``data`` has the blocks that are left, by position; what is neither there nor in ``unknown`` is
    zeros. ``parity`` has at least one row, 0 (P) or 1 (Q), for each unknown block, and each is as
    long as ``out`` or longer. Data beyond ``out`` is not looked at. Raises ValueError where that
    does not suffice.
    """
    nbytes = len(out)
    if wanted not in unknown or len(set(unknown)) > len(parity):
        raise ValueError(
            f"block {wanted} does not follow from {len(parity)} blocks of parity, with "
            f"{len(set(unknown))} unknown"
        )
    if short := [row for row, block in parity.items() if len(block) < nbytes]:
        raise ValueError(f"parity {short[0]} is shorter than the {nbytes} bytes that are wanted")
    known = {position: block[:nbytes] for position, block in data.items()}
    others = sorted(set(unknown) - {wanted})
    if not others and 0 in parity:
        make_xor(out, [parity[0][:nbytes], *known.values()])
    else:
        _through_q(out, (wanted, *others), known, parity)


def _through_q(
    out: Bytes, lost: Sequence[int], known: Mapping[int, Bytes], parity: Mapping[int, Bytes]
) -> None:
    """The first of one or two lost blocks. What is known is taken off Q, which leaves 2ˣ·x. With
    two of them, it leaves 2ˣ·x + 2ʸ·y; x + y, which is what it leaves of P, in the place of y makes
    that (2ˣ + 2ʸ)·x."""
    weight = 0
    for position in lost:
        weight ^= _power(position)
    product = _Product(_quotient(1, weight), len(out))
    p, q, spare = (np.empty(PRODUCT_PIECE_NBYTES, np.uint8) for _ in range(3))
    count = max((*lost, *known)) + 1
    for start in range(0, len(out), PRODUCT_PIECE_NBYTES):
        stop = min(start + PRODUCT_PIECE_NBYTES, len(out))
        blocks = {position: block[start:stop] for position, block in known.items()}
        if len(lost) == 2:
            rest = p[: stop - start]
            _xor_piece(rest, [parity[0][start:stop], *blocks.values()])
            blocks[lost[1]] = rest
        weighted = q[: stop - start]
        _q_piece(weighted, [blocks.get(i, p[:0]) for i in range(count)], spare)
        _add(weighted, parity[1][start:stop])
        product.into(out[start:stop], q)


class _Product:
    """Multiplies pieces by one factor: two bytes at a time are looked up in a table."""

    def __init__(self, factor: int, nbytes: int) -> None:
        pairs = ceil_div(min(PRODUCT_PIECE_NBYTES, nbytes), 2)
        self._table = _products(factor)
        self._index = np.empty(pairs, np.intp)
        self._found = np.empty(pairs, np.uint16)

    def into(self, out: Bytes, piece: Bytes) -> None:
        """Fill ``out`` with as many bytes of ``piece``, which has at least one more where they are
        an odd number, times the factor."""
        pairs = ceil_div(len(out), 2)
        index = self._index[:pairs]
        found = self._found[:pairs]
        np.copyto(index, piece[: 2 * pairs].view(np.uint16))
        # Every index is within the table; "clip" is the mode that needs no copy of the outcome.
        np.take(self._table, index, out=found, mode="clip")
        np.copyto(out, found.view(np.uint8)[: len(out)])


def _xor_piece(out: Bytes, blocks: Sequence[Bytes]) -> None:
    if len(blocks) >= 2 and len(blocks[0]) == len(blocks[1]) == len(out):
        # A pass less than to copy the first one.
        np.bitwise_xor(blocks[0], blocks[1], out=out)
        rest = blocks[2:]
    else:
        _copy(out, blocks[0] if blocks else out[:0])
        rest = blocks[1:]
    for block in rest:
        _add(out, block)


def _pq_piece(p: Bytes, q: Bytes, blocks: Sequence[Bytes], spare: Bytes) -> None:
    """Horner's scheme, from the last block to the first: Q is doubled before each is added."""
    last = blocks[-1] if blocks else p[:0]
    _copy(p, last)
    _copy(q, last)
    for block in reversed(blocks[:-1]):
        _double(q, spare[: len(q)])
        _add(q, block)
        _add(p, block)


def _q_piece(q: Bytes, blocks: Sequence[Bytes], spare: Bytes) -> None:
    """Q alone, in the same way."""
    _copy(q, blocks[-1])
    for block in reversed(blocks[:-1]):
        _double(q, spare[: len(q)])
        _add(q, block)


def _copy(out: Bytes, block: Bytes) -> None:
    np.copyto(out[: len(block)], block)
    out[len(block) :] = 0


def _add(out: Bytes, block: Bytes) -> None:
    part = out[: len(block)]
    np.bitwise_xor(part, block, out=part)


def _double(q: Bytes, spare: Bytes) -> None:
    """Multiply each byte by 2: shifted, and reduced where its highest bit was set, which is to say
    where it is negative as a signed number."""
    np.less(q.view(np.int8), 0, out=spare.view(np.bool_))
    np.multiply(spare, _REDUCTION, out=spare)
    np.add(q, q, out=q)
    np.bitwise_xor(q, spare, out=q)


def _check_lengths(nbytes: int, blocks: Sequence[Bytes]) -> None:
    longest = max(map(len, blocks), default=0)
    if longest > nbytes:
        raise ValueError(f"a block of {longest} bytes does not go into parity of {nbytes}")


def _powers() -> tuple[int, ...]:
    """All powers of 2, from that of 0 on."""
    found = [1]
    while len(found) < ORDER:
        value = found[-1] << 1
        found.append(value ^ POLYNOMIAL if value > 0xFF else value)
    return tuple(found)


_POWERS = _powers()


def _power(exponent: int) -> int:
    """2 to some power, which may be negative."""
    return _POWERS[exponent % ORDER]


def _product(a: int, b: int) -> int:
    if a == 0 or b == 0:
        return 0
    return _power(_POWERS.index(a) + _POWERS.index(b))


def _quotient(a: int, b: int) -> int:
    """``a`` divided by ``b``, neither of which is 0."""
    return _power(_POWERS.index(a) - _POWERS.index(b))


@functools.lru_cache(maxsize=16)
def _products(factor: int) -> npt.NDArray[np.uint16]:
    """What each pair of bytes is when both are multiplied by ``factor``: 128 KiB."""
    single = np.array([_product(factor, value) for value in range(256)], np.uint16)
    table: npt.NDArray[np.uint16] = (single[:, None] << np.uint16(8) | single[None, :]).ravel()
    return table
