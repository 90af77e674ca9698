"""The memory of a keeper, as what its state machine says is in it."""

from __future__ import annotations

from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.memory import reserved_memory
from holdfast.storage.keeper.slot_memory import PooledSlot, SlotPool

NBYTES = 4096


def test_what_was_given_up_is_no_image_any_more() -> None:
    """Its bytes and its label are there until its slot is filled again: whoever asks whether the
    image is there would be told that it is, and find it written over."""
    held = SlotPool(10 * NBYTES)
    id = GenerationId(1, 2)
    number = held.generations.recall(id, 0, 1, NBYTES)
    assert isinstance(number, int)
    label = Label("run", id, 0, 1, NBYTES, 0, 1, 1, 0.0)
    held.slots[number] = PooledSlot(reserved_memory(NBYTES), label)
    assert [image.label for image in held.images(id)] == [label]
    held.generations.void(id)
    assert held.images(id) == []
    held.close()
