"""Torch's distributed checkpoint (DCP) on its own storage, fsspec's and ours."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from ...drivers.uri import Uri
from .peer import Peer, State

Kind = Literal["Writer", "Reader"]
Opened = Callable[[Kind, Uri], Any]
"""Opens a URI as a writer or a reader of DCP."""


def _peer(key: str, name: str, opened: Opened, **more: Any) -> Peer:
    return Peer(
        key, name, partial(_move, opened, "Writer"), partial(_move, opened, "Reader"), **more
    )


def _move(opened: Opened, kind: Kind, uri: Uri, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            if kind == "Writer":
                state_dict_saver.save(state, storage_writer=opened(kind, uri), no_dist=True)
            else:
                state_dict_loader.load(state, storage_reader=opened(kind, uri), no_dist=True)
    except CheckpointException as error:  # a BaseException, unlike most errors
        raise RuntimeError(str(error)) from error


def _async_save(uri: Uri, state: State) -> float:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with warnings.catch_warnings(action="ignore"):
        began_s = time.perf_counter()
        saving: Any = async_save(state, checkpoint_id=uri.location)
        stall_s = time.perf_counter() - began_s
        saving.result()
    return stall_s


def _files(kind: Kind, uri: Uri, *, threads: int = 1) -> Any:
    from torch.distributed.checkpoint import filesystem

    if kind == "Writer":
        return filesystem.FileSystemWriter(uri.location, thread_count=threads)
    return filesystem.FileSystemReader(uri.location)


def _fsspec(kind: Kind, uri: Uri) -> Any:
    """Open a URI in fsspec's form, with the arguments of its file system."""
    from torch.distributed.checkpoint import _fsspec_filesystem

    if uri.scheme == "s3":
        url, options = f"s3://{uri.location}", {"endpoint_url": _endpoint(uri)}
    else:
        from ..limit.client import bare_driver

        url = f"{uri.scheme.removeprefix('fsspec+')}://{uri.location}"
        options = dict(bare_driver(uri)._tree._arguments)
    return getattr(_fsspec_filesystem, f"Fsspec{kind}")(url, **options)


def _endpoint(uri: Uri) -> str | None:
    return uri.options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")


def _ours(kind: Kind, uri: Uri) -> Any:
    from holdfast.storage.integrations import dcp

    return getattr(dcp, f"Holdfast{kind}")(str(uri))


THROUGH_DCP = (
    _peer("dcp", "DCP", _files, async_save=_async_save),
    _peer("dcp4", "DCP, 4 threads", partial(_files, threads=4), loads=False),
    _peer("dcp", "DCP, s3fs", _fsspec, durable=True, schemes=("s3",), modules=("s3fs",)),
    _peer("dcp", "DCP, fsspec", _fsspec, durable=True, schemes=("fsspec+",), modules=("fsspec",)),
    _peer("holdfast-dcp", "holdfast through DCP", _ours, durable=True),
)
