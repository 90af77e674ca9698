"""Storage that ignores conditions: the save itself finds it out, whatever goes wrong besides."""

from __future__ import annotations

import pytest
from support.simulation.found import then
from support.simulation.remote import Server
from support.simulation.run import run
from support.simulation.schedule import Schedule

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("begin_s", [0.0, 0.02, 0.07, 0.12])
def test_a_storage_that_ignores_conditions_takes_no_save(
    monkeypatch: pytest.MonkeyPatch, begin_s: float
) -> None:
    """Of two saves that overlap, the first to be told fails because of the storage, before it has
    put anything else."""

    def put(self: Server, key: str, data: bytes, exclusive: bool) -> None:
        self.store(key, data)

    monkeypatch.setattr(Server, "put", put)
    log: list[str] = []
    failure = run(Schedule(1, "objects", 2, False, then(begin_s), (), delays={}), log=log.append)
    assert failure is not None
    assert "although its key is taken" in failure.why
    puts = [line for line in log if " put " in line]
    assert puts
    assert not [line for line in puts if not line.endswith("/attempt.json")]
