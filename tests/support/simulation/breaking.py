"""Engines that are broken on purpose."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..mutants import Change
from .engine import forget

Patch = tuple[Any, str, Any]
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Broken:
    """A broken engine. ``storages``: a part of the names of the storages that expose the error."""

    name: str
    patches: Callable[[], Iterator[Patch]]
    storages: str = ""
    seed: int | None = None
    """A seed that exposes the error; None if it takes hundreds of seeds."""
    first: int = 0
    """The first seed to try, if earlier ones expose nothing."""

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """Break the engine during the body."""
        patches = list(self.patches())
        before = [(owner, name, _value(owner, name)) for owner, name, _ in patches]
        forget()
        try:
            for owner, name, value in patches:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            forget()


def _value(owner: Any, name: str) -> Any:
    """Return an attribute of ``owner``; for a class, its own attribute without binding."""
    return owner.__code__ if name == "__code__" else owner.__dict__[name]


def patches_of(changes: list[Change]) -> Iterator[Patch]:
    """Yield the patches of the engine in this process: code of functions, and constants."""
    sources = {change.file: (ROOT / change.file).read_text() for change in changes}
    for change in changes:
        sources[change.file] = change.applied(sources[change.file])
    for file, source in sources.items():
        module = importlib.import_module(f"holdfast.{file[:-3].replace('/', '.')}")
        for code in _functions_in(compile(source, file, "exec", dont_inherit=True)):
            function = _function(module, code.co_qualname)
            if function is not None and function.__code__.co_freevars == code.co_freevars:
                yield function, "__code__", code
        before = _constants((ROOT / file).read_text())
        for name, value in _constants(source).items():
            if before.get(name) != value:  # simulations set other constants to their own values
                yield module, name, value


def _constants(source: str) -> dict[str, object]:
    """Return the constants that a module defines, by name."""
    return {
        ast.unparse(node.targets[0]): node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


def _functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a module's functions and methods."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            else:
                yield from _functions_in(inner)


def _function(module: types.ModuleType, name: str) -> types.FunctionType | None:
    """Return a function of the engine; None if simulations replace it."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    found = inspect.unwrap(getattr(found, "__func__", getattr(found, "fget", found)))
    is_original = inspect.isfunction(found) and found.__code__.co_qualname == name
    return found if is_original else None


def seeds_until_violation(
    run_seed: Callable[[int], object], engine: Broken, most: int
) -> tuple[int, str]:
    """Return the last seed tried, and its violation; "" if none of ``most`` seeds shows one."""
    seed = engine.first
    with engine.engine():
        for seed in range(engine.first, engine.first + most):
            try:
                run_seed(seed)
            except Exception as error:  # some broken engines raise at once
                return seed, f"{type(error).__name__}: {error}"
    return seed, ""
