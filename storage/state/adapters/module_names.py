"""Names of parameters and buffers, as in the state dict, but without the names of wrappers.

Torch finds such a name by walking down from the module each time it is asked. A training run asks
at every save, while the trainer waits. So a save walks once, and the names are kept as long as the
module consists of the same kinds of modules.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.fsdp import FSDPModule

from ....core.forks.cached import cached_property
from ..compat import (
    flat_units,
    fqn_of,
    parameters_of,
    plain_state_dict,
)
from .deepspeed import Zero, engine_of, zero_of
from .flat_parts import FlatPart, MarkedPart, marked_parts


class Names(dict[str, str]):
    """Maps any name of a parameter or buffer in a module to the name to save it under.

    ``kinds``: classes of all its modules.
    """

    def __init__(self, module: torch.nn.Module, kinds: tuple[type, ...]) -> None:
        self.kinds = kinds
        self._module = ref(module)

    def __missing__(self, name: str) -> str:
        module = self._module()
        assert module is not None
        self[name] = fqn = fqn_of(module, name)
        return fqn


_known: WeakKeyDictionary[torch.nn.Module, Names] = WeakKeyDictionary()


class Walked:
    """A module as it is now, cached for the duration of one call.

    ``engine``: the module itself if it is a DeepSpeed engine. Then ``root`` is the module it wraps,
    which owns the tensors.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.engine = engine_of(module)
        self.root: torch.nn.Module = module if self.engine is None else self.engine.module

    @cached_property
    def zero(self) -> Zero | None:
        """Return the bookkeeping of the engine's ZeRO optimizer."""
        return None if self.engine is None else zero_of(vars(self.engine).get("optimizer"))

    @cached_property
    def parts(self) -> list[tuple[str, torch.nn.Module]]:
        """All modules in it, shared ones at each of their places, with the prefixes of their
        tensors' names."""
        named = self.root.named_modules(remove_duplicate=False)
        return [(f"{name}." if name else "", part) for name, part in named]

    @cached_property
    def names(self) -> Names:
        """Return the checkpoint names of its parameters and buffers."""
        kinds = tuple([type(part) for _, part in self.parts])
        names = _known.get(self.root)
        if names is None or names.kinds != kinds:
            names = _known[self.root] = Names(self.root, kinds)
        return names

    @cached_property
    def flat(self) -> list[FlatPart]:
        """Return this rank's part of the parameters that are in flat parameters, or marked."""
        if self.zero is not None:
            named: dict[torch.nn.Parameter, list[str]] = {}
            for name, parameter in self.parameters:
                named.setdefault(parameter, []).append(self.names[name])
            return self.zero.parts(named)
        places: dict[torch.nn.Module, list[str]] = {}
        for prefix, part in self.parts:
            places.setdefault(part, []).append(prefix)
        found = [
            FlatPart(
                tuple(
                    dict.fromkeys(self.names[p + name] for p in prefixes for name in piece.names)
                ),
                unit,
                piece,
            )
            for part, prefixes in places.items()
            for unit in flat_units(part)
            for piece in unit.pieces()
        ]
        return found + marked_parts(self.parameters, self.names)

    @property
    def is_flattened(self) -> bool:
        """True if a framework has flattened parameters."""
        return any(not isinstance(part, MarkedPart) for part in self.flat)

    @cached_property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters by name, as from torch's ``named_parameters``, but tied ones under all
        names.

        For FSDP2, these are the sharded parameters, which its optimizer has.
        """
        for _, part in self.parts:
            if isinstance(part, FSDPModule):
                part.reshard()  # a forward pass alone leaves gathered ones
        return [
            (prefix + name, parameter)
            for prefix, part in self.parts
            for name, parameter in parameters_of(part).items()
            if parameter is not None
        ]

    @cached_property
    def by_owner(self) -> dict[int, list[FlatPart]]:
        """Return :attr:`flat` by the id of the parameter that the optimizer has for them."""
        found: dict[int, list[FlatPart]] = {}
        for part in self.flat:
            found.setdefault(id(part.owner), []).append(part)
        return found

    @cached_property
    def keys(self) -> dict[int, list[str]]:
        """Return the checkpoint names of each parameter, or of each of :attr:`flat`, by its id."""
        found = {id(part): list(part.names) for part in self.flat}
        for name, parameter in self.parameters:
            if id(parameter) not in self.by_owner:
                found.setdefault(id(parameter), []).append(self.names[name])
        return found


def module_state(walked: Walked) -> dict[str, object]:
    """Return the module's state dict without wrapper names, like torch's
    ``get_model_state_dict``."""
    names = walked.names
    state = plain_state_dict(walked.root)
    for key in list(state):
        name = names[key]
        if name != key:
            state[name] = state.pop(key)
    return state
