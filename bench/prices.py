"""Requests to a storage, and their cost.

Scope: pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["Prices", "Requests", "parse_prices"]


@dataclass(frozen=True)
class Requests:
    """Numbers of requests. ``puts`` write, begin and end uploads; ``gets`` read, or query a
    size."""

    puts: int
    gets: int


@dataclass(frozen=True)
class Prices:
    """Prices of one request, in USD."""

    put_usd: float
    get_usd: float

    def cost_usd(self, requests: Requests) -> float:
        """Return the cost of all requests."""
        return requests.puts * self.put_usd + requests.gets * self.get_usd


def parse_prices(text: str) -> Prices:
    """Parse ``put=5e-6,get=4e-7``: USD per request, 0 if omitted. Raises UsageError."""
    found = dict.fromkeys(("put", "get"), 0.0)
    for item in text.split(","):
        name, is_there, value = item.partition("=")
        name = name.strip()
        usd = _usd(value)
        if not is_there or name not in found or usd is None:
            raise UsageError(
                f"--prices {text!r}: {item!r} is not a price of a request",
                advice="Give USD per request, such as put=5e-6,get=4e-7.",
            )
        found[name] = usd
    return Prices(found["put"], found["get"])


def _usd(text: str) -> float | None:
    """Return a price of one request, or None if the text is no valid price."""
    try:
        usd = float(text)
    except ValueError:
        return None
    if 0 <= usd < 1:
        return usd
    return None
