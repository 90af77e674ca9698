"""What was learned about tensors in former saves of this process: is one written to before the
optimizer steps?

Such a tensor is copied at the call from then on. A tensor is known by its name and size; of one
that is not known yet, nothing is presumed.
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
        self._hasty: dict[Tensor, bool] = {}
        self._lock = new_lock()

    def hasty(self, tensor: Tensor) -> bool | None:
        """Whether it was written to too soon; None where it was never watched."""
        return self._hasty.get(tensor)

    def learn(self, tensors: Iterable[Tensor], *, hasty: bool) -> list[Tensor]:
        """Note how ``tensors`` were seen to behave. Once hasty, always hasty. Returns those of
        which this is news."""
        with self._lock:
            news = [tensor for tensor in tensors if hasty and not self.hasty(tensor)]
            if len(self._hasty) > COUNT_MAX:
                self._hasty.clear()
            for tensor in tensors:
                self._hasty[tensor] = hasty or bool(self.hasty(tensor))
        return news

    def forget(self) -> None:
        """Know nothing any more."""
        with self._lock:
            self._hasty.clear()


write_history = WriteHistory()
"""Of this process."""
