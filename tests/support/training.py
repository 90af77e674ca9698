"""A job that trains a small model under any framework, and saves it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import holdfast

Held = dict[str, torch.Tensor]
"""All tensors of a model and its optimizer, whole, by name."""

Seen = tuple[Held, list[float]]
"""The tensors of a job, and the losses of the following steps."""


@dataclass(frozen=True)
class Training:
    """A training job. ``step`` takes the step of a number, on a batch that all ranks share, and
    returns its loss; ``held`` returns the current tensors."""

    model: Any
    optim: Any
    step: Callable[[int], float]
    held: Callable[[], Held]

    @property
    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {"model": self.model, "optim": self.optim}

    def seen(self) -> Seen:
        """Return the current tensors, and the losses of two more steps."""
        held = self.held()
        return held, [self.step(number) for number in (2, 3)]

    def save_and_go_on(self, uri: str) -> Seen:
        """Train for two steps, save, and train for two more."""
        for number in range(2):
            self.step(number)
        holdfast.save(uri, self.state)
        return self.seen()

    def save_lazily(self, uri: str) -> list[Held]:
        """Save twice while training continues; return the tensors at the time of each call."""
        held = []
        for number in range(2):
            self.step(number)
            held.append(self.held())
            handle = holdfast.async_save(f"{uri}/{number}", self.state, lazy=True)
            self.step(5)
            handle.wait()
        return held
