"""What becomes of files and folders of others when they are imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast
from support.bits import fresh_uri

__all__ = ["imported"]


def imported(source: Path | str, **options: Any) -> Any:
    """The state of the checkpoint that is made of ``source``, and is whole."""
    uri = fresh_uri()
    holdfast.import_(source, uri, **options)
    with holdfast.open(uri) as c:
        assert c.verify().ok
    return holdfast.load(uri)
