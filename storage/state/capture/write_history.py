"""Remembers which tensors are written to early, that is, before the optimizer steps.

Later saves of this process copy such a tensor at the call. A tensor is identified by its name and
size. Nothing is assumed of an unknown tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....core.forks.renewal import new_lock

__all__ = ["Tensor", "WriteHistory", "write_history"]

Tensor = tuple[str, int]
"""A tensor's name in the state, and the bytes of it that this rank holds."""
COUNT_MAX = 1 << 18


class WriteHistory:
    """Remembers, by tensor, whether it was ever written to early. Thread-safe.

    Forgets all tensors once it has more than ``COUNT_MAX``.
    """

    def __init__(self) -> None:
        self._early: dict[Tensor, bool] = {}
        self._lock = new_lock()

    def is_early(self, tensor: Tensor) -> bool | None:
        """Return whether it was written to early; None if it was never watched."""
        return self._early.get(tensor)

    def learn(self, tensors: Iterable[Tensor], *, early: bool) -> list[Tensor]:
        """Record observations of ``tensors``, and return the newly early ones.

        A tensor once seen as early stays early.
        """
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
"""The history of this process."""
