"""One rank of a measurement that ``holdfast bench --ranks`` has started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ...drivers.uri import parse
from ...errors import CoordinationError, HoldfastError


def main() -> int:
    """Measure as the only argument says, and leave the result, or this rank's error, in a file."""
    from ...bench.measured.ranks import joined
    from ...bench.measured.result import encoded
    from ...bench.measured.run import measured
    from .choices import plan_of

    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    try:
        with joined() as ranks:
            plan = plan_of(order["uri"], order["asked"], ranks.world)
            found = measured(plan, _say, ranks, parse(order["place"]))
    except HoldfastError as error:
        # An error that only reports the loss of another rank explains nothing.
        if type(error) is not CoordinationError:
            (folder / f"error-{os.environ['RANK']}").write_text(str(error), "utf-8")
        return 2
    if ranks.rank == 0:
        (folder / "result").write_text(encoded(found), "utf-8")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
