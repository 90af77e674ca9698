"""How a driver gets what is to be small, from a server."""

from __future__ import annotations

import pytest

from holdfast.drivers import contract
from holdfast.drivers.contract import Driver
from holdfast.errors import DamagedError

__all__ = ["get_whole"]

NBYTES = 5 << 20


async def get_whole(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an object; with a limit below its size ``get`` refuses it, time after time, and with one
    at its size does not. Closes the driver."""
    content = bytes(NBYTES)
    await driver.put("a", content)
    with monkeypatch.context() as patch:
        patch.setattr(contract, "SMALL_NBYTES_MAX", NBYTES - 1)
        for _ in range(20):
            with pytest.raises(DamagedError, match="read as a whole"):
                await driver.get("a")
    monkeypatch.setattr(contract, "SMALL_NBYTES_MAX", NBYTES)
    assert await driver.get("a") == content
    await driver.close()
