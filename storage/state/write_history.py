"""What former saves of this process have learned about tensors: is one written to early, which is
before the optimizer steps?

Such a tensor is copied at the call from then on. A tensor is known by its name and size. Nothing is
assumed of one that is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.forks.renewal import new_lock

__all__ = ["Tensor", "WriteHistory", "write_history"]

Tensor = tuple[str, int]
"""A tensor's name in the state, and how many bytes of it this rank holds."""
COUNT_MAX = 1 << 18


class WriteHistory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._early: dict[Tensor, bool] = {}
        self._lock = new_lock()

    def is_early(self, tensor: Tensor) -> bool | None:
        """Whether it was written to early; None where it was never watched."""
        return self._early.get(tensor)

    def learn(self, tensors: Iterable[Tensor], *, early: bool) -> list[Tensor]:
        """Record what was seen of ``tensors``. A tensor that was once written to early stays so.
        Returns those of which this is news."""
        with self._lock:
            news = [tensor for tensor in tensors if early and not self.is_early(tensor)]
            if len(self._early) > COUNT_MAX:
                self._early.clear()
            for tensor in tensors:
                self._early[tensor] = early or bool(self.is_early(tensor))
        return news

    def forget(self) -> None:
        """Forget all tensors."""
        with self._lock:
            self._early.clear()


write_history = WriteHistory()
"""Of this process."""
