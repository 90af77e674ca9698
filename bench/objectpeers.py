"""Whom saving to S3 is compared with: the bare client, and DCP with its two ways to S3. Each as its
documentation says."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import os
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import holdfast

from ..drivers.objects.options import Requests
from ..drivers.objects.s3 import S3Driver
from ..drivers.uri import Uri, join
from .content import Content, Noise
from .states import State

__all__ = ["Bare", "Peer", "below", "best", "peers"]

SETTINGS = tuple(itertools.product((8 << 20, 16 << 20), (4, 8, 16)))


@dataclass(frozen=True)
class Bare:
    """The client alone: one object in parts, no format.

    ``content`` gives what it sends, and takes what it receives; anew for each run, because a save
    and a load look their tensors up, too. Without it, it moves noise. Connected as this library
    connects, so both send and sign alike.
    """

    uri: Uri
    nbytes: int
    part_nbytes: int = 16 << 20
    concurrency: int = 16
    content: Callable[[], Content] | None = None

    def write(self) -> None:
        """Store the object."""
        asyncio.run(self._write(self._content()))

    async def _write(self, content: Content) -> None:
        import obstore

        async def parts() -> AsyncIterator[Any]:
            for start, stop in self._ranges():
                yield await asyncio.to_thread(content.take, start, stop)

        how = {"chunk_size": self.part_nbytes, "max_concurrency": self.concurrency}
        await obstore.put_async(self._store(), self._path, parts(), use_multipart=True, **how)  # type: ignore[arg-type]

    def read(self) -> None:
        """Get all of it, in ranges."""
        asyncio.run(self._read(self._content()))

    async def _read(self, content: Content) -> None:
        import obstore

        store = self._store()
        ranges = self._ranges()

        async def reader() -> None:
            for start, stop in ranges:
                data = await obstore.get_range_async(store, self._path, start=start, end=stop)
                await asyncio.to_thread(content.place, start, data)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(reader())

    def remove(self) -> None:
        """Delete the object."""
        import obstore

        obstore.delete(self._store(), self._path)

    def _content(self) -> Content:
        if self.content is None:
            return Noise(self.part_nbytes)
        return self.content()

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.nbytes, self.part_nbytes):
            yield start, min(start + self.part_nbytes, self.nbytes)

    @property
    def _path(self) -> str:
        return self.uri.location.partition("/")[2]

    def _store(self) -> Any:
        return S3Driver.open(self.uri)._connect(Requests.SENDING)


def best(
    uri: Uri, nbytes: int, *, reading: bool, settings: Sequence[tuple[int, int]] = SETTINGS
) -> Bare:
    """The bare client with the part size and concurrency that were fastest here, in a run of
    each."""
    found: list[tuple[float, Bare]] = []
    for part_nbytes, concurrency in settings:
        bare = Bare(uri, nbytes, part_nbytes, concurrency)
        if not reading or not found:
            _timed(bare.write)
        if reading:
            took_s = _timed(bare.read)
        else:
            took_s = _timed(bare.write)
        found.append((took_s, bare))
        print(f"  limit, {part_nbytes >> 20} MiB × {concurrency}: {found[-1][0]:.2f} s", flush=True)
    return min(found, key=lambda f: f[0])[1]


def _timed(run: Any) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


class Peer:
    """``save(uri, state)`` writes a new checkpoint; ``load(uri, state)`` fills the tensors of
    ``state`` in place."""

    name = "holdfast"

    def save(self, uri: Uri, state: State) -> None:
        """Durable on return."""
        holdfast.save(str(uri), state)

    def load(self, uri: Uri, state: State) -> None:
        """All tensors, from the store."""
        holdfast.load(str(uri), into=state)


class _Dcp(Peer):
    def save(self, uri: Uri, state: State) -> None:
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with warnings.catch_warnings(action="ignore"):
                state_dict_saver.save(state, storage_writer=self.writer(uri), no_dist=True)
        except CheckpointException as error:  # a BaseException, unlike most errors
            raise RuntimeError(str(error)) from error

    def load(self, uri: Uri, state: State) -> None:
        from torch.distributed.checkpoint import state_dict_loader

        with warnings.catch_warnings(action="ignore"):
            state_dict_loader.load(state, storage_reader=self.reader(uri), no_dist=True)

    def writer(self, uri: Uri) -> Any:
        raise NotImplementedError

    def reader(self, uri: Uri) -> Any:
        raise NotImplementedError


class _Fsspec(_Dcp):
    name = "DCP, s3fs"

    def writer(self, uri: Uri) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(f"s3://{uri.location}", endpoint_url=_endpoint(uri))

    def reader(self, uri: Uri) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(f"s3://{uri.location}", endpoint_url=_endpoint(uri))


class _Connector(_Dcp):
    name = "DCP, s3torchconnector"

    def writer(self, uri: Uri) -> Any:
        dcp: Any = importlib.import_module("s3torchconnector.dcp")
        writer = dcp.S3StorageWriter("us-east-1", f"s3://{uri.location}")
        writer.fs = self._fs(uri)
        return writer

    def reader(self, uri: Uri) -> Any:
        dcp: Any = importlib.import_module("s3torchconnector.dcp")
        reader = dcp.S3StorageReader("us-east-1", f"s3://{uri.location}")
        reader.fs = self._fs(uri)
        return reader

    def _fs(self, uri: Uri) -> Any:
        dcp: Any = importlib.import_module("s3torchconnector.dcp")
        client: Any = importlib.import_module("s3torchconnector._s3client")
        config = client.S3ClientConfig(force_path_style=True)
        made = client.S3Client("us-east-1", endpoint=_endpoint(uri), s3client_config=config)
        return dcp.S3FileSystem("us-east-1", s3_client=made)


def _endpoint(uri: Uri) -> str | None:
    return uri.options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")


def peers(*, alone: bool) -> list[Peer]:
    """This library, then, unless it is to be ``alone``, those that are installed."""
    out = [Peer()]
    if not alone and importlib.util.find_spec("s3fs"):
        out.append(_Fsspec())
    if (
        not alone
        and importlib.util.find_spec("s3torchconnector")
        and importlib.util.find_spec("tenacity")
    ):
        out.append(_Connector())
    return out


def below(uri: Uri, name: str) -> Uri:
    """A root of its own for each contestant."""
    return join(uri, name.replace(" ", "").replace(",", "-"))
