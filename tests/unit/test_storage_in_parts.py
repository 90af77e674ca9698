"""Tensors that report several parts per rank through their hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.drivers import storage_at
from support.ranks import load_as_ranks, save_as_ranks

import holdfast

WHOLE = torch.arange(48.0).reshape(6, 8)
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]
"""(offsets, sizes)"""


class Cut:
    """Boxes of a matrix, reported as DCP expects. ``shape``: the shape of the whole."""

    shape: tuple[int, ...] = (6, 8)

    def __init__(self, boxes: Boxes, whole: torch.Tensor = WHOLE) -> None:
        self.boxes = boxes
        self.parts = [
            whole[r : r + rows, c : c + columns].clone() for (r, c), (rows, columns) in boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes."""
        return [SimpleNamespace(offsets=offsets, sizes=sizes) for offsets, sizes in self.boxes]

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """Return the shape of the whole."""
        properties = SimpleNamespace(dtype=torch.float32)
        return [
            SimpleNamespace(tensor_data=SimpleNamespace(size=self.shape, properties=properties))
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """A part."""
        (part,) = (
            part
            for part, (offsets, _) in zip(self.parts, self.boxes, strict=True)
            if offsets == tuple(index.offset)
        )
        return part

    def is_right(self) -> bool:
        """Return whether each part equals its part of WHOLE."""
        expected = Cut(self.boxes).parts
        return all(map(torch.equal, self.parts, expected))


LEFT: Boxes = [((0, 0), (6, 2)), ((0, 6), (6, 2))]
MIDDLE: Boxes = [((0, 2), (2, 4)), ((2, 2), (4, 4))]
ROWS: Boxes = [((0, 0), (1, 8)), ((5, 0), (1, 8))]
REST: Boxes = [((1, 0), (4, 8))]


def empty(boxes: Boxes) -> Cut:
    """Parts to be filled."""
    return Cut(boxes, torch.full((6, 8), -1.0))


def test_parts_go_to_any_other_layout_and_back() -> None:
    """Ranks with several boxes, or none, are loaded in place into any other layout."""
    driver = storage_at(fresh_uri())
    save_as_ranks(driver, [{"a": [Cut(LEFT)]}, {"a": [Cut(MIDDLE)]}, {"a": [Cut([])]}])
    with holdfast.open(driver.uri) as checkpoint:
        assert torch.equal(checkpoint.read("a.0"), WHOLE)
    for layouts in ([ROWS, REST], [LEFT, MIDDLE, []], [LEFT + MIDDLE]):
        into = [{"a": [empty(boxes)]} for boxes in layouts]
        memory = [part.data_ptr() for state in into for part in state["a"][0].parts]
        load_as_ranks(driver, into)
        assert all(state["a"][0].is_right() for state in into)
        assert memory == [part.data_ptr() for state in into for part in state["a"][0].parts]
    plain = torch.zeros(6, 8)
    holdfast.load(driver.uri, into={"a": [plain]})
    assert torch.equal(plain, WHOLE)


class Silent(Cut):
    """Does not report the shape of the whole."""

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """Nothing."""
        return []


class Lying(Cut):
    """Says another size than its parts have."""

    def __create_chunk_list__(self) -> list[Any]:
        """One row less."""
        return [
            SimpleNamespace(offsets=offsets, sizes=(rows - 1, columns))
            for offsets, (rows, columns) in self.boxes
        ]


def sticking_out() -> Cut:
    """Parts of a smaller matrix than they lie in."""
    cut = Cut(LEFT)
    cut.shape = (6, 7)
    return cut


@pytest.mark.parametrize(
    ("cut", "said"),
    [(Silent(LEFT), "0 shapes"), (Lying(LEFT), "part 0"), (sticking_out(), "sticks out")],
    ids=["silent", "lying", "sticking out"],
)
def test_hooks_that_do_not_fit_together_are_refused_by_path(cut: Cut, said: str) -> None:
    """On save and on load."""
    uri = fresh_uri()
    for call in (lambda: holdfast.save(uri, {"w": cut}), lambda: holdfast.load(uri, {"w": cut})):
        with pytest.raises(holdfast.StateError, match=rf'state\["w"\].*{said}'):
            call()
