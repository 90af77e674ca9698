"""The tensors of one rank whose replicas it does not know: labels, and the ranks of their
meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...format.digest import digest
from ...state.fingerprint import label, unsure_rows
from ...state.flat_state import FlatState
from ..rounds import HeldStatement

__all__ = ["DigestColumn", "Held", "digest_column", "label_names", "row_nbytes"]

DigestColumn = npt.NDArray[np.uint8]
"""Digests, one per row: (n, ``_DIGEST_NBYTES``)."""
_DIGEST_NBYTES = 16


@dataclass(frozen=True, eq=False)
class Held:
    """The rows of one rank whose replicas it does not know, regardless of their values.

    ``labels``: (n, 16); plain tensors and parts of DTensors never share a label. ``mesh``: (n,)
    int16, each row's group as an index into ``groups``, -1 for a plain tensor. ``groups``: bytes
    held by each group of ranks named by a mesh, keyed by a digest of the ranks; also counts rows
    not listed here.
    """

    labels: DigestColumn
    mesh: npt.NDArray[np.int16]
    groups: dict[str, int]

    @classmethod
    def of(cls, flat: FlatState, rank: int, world: int) -> Held:
        """Return the ``unsure_rows`` of ``flat``, held by ``rank`` of ``world``."""
        rows = unsure_rows(flat, world)
        # Keyed by ids of rank tuples, which thousands of tensors share.
        names: dict[int, str] = {}
        groups = Counter[str]()
        for row, layout in enumerate(flat.layouts):
            if layout.holders is None or layout.is_empty:
                continue
            name = names.get(id(layout.holders))
            if name is None:
                ranks = layout.holders or (rank,)
                name = digest(np.array(ranks, np.int64).data).hex()
                names[id(layout.holders)] = name
            groups[name] += row_nbytes(flat, row)
        number = {name: i for i, name in enumerate(groups)}
        holders = [flat.layouts[row].holders for row in rows]
        mesh = [-1 if known is None else number[names[id(known)]] for known in holders]
        labels = b"".join(digest(text) for text in _label_texts(flat, rows))
        return cls(digest_column(labels), np.array(mesh, np.int16), dict(groups))

    @property
    def names(self) -> list[str]:
        """The labels in hexadecimal."""
        return label_names(self.labels)

    def encode(self, host: str | None) -> HeldStatement:
        """Return the message for the leader, from a rank on ``host``."""
        return HeldStatement(self.labels.tobytes(), self.mesh.tobytes(), self.groups, host)

    @classmethod
    def decode(cls, message: HeldStatement) -> Held:
        """Invert :meth:`encode`."""
        mesh = np.frombuffer(message.mesh, np.int16)
        return cls(digest_column(message.labels), mesh, message.groups)


def _label_texts(flat: FlatState, rows: Sequence[int]) -> Iterator[bytes]:
    for row in rows:
        if flat.layouts[row].holders is None:
            kind = "plain "
        else:
            kind = "part "
        yield (kind + label(flat, row)).encode("utf-8", "surrogatepass")


def row_nbytes(flat: FlatState, row: int) -> int:
    """Return the bytes of a row; 0 if it is tied to another."""
    if flat.alias[row] < 0:
        return flat.locals[row].nbytes
    return 0


def label_names(labels: DigestColumn) -> list[str]:
    """Return labels in hexadecimal."""
    text = labels.tobytes().hex()
    width = 2 * _DIGEST_NBYTES
    return [text[i : i + width] for i in range(0, len(text), width)]


def digest_column(joined: bytes) -> DigestColumn:
    """Return concatenated digests as a column."""
    return np.frombuffer(joined, np.uint8).reshape(-1, _DIGEST_NBYTES)
