"""An object that holds tensors, for tests of the state that objects receive."""

from __future__ import annotations

from typing import Any

import torch


class Held:
    """An object with tensors, one of them strided."""

    def __init__(self, value: float) -> None:
        self.t, self.u = torch.full((4,), value), torch.full((2, 3), value)

    def state_dict(self) -> dict[str, Any]:
        """Return views of its tensors."""
        return {"t": self.t, "u": [self.u.t()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over one tensor, and copy the other."""
        self.t = state["t"]
        self.u.copy_(state["u"][0].t())
