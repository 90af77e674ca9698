"""Forged manifests: decoded, altered, and encoded again with a valid checksum."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.cli import app as cli
from holdfast.storage.format.columns import decode_columns, encode_columns
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.integrations.fsspec import HoldfastFileSystem
from holdfast.storage.runtime.engine import start

from .bits import fresh_uri
from .drivers import storage_at

Columns = dict[str, np.ndarray]
Head = dict[str, Any]
Alter = Callable[[Columns, Head], None]


def state() -> dict[str, Any]:
    """Return a state with one of each: tied tensors, lists, values, keys that are not text."""
    w = torch.arange(24.0).reshape(4, 6)
    return {
        "w": w,
        "again": w,
        "b": torch.arange(5),
        "list": [torch.tensor(1), 2, {"k": 3.5}],
        7: {None: torch.ones(2), "v": "x"},
    }


def stored() -> str:
    """Save :func:`state`; return the URI."""
    uri = fresh_uri()
    holdfast.save(uri, state())
    return uri


def replace_manifest(uri: str, data: bytes) -> None:
    """Replace the manifest by these bytes."""
    start(storage_at(uri).put(MANIFEST_KEY, data)).result()


def forge(uri: str, alter: Alter) -> None:
    """Decode the manifest, alter it, and encode it again, with a valid checksum."""
    data = start(storage_at(uri).get(MANIFEST_KEY)).result()
    columns, metadata = decode_columns(data, "manifest")
    head = json.loads(metadata["holdfast"])
    columns = {name: column.copy() for name, column in columns.items()}
    alter(columns, head)
    text = head if isinstance(head.get("text"), str) is False else None
    replace_manifest(
        uri,
        encode_columns(
            columns, {"holdfast": json.dumps(text) if text is not None else head["text"]}
        ),
    )


def use(uri: str) -> list[BaseException]:
    """Call everything that reads a checkpoint, each within 30 s; return our errors, fail on others."""
    raised: list[BaseException] = []

    def opened() -> None:
        with holdfast.open(uri) as c:
            for name, info in list(c.tensors.items()):
                repr(info)
                attempt(lambda name=name: c.read(name))
            attempt(lambda: list(c.values()))
            attempt(c.verify)
            repr(c)

    def attempt(work: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            work()
        except holdfast.HoldfastError as error:
            str(error)
            raised.append(error)
        assert time.monotonic() - began < 30

    def listed() -> None:
        files = HoldfastFileSystem(uri)
        for name in files.find("")[:50]:
            attempt(lambda name=name: files.cat_file(name))

    def commanded(*arguments: str) -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            status = cli.run(arguments)
        assert status in (0, 1, 2)

    attempt(opened)
    attempt(listed)
    attempt(lambda: holdfast.copy(uri, fresh_uri()))
    for command in (
        ["ls"],
        ["show", "--values"],
        ["verify"],
        ["du"],
        ["ls", "--json"],
        ["show", "--json"],
        ["verify", "--json"],
    ):
        attempt(lambda command=command: commanded(*command, uri))
    attempt(lambda: holdfast.load(uri))
    attempt(lambda: holdfast.load(uri, into=state(), strict=False))
    attempt(lambda: holdfast.list_checkpoints(uri))
    return raised


def put(name: str, value: Any) -> Alter:
    """Replace a column by an array of the narrowest type that holds ``value``."""

    def alter(columns: Columns, head: Head) -> None:
        columns[name] = np.asarray(
            value, dtype=columns[name].dtype if np.size(value) == 0 else None
        )
        if columns[name].dtype.kind == "i":
            columns[name] = columns[name].astype(
                np.min_scalar_type(int(columns[name].max(initial=0)))
            )

    return alter


def entry(name: str, index: Any, value: int) -> Alter:
    """Set one entry of a column."""

    def alter(columns: Columns, head: Head) -> None:
        columns[name] = columns[name].astype(np.uint64)
        columns[name][index] = value

    return alter


def head(name: str, value: Any) -> Alter:
    """Set a field of the header."""
    return lambda columns, fields: fields.__setitem__(name, value)


def tree(name: str, value: Any) -> Alter:
    """Set a part of the tree."""
    return lambda columns, fields: fields["tree"].__setitem__(name, value)


def renamed(old: str, new: str) -> Alter:
    """Give a tensor another name."""

    def alter(columns: Columns, fields: Head) -> None:
        sizes = columns["tensor.name_nbytes"].tolist()
        ends = np.cumsum(sizes).tolist()
        blob = columns["tensor.name"].tobytes()
        names = [blob[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]
        encoded = [(new if name == old else name).encode() for name in names]
        assert names != [name.decode() for name in encoded]
        columns["tensor.name"] = np.frombuffer(b"".join(encoded), np.uint8)
        columns["tensor.name_nbytes"] = np.array([len(name) for name in encoded], np.uint16)

    return alter
