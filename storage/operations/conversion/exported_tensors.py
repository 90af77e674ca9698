"""Tensors selected for an export: their new names, dtypes and sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....errors import UsageError
from ....planner.table import TensorTable
from ...format.model_folder import ModelFile, ModelTensor
from ...format.torch_pickle import NEW_DTYPES
from .file_export import Source


@dataclass(frozen=True, slots=True)
class LastFile:
    """A small file that describes the others. ``content()`` runs on any thread while the others
    are written."""

    key: str
    content: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of an export.

    ``sources`` locates the tensors in ``files``. ``last`` is written last; readers need it to use
    the others. ``tensors`` counts tensors, tied ones once.
    """

    files: Sequence[ModelFile]
    sources: Mapping[str, Source]
    tensors: int
    tied: Mapping[str, str]
    last: LastFile | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for file in self.files)


class ExportedTensors:
    """The selected tensors under ``new_names``, with their sources.

    ``tied`` maps the new name of a tied tensor to the new name of the first. Raises UsageError for
    tensors that differ per rank, and for dtypes that are not in ``known``.
    """

    def __init__(
        self,
        table: TensorTable,
        new_names: Mapping[str, str],
        dtype: str | None,
        known: Collection[str],
    ) -> None:
        self._dtype = dtype
        self._known = known
        rows = np.array([table.rows[name][0] for name in new_names], np.int64)
        for row in rows[table.owner[rows] >= 0].tolist():
            raise UsageError(
                f"tensor {table.names[row]!r} differs from rank to rank",
                advice="Leave it out (only), or read it with Checkpoint.read.",
            )
        alias = table.alias[rows]
        stored = np.where(alias < 0, rows, alias)
        kinds = [table.dtypes[code] for code in table.dtype[stored].tolist()]
        shapes = zip(table.shape[stored].tolist(), table.ndim[stored].tolist(), strict=True)
        self.tied: dict[str, str] = {}
        self.tensors: list[tuple[ModelTensor, Source]] = []
        by_stored_row: dict[int, str] = {}
        columns = zip(new_names.items(), stored.tolist(), kinds, shapes, strict=True)
        for (name, new_name), row, kind, (shape, ndim) in columns:
            first = by_stored_row.setdefault(row, new_name)
            if first != new_name:
                self.tied[new_name] = first
                continue
            written, itemsize, convert_to = self._written(name, kind)
            tensor = ModelTensor(new_name, written, itemsize, tuple(shape[:ndim]))
            self.tensors.append((tensor, Source(row, kind, convert_to)))

    @property
    def sources(self) -> dict[str, Source]:
        """Sources of the tensors, by new name."""
        return {tensor.name: source for tensor, source in self.tensors}

    def _written(self, name: str, kind: tuple[str, int]) -> tuple[str, int, str | None]:
        """Return the dtype and itemsize to write, and the dtype to convert to, if any."""
        stored_dtype, itemsize = kind
        dtype = stored_dtype
        if self._dtype is not None and "float" in stored_dtype:
            from ...state.dtypes import FLOATS, dtype_of, is_convertible

            dtype = self._dtype
            if not is_convertible(dtype_of(*kind), dtype_of(dtype, FLOATS[dtype])):
                raise UsageError(
                    f"tensor {name!r} is of dtype {stored_dtype}, which torch does not convert to "
                    f"{dtype}",
                    advice="Export it as it is (without a dtype), or leave it out (only).",
                )
        if dtype not in self._known:
            raise UsageError(
                f"tensor {name!r} is of dtype {dtype}, which this format cannot hold",
                advice="Leave it out (only).",
            )
        if dtype == stored_dtype:
            return dtype, itemsize, None
        return dtype, NEW_DTYPES[dtype], dtype
