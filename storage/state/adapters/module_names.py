"""Names of parameters and buffers, as in the state dict, but without the names of wrappers.

Torch finds such a name by walking down from the module each time it is asked. A training run asks
at every save, while the trainer waits. So a save walks once, and the names are kept as long as the
module consists of the same kinds of modules.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ....core.forks.cached import cached_property
from ..compat import (
    STATE_METHODS,
    buffers_of,
    children_of,
    fqn_of,
    has_state_hooks,
    non_persistent_of,
    parameters_of,
    plain_state_dict,
)
from .deepspeed import Zero, engine_of, zero_of
from .flat_parts import FlatPart
from .fsdp1 import fsdp1_parts


class Names(dict[str, str]):
    """Maps any name of a parameter or buffer in a module to the name to save it under.

    ``kinds``: classes of all its modules. ``usual``: none of them customizes its state dict.
    ``sharded``: FSDP1 has wrapped one of them; ``gathers``: FSDP2 has.
    """

    def __init__(self, module: torch.nn.Module, kinds: tuple[type, ...]) -> None:
        self.kinds = kinds
        self.usual = not any(
            issubclass(kind, torch.jit.ScriptModule) for kind in set(kinds)
        ) and all(
            getattr(kind, name) is getattr(torch.nn.Module, name)
            for kind in set(kinds)
            for name in STATE_METHODS
        )
        self.sharded = any(issubclass(kind, FullyShardedDataParallel) for kind in set(kinds))
        self.gathers = any(issubclass(kind, FSDPModule) for kind in set(kinds))
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
        """All modules in it, see :func:`walk`."""
        return walk(self.root)

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
        """Return this rank's part of the parameters that are in flat parameters."""
        if self.zero is not None:
            named: dict[torch.nn.Parameter, list[str]] = {}
            for name, parameter in self.parameters:
                named.setdefault(parameter, []).append(self.names[name])
            return self.zero.parts(named)
        if not self.names.sharded:
            return []
        return fsdp1_parts(self.parts, self.names.__getitem__)

    @cached_property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters by name, as from torch's ``named_parameters``, but tied ones under all
        names.

        For FSDP2, these are the sharded parameters, which its optimizer has.
        """
        if self.names.gathers:
            for _, part in self.parts:
                if isinstance(part, FSDPModule):
                    part.reshard()  # a forward pass alone leaves gathered ones
        return [
            (prefix + name, parameter)
            for prefix, part in self.parts
            for name, parameter in parameters_of(part).items()
            if parameter is not None
        ]

    def registered(self) -> dict[str, object] | None:
        """Return what ``state_dict()`` would, if no hooks or overrides are involved; else None.

        That is everything registered, in order. Torch recurses from module to module, and a trainer
        waits.
        """
        if not self.names.usual:
            return None
        state: dict[str, object] = {}
        places = 1
        for prefix, part in self.parts:
            own = part.__dict__
            if has_state_hooks(part) or not own.keys().isdisjoint(STATE_METHODS):
                return None
            for name, parameter in parameters_of(part).items():
                if parameter is not None:
                    state[prefix + name] = parameter.detach()
            for name, buffer in buffers_of(part).items():
                if buffer is not None and name not in non_persistent_of(part):
                    state[prefix + name] = buffer.detach()
            places += sum(child is not None for child in children_of(part).values())
        if places != len(self.parts):
            return None  # one of them is at two places, under two names
        return state


def walk(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return ``module`` and all modules in it, once each, with the prefixes of their tensors'
    names.

    The order is as in torch's ``named_modules``, which passes each module up through generators
    of all levels above, while a trainer waits.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    ahead = [("", module)]
    while ahead:
        prefix, here = ahead.pop()
        if id(here) not in seen:
            seen.add(id(here))
            found.append((prefix, here))
            children = [
                (f"{prefix}{name}.", child)
                for name, child in children_of(here).items()
                if child is not None
            ]
            ahead += reversed(children)
    return found


def module_state(walked: Walked) -> dict[str, object]:
    """Return the module's state dict without wrapper names, like torch's
    ``get_model_state_dict``."""
    names = walked.names
    state = walked.registered()
    if state is None:
        state = plain_state_dict(walked.root)
    for key in list(state):
        name = names[key]
        if name != key:
            state[name] = state.pop(key)
    return state
