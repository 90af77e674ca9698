"""A job that saves asynchronously through torch's distributed checkpoint, in processes and in a
thread. Argument: the folder."""

from __future__ import annotations

import sys
from concurrent.futures import Future

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from holdfast.storage.integrations.dcp import HoldfastWriter
from support.dcp_tasks import arranged


def main() -> None:
    """Run on every rank."""
    # The oldest supported torch does not have it.
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    folder = sys.argv[1]
    dist.init_process_group("gloo")
    for name, step in (("process", 1), ("process", 2), ("thread", 3)):
        state = arranged(step)
        saving = dcp.async_save(
            state,
            storage_writer=HoldfastWriter(f"{folder}/{name}-{step}"),
            async_checkpointer_type=AsyncCheckpointerType(name),
        )
        for each in ("sharded", "replicated", "plain"):
            with torch.no_grad():
                state[each].zero_()  # it is staged
        assert isinstance(saving, Future)
        saving.result(60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
