"""Bit flips in the memory of a live keeper: in an image, in its label, or in parity. A member of a
group that holds damaged bytes of a protected step counts as lost. Parity makes up for as many lost
members as its mode allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import DamagedError
from holdfast.storage.arenas.label import GenerationId, Label

from .keepers import PIECES, Held

if TYPE_CHECKING:
    from .keeper_host import HostKeeper
    from .keeper_hosts import Hosts

__all__ = ["flip", "is_struck", "ruin", "strike"]


def is_struck(keeper: HostKeeper, id: GenerationId) -> bool:
    """Tell whether a keeper holds damaged bytes of a generation."""
    parity: Any = keeper.guards._held.get(id)
    if parity is not None and any(None in piece.values() for piece in parity.pieces):
        return True
    return any(_is_flipped(held) for held in keeper.images(id))


def _is_flipped(held: Held) -> bool:
    try:
        Label.decode(held.encoded)
    except DamagedError:
        return True
    return None in held.memory.pieces


def flip(world: Hosts, keeper: HostKeeper, only: GenerationId | None = None) -> bool:
    """Flip a bit in the memory of a keeper, ``only`` in that generation if it is given. Return
    whether there was a bit to flip."""
    draw = world.random
    kind = draw.choice(["image", "label", "parity"])
    sealed = [
        held
        for held in keeper.slots.values()
        if held.label is not None and only in (None, held.label.generation)
    ]
    parities: list[Any] = [
        parity for parity in keeper.guards._held.values() if only in (None, parity.generation)
    ]
    if kind == "parity" and parities:
        parity = draw.choice(parities)
        piece = draw.choice(parity.pieces)
        piece[draw.choice(sorted(piece))] = None
        id = parity.generation
    elif kind != "parity" and sealed:
        held = draw.choice(sealed)
        assert held.label is not None
        id = held.label.generation
        if kind == "image":
            held.memory.pieces[draw.randrange(PIECES)] = None
        else:
            held.encoded = held.encoded[:-1] + bytes([held.encoded[-1] ^ 1])
    else:
        return False
    world.damaged.add((keeper.host.name, id))
    world.count("flipped", f"{kind} of {id} at {keeper}")
    return True


def strike(world: Hosts) -> bool:
    """Flip bits of the protected step at one or two members of a group. Return whether any
    flipped."""
    guarded = world.guarded
    if guarded is None or not guarded.groups:
        return False
    _, members = world.random.choice(guarded.groups)
    living = [keeper for keeper in members if keeper is not None and keeper.alive]
    chosen = world.random.sample(living, min(len(living), world.random.choice([1, 1, 2])))
    struck = [flip(world, keeper, guarded.id) for keeper in chosen]
    return any(struck)


def ruin(world: Hosts) -> bool:
    """Flip bits of all steps, on every host. Return whether any flipped."""
    struck = [
        flip(world, host.keeper, id)
        for host in world.placed
        for id in sorted({h.label.generation for h in host.keeper.slots.values() if h.label})
    ]
    return any(struck)
