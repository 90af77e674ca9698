"""The end of a job under a trainer."""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

_MOMENT_S = 0.2


def leave() -> None:
    """Leave the process group; let gloo's threads come to rest before the interpreter ends.

    Such a thread lets the tensors of a collective go a moment after the collective has ended, and
    needs the interpreter's lock for those of Python. Where the interpreter ends just then, the
    process dies of SIGABRT. DDP keeps its process group, so that destroying it ends no thread.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_MOMENT_S)
