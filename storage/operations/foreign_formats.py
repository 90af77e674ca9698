"""Recognises other formats at a URI that is not a checkpoint, to give helpful errors.

It looks only at names, and at the first bytes of a single file; at a bounded number of names, once,
after an error. It reads no format itself: :mod:`.conversion.importing` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from ...drivers.contract import Driver
from ...drivers.uri import Uri, join
from ...errors import HoldfastError, NotACheckpointError, StorageError
from ..format.manifest import ATTEMPT_PATTERN, MANIFEST_KEY
from ..format.patches import CHANNEL_HEAD_KEY
from ..runtime.engine import run
from .location import Place

P = ParamSpec("P")
T = TypeVar("T")

LOOKED_AT = 2000
"""Number of names to look at: two requests of an object store."""
LOOK_S = 10.0
_HEAD_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Finding:
    """Contents of a URI, as the second half of a sentence, and advice."""

    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class _Format:
    """A folder of another program: patterns that names in it must match, the program that reads
    it, and whether ``holdfast import`` does."""

    name: str
    patterns: tuple[str, ...]
    reader: str
    is_imported: bool = False


_IN = r"(?:^|^[^/]+/)"
"""Matches at the top of the folder, or one level below."""

_FOLDERS = (
    _Format("a DeepSpeed checkpoint", (r"(?:^|/)\w*zero_pp_rank_\d+_|(?:^|/)mp_rank_\d+",), "DeepSpeed's load_checkpoint", True),
    _Format("a DeepSpeed checkpoint", (r"^latest$", r"^global_step\d+/"), "DeepSpeed's load_checkpoint", True),
    _Format("a Lightning checkpoint", (_IN + r"meta\.pt$", _IN + r"\.metadata$"), "Lightning's Trainer"),
    _Format("a checkpoint of Megatron-core", (r"^common\.pt$", r"^\.metadata$"), "Megatron-LM", True),
    _Format("a Megatron-LM checkpoint", (r"^latest_checkpointed_iteration\.txt$",), "Megatron-LM"),
    _Format("a Megatron-LM checkpoint", (_IN + r"common\.pt$", _IN + r"metadata\.json$"), "Megatron-LM"),
    _Format("a checkpoint of torch.distributed.checkpoint", (_IN + r"\.metadata$",), "torch.distributed.checkpoint.load", True),
    _Format("a checkpoint of torch.distributed.checkpoint", (_IN + r"[^/]*\.distcp$",), "torch.distributed.checkpoint.load"),
    _Format("a torchsnapshot", (_IN + r"\.snapshot_metadata$",), "torchsnapshot"),
    _Format("an Orbax checkpoint", (r"(?:^|/)_CHECKPOINT_METADATA$",), "orbax.checkpoint"),
    _Format("a TensorStore", (r"(?:^|/)(?:manifest\.ocdbt|\.zarray|zarr\.json)$",), "tensorstore, or Orbax"),
    _Format("a TensorFlow checkpoint", (_IN + r"[^/]*\.data-\d+-of-\d+$",), "TensorFlow"),
    _Format("an adapter of PEFT", (_IN + r"adapter_(?:config\.json|model\.\w+)$",), "peft"),
    _Format("a checkpoint of Hugging Face's Trainer", (_IN + r"trainer_state\.json$",), "transformers"),
    _Format("a checkpoint of Accelerate", (_IN + r"random_states_\d+\.pkl$",), "accelerate"),
    _Format("a model in Hugging Face's safetensors", (_IN + r"[^/]*\.safetensors(?:\.[^/]*\.json)?$",), "safetensors", True),
    _Format("a model of Hugging Face", (_IN + r"pytorch_model[^/]*\.bin(?:\.[^/]*\.json)?$",), "transformers"),
    _Format("files of torch.save", (_IN + r"[^/]*\.(?:pt|pth|ckpt|bin)$",), "torch.load"),
)  # fmt: skip

_TORCH_MEMBERS = (b"/data.pkl", b"/.format_version", b"/byteorder")
"""Possible names of the first member of a zip file written by torch.save."""
_PICKLES = (b"\x02", b"\x03", b"\x04", b"\x05")
_UNFINISHED = re.compile(rf"^data/{ATTEMPT_PATTERN}/(?:attempt\.json|\d+\.safetensors)")
_MANIFEST = re.compile(rf"^(.+)/{re.escape(MANIFEST_KEY)}$")


def explains(uri: str, options: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that its errors describe foreign data at its argument ``uri``.

    ``uri`` is the first argument; ``options`` names the argument with storage options.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (NotACheckpointError, StorageError) as error:
                given = kwargs.get(uri, args[0] if args else None)
                with_options = kwargs.get(options)
                better = _better(error, given, with_options)
                if better is None:
                    raise
                raise better from error.__cause__

        return explained

    return decorate


def _better(error: HoldfastError, uri: object, options: object) -> NotACheckpointError | None:
    """Return an error that names the contents of the URI; None if unknown or unrelated."""
    is_file = isinstance(error.__cause__, NotADirectoryError)
    if not is_file and type(error) is not NotACheckpointError:
        return None
    if not isinstance(uri, str | os.PathLike) or not isinstance(options, Mapping | None):
        return None
    try:
        place = Place.of(uri, options)
        finding = run(found_at(place))
    except HoldfastError:
        return None
    if finding is None:
        return None
    return NotACheckpointError(
        f"nothing is committed here: {finding.what}", uri=place.uri.redacted, advice=finding.advice
    )


async def found_at(place: Place) -> Finding | None:
    """Return the contents of the place; None if unknown or empty."""
    try:
        async with asyncio.timeout(LOOK_S):
            names = await _names(place)
            if names:
                return _of_folder(place, names)
            return await _of_file(place) or await _beside(place)
    except (HoldfastError, TimeoutError):
        return None


async def _names(place: Place) -> list[str]:
    names: list[str] = []
    with contextlib.suppress(StorageError):
        async with place.opened() as driver, contextlib.aclosing(_listed(driver)) as listed:
            async for key in listed:
                names.append(key)
                if len(names) == LOOKED_AT:
                    break
    return names


async def _listed(driver: Driver) -> AsyncGenerator[str]:
    async for info in driver.list():
        yield info.key


def _of_folder(place: Place, names: Sequence[str]) -> Finding | None:
    if MANIFEST_KEY in names:
        return None
    folders = sorted({match[1] for name in names if (match := _MANIFEST.match(name))}, key=_natural)
    if CHANNEL_HEAD_KEY in names and any(folder.isdecimal() for folder in folders):
        return Finding(
            "it is a weight channel",
            "Follow it with holdfast.subscribe, or copy a version with `holdfast weights pull`.",
        )
    if folders:
        return Finding(
            f"{_checkpoints_are(folders)} below it",
            f"Did you mean {_below(place.uri, folders[-1])}? `holdfast ls` lists them.",
        )
    if any(_UNFINISHED.match(name) for name in names):
        return Finding(
            "a save of Holdfast is in progress, or was interrupted",
            "Load another checkpoint of the run; `holdfast ls` on the folder above lists them.",
        )
    for kind in _FOLDERS:
        if all(any(re.search(pattern, name) for name in names) for pattern in kind.patterns):
            return Finding(f"it looks like {kind.name}", _advice(kind.reader, kind.is_imported))
    return None


def _advice(reader: str, is_imported: bool = False) -> str:
    if is_imported:
        return "`holdfast import SRC DEST`, or holdfast.import_, converts it to a checkpoint."
    return (
        f"Holdfast does not read that. Load it with {reader}, and save the state with "
        f"holdfast.save."
    )


def _below(uri: Uri, path: str) -> str:
    return join(Uri(uri.scheme, uri.location), *path.split("/")).redacted


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders step-10 after step-9."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)
    ]


async def _of_file(place: Place) -> Finding | None:
    try:
        parent, name = place.divided()
        async with parent.opened() as driver:
            nbytes = (await driver.stat(name)).nbytes
            head = bytes(await driver.fetch(name, 0, min(nbytes, _HEAD_NBYTES)))
    except HoldfastError:
        return None
    return _of_head(head, name)


def _of_head(head: bytes, name: str) -> Finding:
    if name == MANIFEST_KEY:
        return Finding(
            "it is the manifest of a checkpoint",
            "The URI of a checkpoint is that of the folder it is in.",
        )
    if head.startswith(b"PK\x03\x04") and any(member in head for member in _TORCH_MEMBERS):
        if name.endswith(".ckpt"):
            return Finding(
                "it is a file of torch.save, as Lightning's Trainer writes it",
                _advice("Lightning's Trainer", True),
            )
        return Finding("it is a file of torch.save", _advice("torch.load", True))
    if head[:1] == b"\x80" and head[1:2] in _PICKLES:
        return Finding("it is a pickle of an older version of torch.save", _advice("torch.load"))
    if head[8:10] == b'{"':
        return Finding("it is a safetensors file", _advice("safetensors", True))
    return Finding("it is a file", "The URI of a checkpoint is that of a folder.")


async def _beside(place: Place) -> Finding | None:
    """Suggest a checkpoint in the parent folder if nothing is at the place itself."""
    parent, name = place.divided()
    if not parent.uri.location.strip("/"):
        return None  # the root of a file system holds far too much
    names = await _names(parent)
    folders = sorted({match[1] for key in names if (match := _MANIFEST.match(key))}, key=_natural)
    folders = [folder for folder in folders if "/" not in folder]
    if not folders:
        return None
    close = [
        folder for folder in folders if _numbers(folder) and _numbers(folder) == _numbers(name)
    ]
    close += get_close_matches(name, folders, 1)
    if close:
        meant = close[0]
    else:
        meant = folders[-1]
    advice = f"Did you mean {_below(parent.uri, meant)}? `holdfast ls` lists them."
    return Finding(f"{_checkpoints_are(folders)} beside it", advice)


def _checkpoints_are(folders: Sequence[str]) -> str:
    if len(folders) == 1:
        return "a checkpoint is"
    return f"{len(folders)} checkpoints are"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
