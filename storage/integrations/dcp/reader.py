"""DCP's storage reader for Holdfast checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....errors import (
    DamagedError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    ReplacedError,
    StateError,
)
from ....planner.box import Box
from ....planner.layout import box_layout
from ...format.manifest import Manifest
from ...operations.call_errors import closing, printed_uri
from ...operations.conversion.dcp_contents import Contents, serialized
from ...operations.loading.fill import fill
from ...operations.loading.overlaps import overlapping, read_overlaps
from ...operations.location import UriLike
from ...operations.options import BUDGET_NBYTES, check_budget
from ...pipeline.mapping import image_driver
from ...protocol.current import is_current, read_manifest
from ...ranks.process_group import current_rank
from ...runtime.engine import offload, run
from ...state.capture.lazy import fence
from ...state.dtypes import dtype_name
from ...state.filling.targets import Wanted
from .at_uri import AtUri, new_id
from .stock import StockReader

__all__ = ["HoldfastReader"]


class HoldfastReader(AtUri, StorageReader):
    """Reads a Holdfast checkpoint for ``torch.distributed.checkpoint.load``, with any planner.

    ``uri`` names one checkpoint; a ``checkpoint_id`` in the call takes precedence. Every byte read
    is verified. A tensor of another dtype than the stored one raises MismatchError before anything
    is read; with ``cast`` it is converted. Values that a writer saved as opaque bytes raise
    StateError, because unpickling them runs code from the checkpoint; with ``allow_opaque`` they
    are passed to the planner, which unpickles them. ``storage_options`` and ``budget_nbytes`` as in
    :func:`~holdfast.load`.

    A folder that DCP's own writer has saved is read by DCP's own reader, from any storage, without
    verification and without limit to host memory. Its pickles raise StateError unless
    ``weights_only=True`` of :func:`torch.load` accepts them; with ``allow_opaque`` they are
    unpickled.

    ``load_id`` identifies the load in DCP's metadata.
    """

    def __init__(
        self,
        uri: UriLike,
        *,
        cast: bool = False,
        allow_opaque: bool = False,
        storage_options: Mapping[str, object] | None = None,
        budget_nbytes: int = BUDGET_NBYTES,
    ) -> None:
        check_budget(budget_nbytes)
        super().__init__(uri)
        self._cast = cast
        self._allow_opaque = allow_opaque
        self._storage_options = dict(storage_options or {})
        self._budget_nbytes = budget_nbytes
        self._contents: Contents | None = None
        self._stock: StockReader | None = None
        self.load_id = new_id()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load of ``checkpoint_id``, if given."""
        super().reset(checkpoint_id)
        self._contents = None
        self._stock = None
        self.load_id = new_id()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata of the checkpoint, or of a folder that DCP's own writer has saved.

        Raises NotACheckpointError, DamagedError, ReplacedError, StateError, StorageError.
        """
        try:
            manifest = run(self._manifest())
        except NotACheckpointError:
            with contextlib.suppress(NotFoundError):
                return self._stock_metadata(**kwargs)
            raise
        if kwargs:
            # DCP gives the rank when it has failed to read metadata of all ranks. This rank would
            # load without collectives, and the others with them.
            raise ReplacedError(
                "the metadata could be read only at the second try",
                uri=printed_uri(self._uri),
                advice="Load again.",
            )
        self._contents = Contents(manifest, current_rank())
        return self._contents.metadata(StorageMeta(self._uri, manifest.attempt, self.load_id))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Record the metadata of a folder of DCP's own writer; other metadata is kept already."""
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Record in the plan which attempt it is for. Raises StateError for opaque values."""
        if self._stock is not None:
            return plan
        contents = self._known_contents()
        for item in plan.items:
            name = item.storage_index.fqn
            if contents.is_opaque(name) and not self._allow_opaque:
                raise StateError(
                    f"{name!r} is stored as opaque bytes; the planner would unpickle them, which "
                    f"runs code from the checkpoint",
                    advice="Leave it out of the state, or trust it with allow_opaque=True.",
                )
        return replace(plan, storage_data=contents.manifest.attempt)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have read the same manifest. Raises ReplacedError."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise ReplacedError(
                "another save has replaced this checkpoint while ranks began to read it",
                uri=printed_uri(self._uri),
                advice="Load again.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify all items of the plan.

        Raises MismatchError before anything is read; DamagedError, ReplacedError, StorageError.
        """
        fence()
        if self._stock is not None:
            return self._stock.read_data(plan, planner)
        contents = self._known_contents()
        wanted = Wanted()
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        values: list[tuple[ReadItem, object]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                values.append((item, contents.value(item.storage_index.fqn, wanted)))
            else:
                target = planner.resolve_tensor(item).detach()
                self._want(item, target, contents, wanted)
                tensors.append((item, target))
        run(self._read(contents.manifest, wanted))
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item, value in values:
            planner.load_bytes(item, serialized(value))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _want(
        self, item: ReadItem, target: torch.Tensor, contents: Contents, wanted: Wanted
    ) -> None:
        """Add the box named by ``item`` to ``wanted``, to be read into ``target``."""
        name = item.storage_index.fqn
        lengths = tuple(item.lengths)
        row = contents.tensor_row(name)
        problem = None
        stored = contents.dtype(row)
        if tuple(target.shape) != lengths:
            problem = f"{list(lengths)} elements are for a tensor of shape {list(target.shape)}"
        elif target.dtype != stored and not (self._cast and torch.can_cast(stored, target.dtype)):
            problem = (
                f"dtype {dtype_name(stored)} in the checkpoint, {dtype_name(target.dtype)} in the "
                f"state"
            )
        if problem is not None:
            raise MismatchError(
                f"{name}: {problem}",
                uri=printed_uri(self._uri),
                advice="HoldfastReader(uri, cast=True) converts dtypes.",
            )
        chunk = item.storage_index.offset or (0,) * len(lengths)
        offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
        layout = box_layout(contents.manifest.tensors.shape_of(row), Box(offsets, lengths))
        wanted.add_held(row, target, layout, name)

    def _stock_metadata(self, **kwargs: object) -> Metadata:
        stock = StockReader(self._driver, trusted=self._allow_opaque)
        stock.load_id = self.load_id
        metadata = stock.read_metadata(**kwargs)
        self._stock = stock
        return metadata

    async def _manifest(self) -> Manifest:
        async with closing(self._driver()) as driver:
            manifest, _ = await read_manifest(driver)
            return manifest

    async def _read(self, manifest: Manifest, wanted: Wanted) -> None:
        async with closing(self._driver()) as driver:
            try:
                await _filled(driver, manifest, wanted, self._budget_nbytes)
            except DamagedError as error:
                if await is_current(driver, manifest.attempt):
                    raise
                raise ReplacedError(
                    "another save has replaced this checkpoint while it was being read",
                    uri=driver.uri,
                    advice="Load again.",
                ) from error

    def _known_contents(self) -> Contents:
        if self._contents is None:
            self.read_metadata()
        assert self._contents is not None
        return self._contents

    def _driver(self) -> Driver:
        return open_driver(self._uri, **self._storage_options)


async def _filled(driver: Driver, manifest: Manifest, wanted: Wanted, budget_nbytes: int) -> None:
    """Read all wanted ranges.

    Tensors that share memory are filled one after the other, see
    :mod:`...operations.loading.overlaps`.
    """
    images = image_driver(driver, manifest)
    groups = await offload(overlapping, wanted)
    if groups:
        overlaps = await read_overlaps(
            images, manifest, wanted, groups, budget_nbytes, lambda done, total: None
        )
        if overlaps.conflicts:
            raise MismatchError("; ".join(overlaps.conflicts.values()), uri=driver.uri)
        await offload(overlaps.put)
        wanted = wanted.without({number for group in groups for number in group})
    await fill(images, manifest, wanted, budget_nbytes)
