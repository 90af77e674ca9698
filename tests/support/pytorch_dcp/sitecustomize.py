"""Puts our writer and reader in place of DCP's own, in a process that has this folder on its path.

Python imports this module as it starts, so it also reaches the processes that PyTorch's tests spawn.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter


class Writer(HoldfastWriter):
    """Accepts the options of DCP's own writer. Those for its files have no meaning here."""

    def __init__(
        self, path: str | os.PathLike[str], *_: Any, overwrite: bool = True, **__: Any
    ) -> None:
        super().__init__(path, overwrite=overwrite, allow_opaque=True)


class Reader(HoldfastReader):
    """Accepts the options of DCP's own reader."""

    def __init__(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        super().__init__(path, cast=True, allow_opaque=True)


for name, module in list(sys.modules.items()):
    if name.startswith("torch.distributed.checkpoint"):
        for stock, ours in (("FileSystemWriter", Writer), ("FileSystemReader", Reader)):
            if hasattr(module, stock):
                setattr(module, stock, ours)
