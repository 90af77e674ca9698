"""House rules that a machine can check. CONTRIBUTING.md gives the reason of each."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.commands import finished

import holdfast

ROOT = Path(__file__).parents[2]
ROOMS = "bench|cli|core|docs|drivers|errors|planner|storage|tests"
MODULE_LINES_MAX = 600
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
# Made by tools, as are names that begin with a dot.
NOT_OURS = {"build", "dist", "demo-run", "__pycache__"}
# Prose is for readers of the project, not about its writers, their tasks or their machines.
WORKPLACE = re.compile(
    r"\b(this|previous|earlier|next) session\b|\bas an ai\b|\bthe brief says\b|\bas (requested|instructed)\b"
    r"|\bthe user (asked|wants)\b|(?<![\w.~])/(root|work|tmp/hf)/",
    re.IGNORECASE,
)

ANOTHERS = re.compile(
    r"""\bholdfast\\?\[[a-z{]"""  # with extras
    r"""|pip install( +-\S+)* +['"]?holdfast(?![\w./\[-])"""
    r"""|(dependencies|requires|test) = \[.*["']holdfast["'<>=~ ]"""
)
"""Text that asks pip for ``holdfast``."""


@functools.cache
def files(*suffixes: str) -> list[Path]:
    """List the project's files with one of these suffixes, or names, in a fixed order."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if is_ours(Path(folder, name))]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def is_ours(folder: Path) -> bool:
    """Return whether a folder holds our work rather than the output of a tool."""
    name = folder.name
    made = name in NOT_OURS or name.endswith(".egg-info") or (folder / "pyvenv.cfg").exists()
    return not made and (not name.startswith(".") or name == ".ci")


def is_shipped(path: Path) -> bool:
    """Return whether a file is part of the package, rather than of its tests or documents."""
    return path.relative_to(ROOT).parts[0] not in {"tests", "docs"}


def shipped() -> list[Path]:
    """List the package's own modules."""
    return [path for path in files(".py") if is_shipped(path)]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree.

    The trees stay in memory, as millions of objects. The garbage collector would visit them again
    and again, so it is paused while they grow, and ignores them afterwards.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(), str(path))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(tree_of(path)))


def at(path: Path, line: int = 0) -> str:
    """Return the place of a fault in the form that an editor opens."""
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


def test_every_folder_of_the_package_is_listed() -> None:
    """The packages in pyproject.toml are exactly the folders with modules: a wheel is complete."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in shipped()}
    assert [at(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert set(listed) == {".".join(("holdfast", *f.relative_to(ROOT).parts)) for f in folders}


def test_an_editable_install_shows_its_types(tmp_path: Path) -> None:
    """Type checkers follow a folder on the path, but no import hook. They need ``py.typed``."""
    root = tmp_path / "project"
    for path in [*shipped(), ROOT / "py.typed", *(ROOT / name for name in PROJECT_FILES)]:
        copied = root / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    code = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    finished([sys.executable, "-c", code, str(tmp_path)], cwd=root)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        (paths,) = (content.read(name).decode() for name in content.namelist() if ".pth" in name)
    seen = Path(paths.strip()) / "holdfast"
    assert (seen / "py.typed").is_file()
    for path in shipped():
        assert (seen / path.relative_to(ROOT)).samefile(root / path.relative_to(ROOT))


def test_the_root_holds_what_python_looks_for_there() -> None:
    """The root is the package; every other module lives in a room."""
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the absolute imports of a file, with their lines."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def is_in(module: str, *packages: str) -> bool:
    """Return whether a module is one of some packages, or lies in one."""
    return module.partition(".")[0] in packages


def test_rooms_import_each_other_relatively() -> None:
    """Only outsiders use the public name, so the package works from a folder of any name."""
    outside = (
        "bench/",  # peers are measured through the public name, as their users see them
        "cli/demo/train.py",  # training scripts
        "cli/demo/train_kept.py",
        "cli/demo/follow_weights.py",
        "cli/demo/train_incremental.py",
        "cli/demo/train_weights.py",
        # pytest may import trials under another name than their package's
        "drivers/conformance/test_",
        "drivers/conformance/conftest.py",
    )
    inside = [path for path in shipped() if not at(path).startswith(outside)]
    found = [at(p, line) for p in inside for line, name in imports(p) if is_in(name, "holdfast")]
    assert found == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Modules have an order: each imports only earlier ones, also in functions and for types."""
    left = {at(path): set(modules_imported(path)) for path in shipped()}
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    needed = {name for imported in left.values() for name in imported}
    assert sorted(left.keys() & needed) == []


def modules_imported(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports relatively, anywhere in it."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            for name in (node.module or "").split("."):
                folder /= name
            for alias in node.names:
                places = (folder / alias.name, folder)
                files = [f for p in places for f in (p.with_suffix(".py"), p / "__init__.py")]
                yield next(at(file) for file in files if file.exists())


def test_private_names_of_torch_have_one_place() -> None:
    """A new release of torch is checked against ``storage/state/compat.py`` alone."""
    modules = [path for path in shipped() if not at(path).startswith(("bench/", COMPAT))]
    assert [at(path, line) for path in modules for line in private_torch(path)] == []


COMPAT = "storage/state/compat.py"


@functools.cache
def private_attributes() -> set[str]:
    """Return the private attributes of torch's objects that are in use."""
    nodes = nodes_of(ROOT / COMPAT)
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_private(n.attr)}


def is_private(name: str) -> bool:
    """Return whether a name begins with exactly one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_torch(path: Path) -> Iterator[int]:
    """Yield the lines with a private name of torch, or a private attribute of its objects."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, names)):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            ours = owner in ("self", "cls") or owner.startswith(("self._", "other"))
            if owner.split(".")[0] == "torch" or (node.attr in private_attributes() and not ours):
                yield node.lineno


def test_locks_are_free_after_a_fork() -> None:
    """Locks and cached properties come from ``core.forks``; no import makes a queue or an event.

    Otherwise a child that is forked at the wrong moment waits forever.
    """
    modules = [path for path in shipped() if not at(path).startswith(("bench/", "core/forks/"))]
    assert [at(path, line) for path in modules for line in unsafe_at_forks(path)] == []


def unsafe_at_forks(path: Path) -> Iterator[int]:
    """Yield the lines that take a lock from elsewhere, or make a thread object at import."""
    banned = {"threading.Lock", "threading.RLock"}
    banned |= {"_thread.allocate_lock", "functools.cached_property"}
    types = {id(node.annotation) for node in nodes_of(path) if isinstance(node, ast.AnnAssign)}
    for node in nodes_of(path):
        if (
            isinstance(node, ast.ImportFrom)
            and {f"{node.module}.{alias.name}" for alias in node.names} & banned
        ) or (
            isinstance(node, ast.Attribute)
            and f"{getattr(node.value, 'id', '')}.{node.attr}" in banned
            and id(node) not in types
        ):
            yield node.lineno
    for statement in tree_of(path).body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if re.search(r"(Condition|Event|Semaphore|Queue|Executor|Thread|Timer)$", made):
            yield statement.lineno


def test_the_package_does_without_its_tests() -> None:
    """No module of the package imports or starts anything in tests/, which users do not have."""
    reaching = [
        at(path, node.lineno)
        for path in shipped()
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and re.match(r"tests(/|$)", str(node.value))
    ]
    lines = [(path, *found) for path in shipped() for found in imports(path)]
    importing = [at(path, line) for path, line, name in lines if is_in(name, "support", "tests")]
    assert reaching + importing == []


def test_modules_are_short() -> None:
    """A module of the package that is too long to read to its end is split in two."""
    lengths = {at(path): len(path.read_text().splitlines()) for path in shipped()}
    assert {path: lines for path, lines in lengths.items() if lines > MODULE_LINES_MAX} == {}


OF_DRIVERS = ("contract", "asynchronous", "options", "threads", "ranges", "uri", "layers/metrics")
DOORS = ("errors/", "storage/integrations/", *(f"drivers/{name}.py" for name in OF_DRIVERS))
"""Modules that users import. The rest is internal; an underscore marks a module's private names."""


def test_doors_declare_their_public_names() -> None:
    """A module that users import has a literal ``__all__``; ruff checks that its names exist."""
    modules = [path for path in shipped() if at(path).startswith(DOORS)]
    assert len(modules) > 20
    assert [at(path) for path in modules if not declares_its_names(path)] == []


def declares_its_names(path: Path) -> bool:
    """Return whether a module has a literal ``__all__``, or no public name except ``main``."""
    body = tree_of(path).body
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in targets(node):
            return isinstance(node.value, ast.List | ast.Tuple)
    defined = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return all(name == "main" or name.startswith("_") for name in defined)


def targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the plain names that an assignment binds."""
    nodes = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [n.id for target in nodes for n in ast.walk(target) if isinstance(n, ast.Name)]


def top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module binds, also in ``try``, and in ``if`` (types of lazy names)."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from targets(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from top_level_names([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", []):
                yield from top_level_names(handler.body)


def test_every_public_name_can_be_had() -> None:
    """Everything in ``holdfast.__all__`` exists, including lazy names."""
    assert [name for name in getattr(holdfast, "__all__", []) if not hasattr(holdfast, name)] == []


def lines_matching(pattern: re.Pattern[str], *suffixes: str) -> list[str]:
    """Return the matching lines of such files, except this one, with their places."""
    return [
        f"{at(path, number)} {text.strip()}"
        for path in files(*suffixes)
        if path != Path(__file__)
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(text)
    ]


def test_prose_is_about_the_project() -> None:
    """No file mentions how, by whom or where it was written."""
    assert lines_matching(WORKPLACE, ".py", ".md", ".toml", ".txt", "Makefile", "run") == []


def test_nobody_is_sent_to_the_package_of_another_project() -> None:
    """The distribution is ``holdfast-checkpoint``: on PyPI, ``holdfast`` is another project."""
    assert lines_matching(ANOTHERS, ".py", ".md", ".toml", ".sh", "Makefile", "run") == []


def test_every_file_that_a_guide_names_is_there() -> None:
    """Paths shown as code in the guides for contributors exist, so a move must update them."""
    named = {
        (guide, name)
        for guide in ("ARCHITECTURE.md", "CONTRIBUTING.md")
        for name in re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", (ROOT / guide).read_text())
    }
    assert [f"{guide}: {name}" for guide, name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_definition_that_the_architecture_names_is_there() -> None:
    """Every name in ``ARCHITECTURE.md`` of the form ``room.module.name`` is defined there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(rf"(?<![\w./])(?:{ROOMS})(?:\.\w+)+", text))
    assert len(named) > 20
    assert sorted(name for name in named if not leads_somewhere(ROOT, name.split("."))) == []


def test_the_architecture_names_every_module() -> None:
    """A table of ``ARCHITECTURE.md`` lists each module of the planner, the engine and the drivers.

    The folders of backends have the same names.
    """
    named = set(re.findall(r"`(\w+)`", (ROOT / "ARCHITECTURE.md").read_text()))
    folders = ("planner/*.py", "drivers/*.py", "storage/**/*.py")
    modules = [module for folder in folders for module in ROOT.glob(folder)]
    assert len(modules) > 100
    assert sorted(at(path) for path in modules if path.stem not in {*named, "__init__"}) == []


def test_every_module_that_prose_refers_to_is_there() -> None:
    """A relative reference to a module, or to a function in it, finds its module."""
    dead = [
        f"{at(path)}: {reference}"
        for path in shipped()
        for reference in re.findall(r":\w+:`~?(\.[\w.]+)`", path.read_text())
        if not leads_somewhere(*anchored(path, reference))
    ]
    assert dead == []


def anchored(path: Path, reference: str) -> tuple[Path, list[str]]:
    """Return the folder that a relative reference's dots lead to, and the names after them."""
    names = reference.lstrip(".")
    return path.parents[len(reference) - len(names) - 1], names.split(".")


def leads_somewhere(folder: Path, names: Sequence[str]) -> bool:
    """Return whether ``names`` lead from a folder to a folder, a module, or a definition in it."""
    for number, name in enumerate(names):
        module = folder / f"{name}.py"
        if module.exists():
            return is_defined(tree_of(module), names[number + 1 :])
        if not (folder / name).is_dir():
            return is_defined(tree_of(folder / "__init__.py"), names[number:])
        folder /= name
    return True


def is_defined(scope: ast.Module | ast.ClassDef, names: Sequence[str]) -> bool:
    """Return whether a scope defines the first of ``names``, that one the next, and so on."""
    if not names:
        return True
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return is_defined(node, names[1:])
    return len(names) == 1 and names[0] in top_level_names(scope.body)


def loaded_by(code: str) -> set[str]:
    """Return the third-party packages that a fresh interpreter loads to run ``code``."""
    report = (
        "import sys; before = set(sys.modules)\ntry:\n {}\nexcept SystemExit: "
        "pass\nprint(*set(sys.modules) - before)"
    )
    done = finished([sys.executable, "-I", "-c", report.format(code)])
    names = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    return names - sys.stdlib_module_names


def test_importing_holdfast_loads_nothing_else() -> None:
    """``import holdfast`` loads only the standard library and itself: no torch, no numpy."""
    assert loaded_by("import holdfast") == {"holdfast"}


def test_help_loads_only_what_parses_the_command_line() -> None:
    """``holdfast --help`` loads no torch, numpy or rich, which alone costs three times the rest."""
    code = "sys.argv = ['holdfast', '--help']; import holdfast.cli; holdfast.cli.main()"
    assert loaded_by(code) == {"holdfast"}


def test_the_package_is_imported_by_one_name() -> None:
    """No module is imported by the folder's name, as pytest does with packages."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    assert [name for name, file in files.items() if file == holdfast.__file__] == ["holdfast"]
