"""Flat states built from specs: the result of flattening a rank's state, without its tensors.

Planning needs names, shapes, dtypes and layouts only. So jobs of any size can be planned in a
process that could not hold, or even address, their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.layout import Layout, MeshLayout, local_layout
from ...planner.placement import Split, local_pieces, local_shape
from ...storage.state.dtypes import dtype_of
from ...storage.state.flat_state import FlatState
from ...storage.state.plan import Agreed
from ..workloads.spec import Spec, itemsize_of

__all__ = ["FlatStates"]


class FlatStates:
    """The flat states of the ranks of one job."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._specs: Sequence[Spec] = ()
        self._like = FlatState()

    def of(self, specs: Sequence[Spec], rank: int) -> tuple[FlatState, Agreed | None, bool]:
        """Return a rank's flat state, its agreement with the others (None if it is alone), and
        whether it has the same tensors as the rank of the previous call."""
        is_alike = specs == self._specs
        if not is_alike:
            self._specs = specs
            self._like = _without_layouts(specs)
        like = self._like
        flat = FlatState(
            names=like.names,
            containers=like.containers,
            shapes=like.shapes,
            dtypes=like.dtypes,
            layouts=self._layouts(specs, rank),
            alias=like.alias,
            tree=like.tree,
        )
        return flat, self._agreed(specs, rank), is_alike

    def _agreed(self, specs: Sequence[Spec], rank: int) -> Agreed | None:
        if self._world == 1:
            return None
        # No other rank has a tensor of that name: the leader would find a group of one rank.
        own = {row: (rank,) for row, spec in enumerate(specs) if not spec.sharded}
        return Agreed(own, {})

    def _layouts(self, specs: Sequence[Spec], rank: int) -> list[Layout]:
        made: dict[tuple[int, ...], Layout] = {}  # layers repeat, so there are few shapes
        layouts: list[Layout] = []
        for spec in specs:
            if not spec.sharded or self._world == 1:
                layouts.append(local_layout(spec.shape))
                continue
            layout = made.get(spec.shape)
            if layout is None:
                layout = made[spec.shape] = self._split(spec.shape, rank)
            layouts.append(layout)
        return layouts

    def _split(self, shape: tuple[int, ...], rank: int) -> MeshLayout:
        where = (self._world,), (rank,), (Split(0),)
        pieces = tuple(local_pieces(shape, *where))
        return MeshLayout(shape, pieces, local_shape(shape, *where), (rank,), self._world)


def _without_layouts(specs: Sequence[Spec]) -> FlatState:
    count = len(specs)
    return FlatState(
        names=[spec.name for spec in specs],
        containers=[0] * count,
        shapes=[spec.shape for spec in specs],
        dtypes=[dtype_of(spec.dtype, itemsize_of(spec.dtype)) for spec in specs],
        alias=[-1] * count,
    )
