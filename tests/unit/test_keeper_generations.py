"""Which slot of a keeper may be filled, what a restart may go on from, and what is dropped."""

from __future__ import annotations

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Grant, Reason, Refusal

SIZE = 100
A, B, C = 1, 2, 3
"""Clients of ranks 0 and 1, and one that restarts."""


def entered(*clients: int, budget: int = 10_000, epoch: int = 0) -> Generations:
    """One that these clients, of ranks 0, 1 and so on, have entered."""
    generations = Generations(budget)
    for rank, client in enumerate(clients):
        assert generations.enter(client, rank, epoch, None) is None
    return generations


def granted(
    generations: Generations, client: int, step: int, world: int = 1, nbytes: int = SIZE
) -> int:
    """The slot that is granted, with its memory."""
    grant = generations.fill(client, client - 1, step, nbytes, world)
    assert isinstance(grant, Grant), grant
    if grant.fresh:
        generations.made(grant.slot)
    return grant.slot


def sealed(generations: Generations, client: int, step: int, world: int = 1) -> int:
    """The slot of an image that is captured and sealed."""
    slot = granted(generations, client, step, world)
    generations.captured(slot)
    generations.sealed(slot)
    return slot


def agreed(generations: Generations, step: int, *clients: int, epoch: int = 0) -> list[int]:
    """The slots of a generation that all clients have sealed."""
    slots = [sealed(generations, client, step, len(clients)) for client in clients]
    assert generations.agreed(GenerationId(epoch, step))
    return slots


def reason(answer: Grant | Refusal | int | None) -> Reason:
    """Why it is refused."""
    assert isinstance(answer, Refusal), answer
    assert answer.text
    return answer.reason


def test_what_an_epoch_goes_on_from_stays_though_nobody_has_told_that_it_is_agreed_on() -> None:
    """Other keepers knew that, and a restart went on from there: it is to be there again."""
    generations = entered(A)
    agreed(generations, 1, A)
    sealed(generations, A, 2)
    generations.client_gone(A)
    assert generations.enter(B, 0, 1, 2) is None
    for step in (3, 4, 5):
        slot = generations.fill(B, 0, step, SIZE, 1)
        if isinstance(slot, Grant):
            generations.captured(slot.slot)
            generations.sealed(slot.slot)
    assert GenerationId(0, 2) in {held.generation for held in generations.restorable()}
    generations.offer(C)
    assert generations.agreed(GenerationId(1, 3))
    assert reason(generations.fill(B, 0, 6, SIZE, 1)) is Reason.NO_FREE_SLOT
    generations.released(C)
    grant = generations.fill(B, 0, 7, SIZE, 1)
    assert isinstance(grant, Grant)
    assert GenerationId(0, 2) not in {held.generation for held in generations.restorable()}


def test_what_an_epoch_went_on_from_takes_the_place_of_what_was_agreed_on_before() -> None:
    """That is of no use any more; and there are but three slots, one of them for what is guarded."""
    generations = entered(A)
    for step in (1, 2):
        agreed(generations, step, A)
    generations.guarding([GenerationId(0, 1)])
    sealed(generations, A, 3)
    generations.client_gone(A)
    assert generations.enter(B, 0, 1, 3) is None
    assert isinstance(generations.fill(B, 0, 4, SIZE, 1), Grant)


def test_unagreed_image_of_the_chosen_step_does_not_replace_the_agreed_one() -> None:
    """A job resumes from a step, dies while it saves that step once more, and resumes again."""
    generations = entered(A)
    for step in (1, 2, 3):
        agreed(generations, step, A)
    generations.pin(GenerationId(0, 1))
    for epoch in (1, 2):
        generations.client_gone(A)
        assert generations.enter(A, 0, epoch, 3) is None
        grant = generations.fill(A, 0, 2 + epoch, SIZE, 1)
        if isinstance(grant, Grant):
            generations.captured(grant.slot)
    assert generations.newest_agreed == GenerationId(0, 3)


def test_slots_of_ranks_that_moved_to_another_host_make_room() -> None:
    """A restart has numbered the hosts anew. What still is of use of former ranks stays."""
    generations = entered(A, budget=4 * SIZE)
    for step in (1, 2, 3):
        agreed(generations, step, A)
    generations.client_gone(A)
    assert generations.enter(B, 1, 1, 3) is None
    for step in (4, 5, 6):
        grant = generations.fill(B, 1, step, SIZE, 2)
        assert isinstance(grant, Grant), grant
        if grant.fresh:
            generations.made(grant.slot)
        generations.captured(grant.slot)
        generations.sealed(grant.slot)
    assert GenerationId(0, 3) in {held.generation for held in generations.restorable()}
    assert len(generations.slots) == 4


def test_three_slots_are_filled_in_turn() -> None:
    """Memory is made three times; then the oldest step gives way."""
    generations = entered(A)
    slots = [agreed(generations, step, A)[0] for step in range(1, 8)]
    assert len(set(slots)) == 3
    assert slots[:3] == slots[3:6]
    assert [held.generation.step for held in generations.restorable()] == [7, 6, 5]


def test_a_step_without_a_slot_is_left_out() -> None:
    """While the others are filled or sealed; one that is given back can be filled again."""
    generations = entered(A)
    agreed(generations, 1, A)
    first, second = granted(generations, A, 2), granted(generations, A, 3)
    generations.captured(first)
    assert reason(generations.fill(A, 0, 4, SIZE, 1)) is Reason.NO_FREE_SLOT
    assert generations.dropped(second, A)
    assert granted(generations, A, 5) == second


def test_what_one_rank_leaves_out_the_others_leave_out() -> None:
    """It would not be whole: so ranks that drift apart keep the same steps."""
    generations = entered(A, B)
    agreed(generations, 1, A, B)
    for step in (2, 3):
        granted(generations, A, step, 2)
    assert reason(generations.fill(A, 0, 4, SIZE, 2)) is Reason.NO_FREE_SLOT
    assert reason(generations.fill(B, 1, 4, SIZE, 2)) is Reason.NO_FREE_SLOT
    granted(generations, B, 5, 2)


def test_a_rank_that_is_ahead_waits_for_the_others() -> None:
    """What it has sealed is not written over while the others may yet seal it; but it is once one
    of them has gone on without it."""
    generations = entered(A, B)
    first = sealed(generations, A, 1, 2)
    for step in (2, 3):
        sealed(generations, A, step, 2)
    assert reason(generations.fill(A, 0, 4, SIZE, 2)) is Reason.NO_FREE_SLOT
    sealed(generations, B, 2, 2)  # and so not step 1
    assert granted(generations, A, 5, 2) == first
    assert generations.agreed(GenerationId(0, 2))
    assert not generations.agreed(GenerationId(0, 1))


def test_a_step_comes_once() -> None:
    """Steps of an epoch grow; those of another epoch are others."""
    generations = entered(A)
    agreed(generations, 5, A)
    assert reason(generations.fill(A, 0, 5, SIZE, 1)) is Reason.OLD_STEP
    assert reason(generations.fill(A, 0, 4, SIZE, 1)) is Reason.OLD_STEP
    assert generations.enter(A, 0, 1, 3) is None
    granted(generations, A, 4)


def test_a_process_of_an_older_epoch_drops_nothing_that_was_made_again() -> None:
    """It slept while its host was lost, and its trainer comes first to the keeper that is there
    now. What that keeper has made again for the next job is later than what it went on from."""
    generations = Generations(10_000)
    id = GenerationId(2, 1)
    assert generations.recall(id, 0, 1, 10, epoch=False) == 0
    generations.agreed(id)
    assert reason(generations.enter(1, 0, 1, 0)) is Reason.STALE_EPOCH
    assert generations.newest_agreed == id
    assert generations.enter(2, 0, 3, 1) is None
    assert generations.newest_agreed == id


def test_a_process_of_the_same_epoch_drops_nothing_that_was_made_again() -> None:
    """As above, but what was made again is of the epoch that this process is in."""
    generations = Generations(10_000)
    id = GenerationId(1, 2)
    assert generations.recall(id, 0, 1, 10, epoch=False) == 0
    generations.agreed(id)
    assert generations.enter(1, 0, 1, 1) is None
    assert generations.newest_agreed == id
    assert generations.enter(2, 0, 2, 1) is None
    assert generations.newest_agreed is None


def test_an_older_epoch_is_refused() -> None:
    """Nobody enters one, is granted a slot in one, or hands over an image of one; nor does a client
    that has not entered any."""
    generations = entered(A, epoch=4)
    assert reason(generations.enter(B, 1, 3, None)) is Reason.STALE_EPOCH
    assert reason(generations.fill(B, 1, 1, SIZE, 2)) is Reason.STALE_EPOCH
    assert generations.enter(B, 1, 5, None) is None
    assert reason(generations.fill(A, 0, 1, SIZE, 2)) is Reason.STALE_EPOCH
    old = GenerationId(4, 1)
    assert reason(generations.adopt(A, old, 0, 2, SIZE)) is Reason.STALE_EPOCH
    assert reason(generations.adopt(B, old, 1, 2, SIZE)) is Reason.STALE_EPOCH


def test_a_resume_drops_what_it_did_not_go_on_from() -> None:
    """Later steps are no more, nor what is being filled; earlier ones stay."""
    generations = entered(A)
    for step in (1, 2, 3):
        agreed(generations, step, A)
    assert generations.enter(B, 0, 1, 2) is None
    assert [held.generation.step for held in generations.restorable()] == [2, 1]
    assert generations.newest_agreed == GenerationId(0, 2)
    assert generations.enter(B, 0, 2, None) is None
    assert generations.restorable() == []


def granted_to_second(generations: Generations, step: int) -> int:
    """A slot for rank 0, to the second client."""
    grant = generations.fill(B, 0, step, SIZE, 1)
    assert isinstance(grant, Grant)
    if grant.fresh:
        generations.made(grant.slot)
    return grant.slot


def test_what_one_reader_lets_go_of_another_one_still_reads() -> None:
    """Also where an image was adopted between the two, so that the later one reads more."""
    generations = entered(A, B)
    id = GenerationId(0, 1)
    slots = [sealed(generations, A, 1, 2)]
    first = generations.pin(id)
    slots.append(sealed(generations, B, 1, 2))
    second = generations.pin(id)
    generations.unpin(first)
    generations.void(id)
    assert set(slots).isdisjoint(granted(generations, client, 2, 2) for client in (A, B))
    generations.unpin(second)
    assert {granted(generations, client, 3, 2) for client in (A, B)} == set(slots)


def test_only_sealed_images_are_opened() -> None:
    """Of that rank and generation."""
    generations = entered(A)
    slot = granted(generations, A, 1)
    id = GenerationId(0, 1)
    assert generations.open(B, id, 0) is None
    generations.captured(slot)
    assert generations.open(B, id, 0) is None
    generations.sealed(slot)
    assert generations.open(B, id, 1) is None
    assert generations.open(B, GenerationId(0, 2), 0) is None
    assert generations.open(B, id, 0) == slot


def test_a_process_that_dies_leaves_what_it_has_captured() -> None:
    """What it was filling is free; what it had captured is sealed; what it had not, is not."""
    generations = entered(A)
    captured, filling = granted(generations, A, 1), granted(generations, A, 2)
    generations.captured(captured)
    generations.client_gone(A)
    assert generations.is_sealing(captured, GenerationId(0, 1))
    assert not generations.is_filling(filling, A, GenerationId(0, 2))
    generations.sealed(captured)
    assert generations.agreed(GenerationId(0, 1))
    assert [held.generation.step for held in generations.restorable()] == [1]


def test_only_the_one_that_fills_a_slot_can_drop_it() -> None:
    """Nor is it filled with any other step than the one it was granted for."""
    generations = entered(A, B)
    slot = granted(generations, A, 1, 2)
    assert not generations.dropped(slot, B)
    assert not generations.dropped(slot + 1, A)
    assert generations.is_filling(slot, A, GenerationId(0, 1))
    assert not generations.is_filling(slot, A, GenerationId(0, 2))
    assert not generations.is_filling(slot, B, GenerationId(0, 1))
    assert generations.dropped(slot, A)
    assert not generations.dropped(slot, A)


def test_memory_that_is_still_made_is_not_granted_again() -> None:
    """Though its filler has died meanwhile. If it cannot be made, there is no slot."""
    generations = entered(A)
    grant = generations.fill(A, 0, 1, SIZE, 1)
    assert isinstance(grant, Grant)
    assert grant.fresh
    generations.client_gone(A)
    generations.enter(B, 0, 1, None)
    other = generations.fill(B, 0, 1, SIZE, 1)
    assert isinstance(other, Grant)
    assert other.slot != grant.slot
    generations.made(grant.slot)
    generations.unmade(other.slot)
    assert generations.slots == {grant.slot}
    assert granted_to_second(generations, 2) == grant.slot


def test_too_little_memory_is_refused_with_the_sum() -> None:
    """Before the first step: three images of each rank, not only the first of them, have to fit."""
    generations = entered(A, B, budget=6 * SIZE - 1)
    answer = generations.fill(A, 0, 1, SIZE, 2)
    assert reason(answer) is Reason.NO_MEMORY
    assert isinstance(answer, Refusal)
    assert answer.text.startswith("3 images of 100 B for 2 ranks take 600 B")
    assert generations.slots == set()
    granted(entered(A, B, budget=6 * SIZE), A, 1, 2)


def test_images_of_another_size_take_the_place_of_the_former() -> None:
    """Those that nothing protects go at once, the newest agreed one when it is no more that."""
    generations = entered(A, budget=6 * SIZE)
    agreed(generations, 1, A)
    (kept,) = agreed(generations, 2, A)
    grant = generations.fill(A, 0, 3, 2 * SIZE, 1)
    assert isinstance(grant, Grant)
    assert grant.fresh
    assert generations.slots == {kept, grant.slot}
    generations.made(grant.slot)
    generations.captured(grant.slot)
    generations.sealed(grant.slot)
    assert generations.agreed(GenerationId(0, 3))
    again = generations.fill(A, 0, 4, 2 * SIZE, 1)
    assert isinstance(again, Grant)
    assert kept not in generations.slots


def test_no_rank_has_a_third_slot_while_another_has_no_second() -> None:
    """What an epoch went on from was one image of a smaller job, and takes room until a step is
    agreed on: where other ranks were faster, nothing would ever be."""
    generations = entered(A, budget=6 * SIZE)
    slot = granted(generations, A, 5, nbytes=2 * SIZE)
    generations.captured(slot)
    generations.sealed(slot)
    assert generations.agreed(GenerationId(0, 5))
    generations.client_gone(A)
    first, second = A + 10, B + 10
    for rank, client in enumerate((first, second)):
        assert generations.enter(client, rank, 1, 5) is None
    for step in (6, 7, 8):
        grant = generations.fill(second, 1, step, SIZE, 2)
        assert isinstance(grant, Grant)
        generations.made(grant.slot)
        generations.captured(grant.slot)
        generations.sealed(grant.slot)
    one = generations.fill(first, 0, 9, SIZE, 2)
    assert isinstance(one, Grant)
    generations.made(one.slot)
    assert isinstance(generations.fill(first, 0, 10, SIZE, 2), Grant)
    assert len(generations.slots) == 5
    assert slot in generations.slots


def test_ranks_that_are_no_more_give_back_their_memory() -> None:
    """What the fewer ranks went on from stays until there is something newer."""
    generations = entered(A, B, budget=6 * SIZE)
    agreed(generations, 1, A, B)
    agreed(generations, 2, A, B)
    for client in (A, B):
        generations.client_gone(client)
    alone = 3
    generations.enter(alone, 0, 1, 2)
    grant = generations.fill(alone, 0, 3, 2 * SIZE, 1)
    assert isinstance(grant, Grant)
    generations.made(grant.slot)
    assert {held.generation.step for held in generations.restorable()} == {2}
    generations.captured(grant.slot)
    generations.sealed(grant.slot)
    assert generations.agreed(GenerationId(1, 3))
    assert isinstance(generations.fill(alone, 0, 4, 2 * SIZE, 1), Grant)
    assert {held.generation.step for held in generations.restorable()} == {3}


def test_an_adopted_image_is_as_good_as_one_that_was_sealed_here() -> None:
    """Once only, and within the budget; steps go on after it."""
    generations = entered(A, budget=4 * SIZE)
    id = GenerationId(0, 5)
    slot = generations.adopt(A, id, 0, 1, SIZE)
    assert isinstance(slot, int)
    assert reason(generations.adopt(A, id, 0, 1, SIZE)) is Reason.DUPLICATE
    assert reason(generations.adopt(A, GenerationId(0, 4), 0, 1, 4 * SIZE)) is Reason.NO_MEMORY
    assert generations.agreed(id)
    assert reason(generations.fill(A, 0, 5, SIZE, 1)) is Reason.OLD_STEP
    assert granted(generations, A, 6) != slot


def test_a_recalled_image_is_there_before_any_trainer() -> None:
    """Its epoch is over when the next one begins; what does not fit is refused."""
    generations = Generations(SIZE)
    id = GenerationId(3, 5)
    assert isinstance(generations.recall(id, 0, 1, SIZE), int)
    assert reason(generations.recall(GenerationId(3, 4), 0, 1, SIZE)) is Reason.NO_MEMORY
    assert generations.agreed(id)
    assert reason(generations.enter(A, 0, 2, None)) is Reason.STALE_EPOCH
    assert generations.enter(A, 0, 4, 5) is None
    assert generations.newest_agreed == id


def test_a_rank_that_is_behind_leaves_out_what_is_void() -> None:
    """It would hold a slot for nothing, and leave none for the steps that the others keep."""
    generations = entered(A)
    agreed(generations, 1, A)
    generations.void(GenerationId(0, 2))
    assert reason(generations.fill(A, 0, 2, SIZE, 1)) is Reason.NO_FREE_SLOT
    granted(generations, A, 3)
    generations.client_gone(A)
    assert generations.enter(B, 0, 1, 1) is None
    assert isinstance(generations.fill(B, 0, 2, SIZE, 1), Grant)


def test_a_void_generation_is_no_more() -> None:
    """What was agreed before is the newest again."""
    generations = entered(A)
    agreed(generations, 1, A)
    agreed(generations, 2, A)
    generations.void(GenerationId(0, 2))
    assert generations.newest_agreed == GenerationId(0, 1)
    assert not generations.is_agreed(GenerationId(0, 2))
    assert [held.generation.step for held in generations.restorable()] == [1]
