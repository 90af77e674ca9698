"""Makes tensors from specs: plain ones, or DTensors if a job of several ranks shards them.

They are filled with random bytes in blocks, by several threads. An element depends only on the
seed, the tensor's name and its index in the whole tensor. So a state is the same for any number of
ranks and threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any

import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ...core.units import ceil_div, in_groups
from ...storage.state.dtypes import dtype_of
from .spec import NORMAL, PAGE_NBYTES, Content, Spec, itemsize_of

State = dict[str, Any]
"""Tensors by name."""

BLOCK_ELEMENTS = 1 << 17
"""Elements of the whole tensor that come from one seed. They are always drawn together."""
_TASK_NBYTES = 4 << 20
_THREADS_MAX = 8
_INT64_MIN = -(1 << 63)


def materialise(
    specs: Sequence[Spec],
    rank: int,
    world: int,
    *,
    seed: int = 0,
    content: Content = NORMAL,
    mesh: DeviceMesh | None = None,
) -> State:
    """Make the state of ``rank`` described by ``specs``, filled with ``content``.

    The same seed gives the same state, and sharded tensors have the same elements for any
    ``world``. If ``world`` is above 1, sharded tensors are DTensors on ``mesh``. Without one, all
    ranks together make a CPU mesh here, which needs a process group. Raises UnsupportedFormatError
    for a dtype that this torch lacks, and torch's RuntimeError if memory is too small.
    """
    if world > 1 and mesh is None and any(spec.sharded for spec in specs):
        mesh = init_device_mesh("cpu", (world,))
    local = [_empty(spec, rank, world) for spec in specs]
    pairs = zip(specs, local, strict=True)
    _fill((part for pair in pairs for part in _parts(*pair, rank, world)), content, seed)
    return {
        spec.name: _placed(spec, tensor, mesh) for spec, tensor in zip(specs, local, strict=True)
    }


def _empty(spec: Spec, rank: int, world: int) -> torch.Tensor:
    dtype = dtype_of(spec.dtype, itemsize_of(spec.dtype))
    return torch.empty(spec.local_shape(rank, world), dtype=dtype, device="cpu")


def _placed(spec: Spec, local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None or not spec.sharded:
        return local
    return DTensor.from_local(
        local,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=_strides(spec.shape),
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]


@dataclass(frozen=True)
class _Part:
    """The part of a tensor in one block of ``drawn`` elements: those from ``skipped`` on."""

    key: str
    drawn: int
    skipped: int
    into: torch.Tensor


def _fill(parts: Iterable[_Part], content: Content, seed: int) -> None:
    tasks = in_groups(parts, lambda part: part.into.nbytes, _TASK_NBYTES)
    threads = max(1, min(_THREADS_MAX, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-fill") as pool:
        for _ in pool.map(_fill_task, tasks, repeat(content), repeat(seed)):
            pass


def _parts(spec: Spec, local: torch.Tensor, rank: int, world: int) -> Iterator[_Part]:
    """Yield the parts of ``local``, which ``rank`` holds of a tensor."""
    flat = local.view(-1)
    elements = math.prod(spec.shape)
    first = spec.rows(rank, world)[0] * math.prod(spec.shape[1:])
    end = first + flat.numel()
    for block in range(first // BLOCK_ELEMENTS, ceil_div(end, BLOCK_ELEMENTS)):
        begin = block * BLOCK_ELEMENTS
        start, stop = max(first, begin), min(end, begin + BLOCK_ELEMENTS)
        drawn = min(BLOCK_ELEMENTS, elements - begin)
        into = flat[start - first : stop - first]
        yield _Part(f"{block} {spec.name}", drawn, start - begin, into)


def _fill_task(parts: list[_Part], content: Content, seed: int) -> None:
    random = torch.Generator()
    for part in parts:
        random.manual_seed(xxhash.xxh3_64_intdigest(part.key.encode(), seed) >> 1)
        if content.kind == "normal" and part.into.is_floating_point():
            _fill_normal(part, random)
        else:
            _fill_bits(part, random, content.random_share)


def _fill_normal(part: _Part, random: torch.Generator) -> None:
    if part.into.dtype == torch.float32 and part.into.numel() == part.drawn:
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
