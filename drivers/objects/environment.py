"""Keeps obstore from reading settings from the environment.

Every constructor of obstore reads each ``AWS_*``, ``GOOGLE_*`` or ``AZURE_*`` variable that it
knows, and no argument disables this. Configuration values take precedence over variables. So a
driver sets every configuration value, and lists here the variables whose settings have no value
meaning "not set".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.forks.renewal import new_lock

__all__ = ["made_without"]

_hiding = new_lock()


def made_without(
    variables: Collection[str], make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the result of ``make``, called with none of ``variables`` set, in upper or lower case.

    They are removed from the C library's environment, which obstore reads, while ``make`` runs, and
    then restored; Python's ``os.environ`` is not changed. Usually none is set and nothing happens.
    Only list variables that nothing but obstore reads.
    """
    with _hidden({name.upper() for name in variables}):
        return make(*args, **kwargs)


@contextmanager
def _hidden(names: Collection[str]) -> Iterator[None]:
    with _hiding:
        found = {
            name: os.environ.get(name, "") for name in list(os.environ) if name.upper() in names
        }
        for name in found:
            os.unsetenv(name)
        try:
            yield
        finally:
            for name, value in found.items():
                os.putenv(name, value)
