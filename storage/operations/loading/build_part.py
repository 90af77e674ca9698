"""Builds the state of a checkpoint, or a part of it, from the checkpoint alone."""

from __future__ import annotations

from ....errors import UsageError
from ...format.manifest import Manifest
from ...format.part import Part
from ...format.tree import dotted
from ...state.filling.build import build
from ...state.filling.targets import TypedPath, Wanted, typed_paths

__all__ = ["build_part"]

_LISTED = 10


def build_part(
    manifest: Manifest, rank: int, wanted: Wanted, part: Part | None, uri: str
) -> object:
    """Return the state as ``rank`` saved it, or a part of it.

    Its tensors are still uninitialized, and are added to ``wanted``. Raises UsageError if the part
    does not exist.
    """
    path: TypedPath = ()
    if part is not None:
        path = _path_of(manifest, part)
    try:
        state, _rows = build(manifest, rank, wanted, path)
    except KeyError:
        assert part is not None
        raise UsageError(
            f"there is no {part.name!r} in this checkpoint", uri=uri, advice=_advice(manifest)
        ) from None
    return state


def _path_of(manifest: Manifest, part: Part) -> TypedPath:
    """Return the path of a part. Keys with equal text are distinguished by type if both exist."""
    typed = tuple((type(key).__name__, key) for key in part.keys)
    containers = typed_paths(manifest.tree)
    found = [path for path in containers if _name_of(path) == part.name]
    for row in manifest.tensors.rows.get(part.name, ()):
        found.append(_path_of_tensor(manifest, row, containers))
    if not found or typed in found:
        return typed
    return found[0]


def _path_of_tensor(manifest: Manifest, row: int, containers: list[TypedPath]) -> TypedPath:
    tree = manifest.tree
    container = int(manifest.container[row])
    prefix = tree.prefixes()[container]
    key = tree.tensor_key(container, manifest.tensors.names[row].removeprefix(prefix))
    return (*containers[container], (type(key).__name__, key))


def _name_of(path: TypedPath) -> str:
    return dotted(key for _, key in path)


def _advice(manifest: Manifest) -> str:
    """Return advice that lists the checkpoint's top-level keys."""
    tops = dict.fromkeys(path[0][1] for path in typed_paths(manifest.tree) if path)
    names = [repr(key) for key in tops]
    if not names:
        return "`holdfast show` lists what is there."
    listed = ", ".join(names[:_LISTED])
    return f"At its top there are {listed}; `holdfast show` lists all."
