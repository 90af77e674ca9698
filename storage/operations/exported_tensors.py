"""The tensors of a checkpoint that are written to files of other programs: under which names and in
which dtypes, and where they come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...planner.table import TensorTable
from ..format.model_folder import ModelFile, ModelTensor
from ..format.torch_pickle import NEW_DTYPES
from .file_export import Source

__all__ = ["ExportPlan", "ExportedTensors"]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is written: ``files``, where the tensors in them come from, and last of all a file
    ``last``, by key and content, without which the others are nothing. ``tensors`` are counted, of
    those that are tied to one another only the first."""

    files: Sequence[ModelFile]
    sources: Mapping[str, Source]
    tensors: int
    tied: Mapping[str, str]
    last: tuple[str, bytes] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


class ExportedTensors:
    """The tensors with ``new_names``, and where they come from. ``tied`` are those that are tied to
    another: by new name, the new name of the other.

    Raises UsageError for tensors that ranks have for themselves, and dtypes that are not ``known``.
    """

    def __init__(
        self,
        table: TensorTable,
        new_names: Mapping[str, str],
        dtype: str | None,
        known: Collection[str],
    ) -> None:
        self._table = table
        self._dtype = dtype
        self._known = known
        _refuse_own(table, new_names)
        self.tied: dict[str, str] = {}
        self.tensors: list[tuple[ModelTensor, Source]] = []
        by_stored_row: dict[int, str] = {}
        for name, new_name in new_names.items():
            (row,) = table.rows[name]
            stored = table.stored_row(row)
            first = by_stored_row.setdefault(stored, new_name)
            if first == new_name:
                self.tensors.append(self._of(stored, new_name))
            else:
                self.tied[new_name] = first

    @property
    def sources(self) -> dict[str, Source]:
        """By new name, where a tensor comes from."""
        return {tensor.name: source for tensor, source in self.tensors}

    def _of(self, row: int, name: str) -> tuple[ModelTensor, Source]:
        t = self._table
        stored_dtype, itemsize = t.dtypes[t.dtype[row]]
        dtype = stored_dtype
        if self._dtype is not None and "float" in stored_dtype:
            dtype = self._dtype
        if dtype not in self._known:
            raise UsageError(
                f"tensor {t.names[row]!r} is of dtype {dtype}, which such files do not have",
                advice="Leave it out (only).",
            )
        convert_to = None
        if dtype != stored_dtype:
            convert_to = dtype
            itemsize = NEW_DTYPES[dtype]
        tensor = ModelTensor(name, dtype, itemsize, t.shape_of(row))
        return tensor, Source(row, t.dtypes[t.dtype[row]], convert_to)


def _refuse_own(tensors: TensorTable, names: Iterable[str]) -> None:
    """Raise UsageError where ranks have tensors of their own under one name."""
    for name in names:
        if tensors.owner[tensors.rows[name][0]] >= 0:
            raise UsageError(
                f"tensor {name!r} is another one on each rank",
                advice="Leave it out (only), or read it with Checkpoint.read.",
            )
