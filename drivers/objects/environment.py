"""Keeps obstore from reading settings of its own out of the environment.

Every constructor of obstore takes each ``AWS_*``, ``GOOGLE_*`` or ``AZURE_*`` variable whose name
it knows, and has no argument that says not to. A value in the configuration wins over the variable.
So a driver puts every setting into the configuration, and names here those that cannot be put
there, because no value of theirs means "not set".
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
    """What ``make`` gives when none of ``variables`` is set, in upper or lower case.

    They are taken out of the environment of the C library, which obstore reads, while ``make``
    runs, and put back; Python's ``os.environ`` has them all the time. Where none is set, which is
    the rule, the environment is left alone. So name only variables that nothing but obstore reads.
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
