"""Open one bomb after the other in a gibibyte of memory, and print each result as JSON.

A bomb is a small file that causes large allocations. This program is a separate process, since a
bomb that succeeds kills it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

import holdfast
from holdfast.storage.format.manifest import MANIFEST_KEY
from support.forgery import Alter, Columns, Head, entry, forge, head, stored, tree, use

MEMORY_NBYTES = 1 << 30
TOP = (1 << 63) - 1


def shards_that_wrap(columns: Columns, fields: Head) -> None:
    """Set shard counts so that their sum wraps around to the right total."""
    counts = columns["tensor.shards"].astype(np.uint64)
    counts[:] = [1 << 62, 1 << 62, 1 << 62, 1 << 62, int(counts.sum())]
    columns["tensor.shards"] = counts


def names_that_wrap(columns: Columns, fields: Head) -> None:
    """Set lengths of names that wrap around thousands of times, so that all names coincide."""
    rounds, blob = 20_000, np.full(1 << 20, 65, np.uint8)
    n, one = (
        4 * rounds,
        [len(blob), TOP - len(blob), TOP - len(blob), 2 * len(blob) + 2 - len(blob)],
    )
    columns["tensor.name"], columns["tensor.name_nbytes"] = blob, np.array(one * rounds, np.uint64)
    for name in ("tensor.dtype", "tensor.ndim", "tensor.container", "tensor.shards"):
        columns[name] = np.resize(columns[name], n)


def images_that_wrap(columns: Columns, fields: Head) -> None:
    """Set chunk counts of images so that, in 64 bits, they match the number of digests."""
    fields["chunk_nbytes"] = fields["block_nbytes"] = 4096
    n = 1 << 13
    columns["image.rank"] = np.arange(n, dtype=np.uint16)
    columns["image.hashed_nbytes"] = np.full(n, TOP, np.uint64)
    fields["world"] = n
    columns["chunk.digest"] = np.zeros((0, 16), np.uint8)


def pages_of_terabytes(columns: Columns, fields: Head) -> None:
    """Declare a 4 TiB image in 16,384 large chunks of small blocks: 16 GiB of digests."""
    fields["chunk_nbytes"], fields["block_nbytes"] = 256 << 20, 4096
    columns["image.hashed_nbytes"] = np.array([1 << 42], np.uint64)
    columns["chunk.digest"] = np.zeros((1 << 14, 16), np.uint8)


def index_of_gigabytes(columns: Columns, fields: Head) -> None:
    """Declare the same image compressed: its block index would take 4 GiB."""
    pages_of_terabytes(columns, fields)
    fields["version"], fields["compression"] = 2, "lz4"
    columns["image.stored_nbytes"] = np.array([1 << 42], np.uint64)


def large_tensor(columns: Columns, fields: Head) -> None:
    """Declare a tensor of a terabyte with the matching number of digests."""
    fields["chunk_nbytes"], fields["block_nbytes"] = 256 << 20, 1 << 20
    columns["image.hashed_nbytes"] = np.array([(1 << 40) + (1 << 20)], np.uint64)
    columns["chunk.digest"] = np.zeros((4097, 16), np.uint8)
    shape = columns["tensor.shape"].astype(np.uint64)
    rows = (shape[:2] == shape[1]).all(axis=1)
    shape[:2][rows] = [1 << 36, 4]
    columns["tensor.shape"] = shape
    columns["shard.lengths"] = columns["shard.lengths"].astype(np.uint64)
    columns["shard.lengths"][0] = [1 << 36, 4]
    columns["shard.start"] = columns["shard.start"].astype(np.uint64)


def chain(columns: Columns, fields: Head) -> None:
    """Nest eight thousand containers; their prefixes grow quadratically, to 64 megabytes."""
    known = fields["tree"]["containers"]
    fields["tree"]["containers"] = known + [[max(0, n - 1) if n > len(known) else 0, "k", "dict"] for n in range(len(known), 8_000)]  # fmt: skip


def long_key(columns: Columns, fields: Head) -> None:
    """Put five thousand containers under a key of a million letters."""
    known = fields["tree"]["containers"]
    below = [[len(known), str(n), "dict"] for n in range(5_000)]
    fields["tree"]["containers"] = [*known, [0, "k" * 1_000_000, "dict"], *below]


def billions(columns: Columns, fields: Head) -> None:
    """Declare tables of a billion rows without columns, which take no bytes."""
    for name in ("tensor.shape", "shard.offsets", "shard.lengths"):
        columns[name] = np.zeros((10**9, 0), np.uint8)


def owners(columns: Columns, fields: Head) -> None:
    """Let five thousand ranks each own a tensor of the same name."""
    n, fields["world"] = 5_000, 5_000
    columns["tensor.name"], columns["tensor.name_nbytes"] = (
        np.full(n, 65, np.uint8),
        np.ones(n, np.uint8),
    )
    for name in ("tensor.dtype", "tensor.ndim", "tensor.container", "tensor.shards"):
        columns[name] = np.zeros(n, np.uint8)
    columns["tensor.ndim"][:] = 1
    columns["tensor.shape"] = np.zeros((n, 1), np.uint8)
    columns["tensor.owner"] = np.arange(1, n + 1).astype(np.uint32)
    columns.pop("tensor.alias", None)
    for name in ("shard.image", "shard.start"):
        columns[name] = columns[name][:0]
    columns["shard.offsets"] = columns["shard.lengths"] = np.zeros((0, 1), np.uint8)


BOMBS: dict[str, Alter] = {
    "shards that wrap round": shards_that_wrap,
    "names that wrap round": names_that_wrap,
    "images that wrap round": images_that_wrap,
    "pages of terabytes": pages_of_terabytes,
    "an index of gigabytes": index_of_gigabytes,
    "a tensor of a terabyte": large_tensor,
    "a chain of containers": chain,
    "a key of a million letters": long_key,
    "tables of a billion rows": billions,
    "five thousand owners": owners,
    "a world of 2^60 ranks": head("world", 1 << 60),
    "a run of 2^30 items": tree("orders", [[0, [["t", 1 << 30]]]]),
    "a shape of 2^62": entry("tensor.shape", (1, 0), 1 << 62),
}


def sparse(folder: Path, which: str) -> str:
    """Save a checkpoint, extend one file to a sparse terabyte, and return the path."""
    path = folder / which
    holdfast.save(path, {"w": torch.arange(64.0)})
    (image,) = path.rglob("0.safetensors")
    target = {"manifest": path / MANIFEST_KEY, "image": image}[which]
    os.truncate(target, 1 << 40)
    return str(path)


def main(folder: str) -> None:
    """Open all bombs."""
    made = {name: stored() for name in BOMBS}
    for name, uri in made.items():
        forge(uri, BOMBS[name])
    made |= {
        f"{which} of a terabyte": sparse(Path(folder), which) for which in ("manifest", "image")
    }
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_NBYTES, resource.RLIM_INFINITY))
    for name, uri in made.items():
        began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"bomb": name}), flush=True)
        raised = use(uri)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        kinds = sorted({type(error).__name__ for error in raised})
        told = {
            "bomb": name,
            "seconds": time.monotonic() - began_s,
            "grown_nbytes": grown,
            "raised": kinds,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
