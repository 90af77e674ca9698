"""moto's server, which answers one request at a time. Run by the Python that has moto, with a port.

Its own server has threads, and looks whether an object is there before it stores it: of two
conditional puts that arrive together, both may win. Taken in turn, only one does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple


class _InTurn:
    """An application, one call at a time."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._turn = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        with self._turn:
            answer: Iterable[bytes] = self._application(environ, start_response)
            return answer


if __name__ == "__main__":
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        _InTurn(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=MotoRequestHandler,
    )
