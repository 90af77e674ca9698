"""Checkpoints of Ray Train, saved by all workers directly into Ray's storage.

    step = load_reported(state)
    save_and_report({"loss": loss}, state, step=step)

Ray normally copies a folder of each worker into its storage. Here nothing is copied: workers save
to the destination of that copy, and report it. Ray keeps and deletes checkpoints as usual.

Scope: code that runs in a worker. Ray's storage may be a shared folder, ``s3://`` or ``gs://``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode

from ...drivers.uri import parse
from ...errors import UsageError
from ..operations.loading.differences import Strict
from ..operations.location import UriLike
from .doors import Door
from .newest import as_path_or_uri, newest_checkpoint

__all__ = ["load_reported", "save_and_report", "uri_of"]

_PREFIXES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""URI prefixes by pyarrow's file system type."""
_door = Door()


def save_and_report(
    metrics: Mapping[str, Any],
    state: object,
    *,
    step: int,
    folder: UriLike | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Save ``state`` as ``checkpoint-<step>`` in Ray's storage, and report it with ``metrics``.

    If Ray has a checkpoint of that name, as after a step back, the name gets a suffix: Ray deletes
    by name. Every worker calls this, with its own part of the state. ``folder``: where to save in
    Ray's local mode, which has no storage. Raises as :func:`holdfast.save`; UsageError if it is
    missing.
    """
    if folder is None:
        storage = _storage_of_run()
        place = Checkpoint(storage.experiment_fs_path, storage.storage_filesystem)
    else:
        place = Checkpoint(as_path_or_uri(parse(folder)))
    reported = Checkpoint(_unreported(f"{place.path}/checkpoint-{step}"), place.filesystem)
    _door.save(uri_of(reported), state, step=step, storage_options=storage_options)
    ray.train.report(
        dict(metrics),
        checkpoint=reported,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def load_reported(
    state: object,
    *,
    folder: UriLike | None = None,
    strict: Strict = True,
    storage_options: Mapping[str, object] | None = None,
) -> bool:
    """Load the checkpoint reported last into ``state``; return whether there was one.

    It may be from before a failure of workers, or from an earlier run of the same name. Every
    worker calls this. ``folder``: where to look in Ray's local mode, which forgets the reports of
    earlier runs. Raises as :func:`holdfast.load`; UsageError if it is missing.
    """
    reported = ray.train.get_checkpoint()
    if reported is not None:
        uri: str | None = uri_of(reported)
    elif folder is not None:
        uri = newest_checkpoint(folder, storage_options=storage_options)
    else:
        _storage_of_run()
        uri = None
    if uri is not None:
        _door.load_to_train(uri, into=state, strict=strict, storage_options=storage_options)
    return uri is not None


def _storage_of_run() -> Any:
    """Return Ray's storage context. Raises UsageError in its local mode, which has none."""
    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError as error:
        raise UsageError(
            "in its local mode Ray has no storage for checkpoints", advice="Pass folder=."
        ) from error


def _unreported(path: str) -> str:
    """Return ``path``, with a suffix if it was reported before and Ray has not deleted it."""
    known = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    taken = {reported.checkpoint.path for reported in known}
    names = itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def uri_of(checkpoint: Checkpoint) -> str:
    """Return the URI of a Ray checkpoint. Raises UsageError for an unknown kind of file system."""
    kind: str = checkpoint.filesystem.type_name
    path: str = checkpoint.path
    if kind not in _PREFIXES:
        raise UsageError(
            f"Ray's storage is a file system of type {kind!r}",
            advice=f"Known ones: {', '.join(_PREFIXES)}.",
        )
    return _PREFIXES[kind] + path
