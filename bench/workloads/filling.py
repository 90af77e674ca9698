"""Fills tensors with random bytes, quickly: in blocks, with several threads.

An element depends only on the seed, the tensor's name and its index in the whole tensor. So a state
is the same for any number of ranks and threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import torch
import xxhash

from ...core.units import ceil_div, in_groups
from .content import PAGE_NBYTES, Content

__all__ = ["Filling", "fill"]

BLOCK_ELEMENTS = 1 << 17
"""Elements of the whole tensor that come from one seed. They are always drawn together."""
_TASK_NBYTES = 4 << 20
_THREADS_MAX = 8
_INT64_MIN = -(1 << 63)


@dataclass(frozen=True)
class Filling:
    """A contiguous tensor to fill: part of the tensor ``name`` with ``elements`` in all, from the
    element ``first`` on, in row-major order."""

    name: str
    elements: int
    first: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Part:
    """The part of a tensor in one block of ``drawn`` elements: those from ``skipped`` on."""

    key: str
    drawn: int
    skipped: int
    into: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Return whether it is the whole block."""
        return self.into.numel() == self.drawn


def fill(fillings: Iterable[Filling], content: Content, seed: int) -> None:
    """Fill all tensors."""
    parts = (part for filling in fillings for part in _parts(filling))
    tasks = in_groups(parts, lambda part: part.into.nbytes, _TASK_NBYTES)
    threads = max(1, min(_THREADS_MAX, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-fill") as pool:
        for _ in pool.map(_fill_task, tasks, repeat(content), repeat(seed)):
            pass


def _parts(filling: Filling) -> Iterator[_Part]:
    flat = filling.tensor.view(-1)
    at = filling.first
    end = at + flat.numel()
    while at < end:
        block = at // BLOCK_ELEMENTS
        begin = block * BLOCK_ELEMENTS
        stop = min(end, begin + BLOCK_ELEMENTS)
        drawn = min(BLOCK_ELEMENTS, filling.elements - begin)
        into = flat[at - filling.first : stop - filling.first]
        yield _Part(f"{block} {filling.name}", drawn, at - begin, into)
        at = stop


def _fill_task(parts: list[_Part], content: Content, seed: int) -> None:
    random = torch.Generator()
    for part in parts:
        random.manual_seed(xxhash.xxh3_64_intdigest(part.key.encode(), seed) >> 1)
        if content.kind == "normal" and part.into.is_floating_point():
            _fill_normal(part, random)
        else:
            _fill_bits(part, random, content.random_share)


def _fill_normal(part: _Part, random: torch.Generator) -> None:
    if part.into.dtype == torch.float32 and part.is_whole:
        part.into.normal_(generator=random)
        return
    normals = torch.empty(part.drawn).normal_(generator=random)
    part.into.copy_(normals[part.skipped : part.skipped + part.into.numel()])


def _fill_bits(part: _Part, random: torch.Generator, random_share: float) -> None:
    pages = ceil_div(part.drawn * part.into.itemsize, PAGE_NBYTES)
    words = torch.empty(pages, PAGE_NBYTES // 8, dtype=torch.int64)
    words.random_(_INT64_MIN, None, generator=random)
    drawn = words.view(torch.uint8)
    if random_share < 1:
        drawn[:, round(random_share * PAGE_NBYTES) :] = 0
    if part.into.dtype == torch.bool:
        drawn &= 1
    start = part.skipped * part.into.itemsize
    part.into.view(torch.uint8).copy_(drawn.view(-1)[start : start + part.into.nbytes])
