"""Folders that DCP's own writer has saved, read by DCP's own reader, from any storage.

DCP pickles its metadata and values. Without ``trusted``, metadata is parsed first, without running
any of it, and values are loaded with ``weights_only=True``. Both refuse anything that could run
code.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ....drivers.contract import Driver
from ....errors import StateError
from ...format.dcp_metadata import DCP_METADATA_KEY, read_metadata
from ...operations.conversion.dcp_contents import serialized
from ...runtime.engine import run
from ..driver_file import DriverFile

__all__ = ["StockReader"]

_BUFFER_NBYTES = 1 << 20


class StockReader(FileSystemReader):
    """DCP's own reader of a folder, whose files are read by the drivers that ``opened`` returns.

    ``trusted``: metadata and values may be pickles that run code. Otherwise those raise StateError.
    """

    def __init__(self, opened: Callable[[], Driver], *, trusted: bool) -> None:
        super().__init__("")
        self.fs = _Files(opened, trusted=trusted)
        self._trusted = trusted

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan. Raises StateError, StorageError, and what DCP raises."""
        if not self._trusted:
            planner = cast(LoadPlanner, _WithoutPickle(planner))
        return super().read_data(plan, planner)


class _Files(FileSystem):
    """The files of a folder, by name."""

    def __init__(self, opened: Callable[[], Driver], *, trusted: bool) -> None:
        self._opened = opened
        self._trusted = trusted

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for reading. Raises NotFoundError; StateError for untrusted metadata."""
        key = os.fspath(path)
        driver = self._opened()
        try:
            if key.endswith(DCP_METADATA_KEY):
                data = run(driver.get(key))
                if not self._trusted:
                    _check_metadata(data, driver.uri, key)
                yield io.BytesIO(data)
            else:
                yield io.BufferedReader(DriverFile(driver, key), _BUFFER_NBYTES)
        finally:
            run(driver.close())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the key of the file ``suffix``."""
        return suffix


class _WithoutPickle:
    """A load planner that never receives bytes from storage to unpickle."""

    def __init__(self, planner: LoadPlanner) -> None:
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor
        self._load_bytes = planner.load_bytes

    def load_bytes(self, item: ReadItem, stream: io.BytesIO) -> None:
        """Pass on the value in ``stream``. Raises StateError if it needs pickle."""
        try:
            value = torch.load(  # noqa: TID251  # torch's own loader, restricted
                stream, map_location="cpu", weights_only=True
            )
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            raise _needs_pickle(repr(item.storage_index.fqn)) from error
        self._load_bytes(item, serialized(value))


def _check_metadata(data: bytes, uri: str, key: str) -> None:
    try:
        read_metadata(data)
    except ValueError as error:
        refused = _needs_pickle(f"metadata ({error})")
        refused.uri, refused.key = uri, key
        raise refused from error


def _needs_pickle(what: str) -> StateError:
    return StateError(
        f"torch's distributed checkpoint has saved {what} in a form that needs pickle, which runs "
        f"code from the checkpoint",
        advice="If you trust the folder, pass HoldfastReader(uri, allow_opaque=True).",
    )
