"""Torch's distributed checkpoint (DCP) on its own storage, fsspec's, s3torchconnector's and
ours."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ...drivers.uri import Uri
from .peer import Peer, State

__all__ = ["THROUGH_DCP"]

Opened = Callable[[Uri], Any]
REGION = "us-east-1"


def _save(writer: Opened, uri: Uri, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            state_dict_saver.save(state, storage_writer=writer(uri), no_dist=True)
    except CheckpointException as error:  # a BaseException, unlike most errors
        raise RuntimeError(str(error)) from error


def _load(reader: Opened, uri: Uri, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            state_dict_loader.load(state, storage_reader=reader(uri), no_dist=True)
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


def _file_writer(threads: int, uri: Uri) -> Any:
    from torch.distributed.checkpoint import filesystem

    return filesystem.FileSystemWriter(uri.location, thread_count=threads)


def _file_reader(uri: Uri) -> Any:
    from torch.distributed.checkpoint import filesystem

    return filesystem.FileSystemReader(uri.location)


def _fsspec_writer(uri: Uri) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    url, options = _of_fsspec(uri)
    return FsspecWriter(url, **options)


def _fsspec_reader(uri: Uri) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    url, options = _of_fsspec(uri)
    return FsspecReader(url, **options)


def _of_fsspec(uri: Uri) -> tuple[str, dict[str, Any]]:
    """Return a URI in fsspec's form, and the arguments of its file system."""
    if uri.scheme == "s3":
        return f"s3://{uri.location}", {"endpoint_url": _endpoint(uri)}
    from ..limit.bare_drivers import bare_driver

    tree = bare_driver(uri)._tree
    return f"{uri.scheme.removeprefix('fsspec+')}://{uri.location}", dict(tree._arguments)


def _connector_writer(uri: Uri) -> Any:
    dcp: Any = importlib.import_module("s3torchconnector.dcp")
    writer = dcp.S3StorageWriter(REGION, f"s3://{uri.location}")
    writer.fs = _connector_files(dcp, uri)
    return writer


def _connector_reader(uri: Uri) -> Any:
    dcp: Any = importlib.import_module("s3torchconnector.dcp")
    reader = dcp.S3StorageReader(REGION, f"s3://{uri.location}")
    reader.fs = _connector_files(dcp, uri)
    return reader


def _connector_files(dcp: Any, uri: Uri) -> Any:
    """Return the connector's file system at the endpoint of ``uri``, which its public arguments
    cannot set."""
    client: Any = importlib.import_module("s3torchconnector._s3client")
    config = client.S3ClientConfig(force_path_style=True)
    made = client.S3Client(REGION, endpoint=_endpoint(uri), s3client_config=config)
    return dcp.S3FileSystem(REGION, s3_client=made)


def _endpoint(uri: Uri) -> str | None:
    return uri.options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")


def _our_writer(uri: Uri) -> Any:
    from holdfast.storage.integrations.dcp import HoldfastWriter

    return HoldfastWriter(str(uri))


def _our_reader(uri: Uri) -> Any:
    from holdfast.storage.integrations.dcp import HoldfastReader

    return HoldfastReader(str(uri))


THROUGH_DCP = (
    Peer("dcp", "DCP", partial(_save, partial(_file_writer, 1)), partial(_load, _file_reader)),
    Peer(
        "dcp4",
        "DCP, 4 threads",
        partial(_save, partial(_file_writer, 4)),
        partial(_load, _file_reader),
        loads=False,
    ),
    Peer(
        "dcp",
        "DCP, s3fs",
        partial(_save, _fsspec_writer),
        partial(_load, _fsspec_reader),
        durable=True,
        schemes=("s3",),
        modules=("s3fs",),
        packages="s3fs",
    ),
    Peer(
        "dcp",
        "DCP, fsspec",
        partial(_save, _fsspec_writer),
        partial(_load, _fsspec_reader),
        durable=True,
        schemes=("fsspec+",),
        modules=("fsspec",),
        packages="fsspec",
    ),
    Peer(
        "s3torchconnector",
        "DCP, s3torchconnector",
        partial(_save, _connector_writer),
        partial(_load, _connector_reader),
        durable=True,
        schemes=("s3",),
        modules=("s3torchconnector", "tenacity"),
        packages="s3torchconnector tenacity",
    ),
    Peer(
        "holdfast-dcp",
        "holdfast through DCP",
        partial(_save, _our_writer),
        partial(_load, _our_reader),
        durable=True,
    ),
)
