"""``holdfast show``: prints the state in a checkpoint as a tree, with the layout of each tensor.

On a terminal the tree has guides and columns. Elsewhere levels are indented by two spaces, fields
are separated by two, and no line depends on its neighbours. So diff can compare two checkpoints,
and grep can search one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..core.units import size_text
from ..drivers.registry import open_driver
from ..storage.format.manifest import Manifest
from ..storage.format.patches import PatchBases
from ..storage.format.tree import Key, Value, format_path
from ..storage.operations.foreign_formats import explains
from ..storage.operations.location import Place
from ..storage.operations.maintenance.space import paths_of
from ..storage.protocol.current import read_manifest
from ..storage.runtime.engine import start
from .commands import print_json
from .placed import Placed, PlacedTensor
from .text import is_terminal, one_of, paint, printable, shape_text, some, time_text
from .valued import value_text

_LINES_PER_WRITE = 1000
_NAME_WIDTH_MAX = 48


@explains("uri", "")
def run(uri: str, *, json_output: bool, values: bool, depth: int | None) -> int:
    """Print the state and return 0. ``depth``: summarise containers below this many levels.
    ``values``: print values in full."""
    driver = open_driver(uri)
    try:
        manifest, data = start(read_manifest(driver)).result()
    finally:
        start(driver.close()).result()
    paths = {}
    if manifest.lent_nbytes:
        paths = start(paths_of(Place.of(uri, None), manifest.lent_nbytes)).result()
    if json_output:
        print_json(document(driver.uri, manifest, len(data), paths))
        return 0
    print("\n".join(_header(driver.uri, manifest, len(data), paths)) + "\n")
    lines: list[str] = []
    for line in Outline(manifest, whole_values=values, depth=depth).lines():
        lines.append(line)
        if len(lines) == _LINES_PER_WRITE:
            print("\n".join(lines))
            lines.clear()
    if lines:
        print("\n".join(lines))
    return 0


def _stored_nbytes(m: Manifest, manifest_nbytes: int) -> int:
    return sum(file.nbytes for file in m.files) + manifest_nbytes


def _borrowed(m: Manifest, paths: Mapping[str, str]) -> str:
    """Return which parts of the images lie in files of other checkpoints."""
    total = max(1, m.stored_nbytes)
    parts = [
        f"{100 * nbytes / total:.3g} % {printable(paths.get(attempt, attempt))}"
        for attempt, nbytes in sorted(m.lent_nbytes.items(), key=lambda item: -item[1])
    ]
    files = one_of(sum(file.attempt != m.attempt for file in m.files), "file")
    return (
        f"{100 - 100 * m.own_nbytes / total:.1f} % of {size_text(m.stored_nbytes)}: "
        f"{some(parts)} ({files}); own {size_text(m.own_nbytes)}"
    )


def _header(uri: str, m: Manifest, manifest_nbytes: int, paths: Mapping[str, str]) -> list[str]:
    written = f"version {m.version}, attempt {m.attempt}"
    if m.compression:
        written = f"version {m.version}, {m.compression}, attempt {m.attempt}"
    facts = {
        "uri": printable(uri),
        "step": "-" if m.step is None else str(m.step),
        "saved": time_text(m.created_s),
        "ranks": str(m.world),
        "tensors": f"{len(m.tensors.rows):,}, {size_text(m.tensor_nbytes)}",
        "files": f"{len(m.files) + 1:,}, {size_text(_stored_nbytes(m, manifest_nbytes))}",
        "format": written,
    }
    if m.bases is not None:
        facts["weights"] = bases_text(m.bases)
    if m.lent_nbytes:
        facts["borrowed"] = _borrowed(m, paths)
    return [f"{paint(f'{name:<9}', 'dim')}{fact}" for name, fact in facts.items()]


def bases_text(bases: PatchBases) -> str:
    """Return what a version of a weight channel has patches of."""
    text = f"patches of {bases.previous.sequence:08d}"
    if bases.to_anchor:
        text += f", and of the anchor {bases.anchor.sequence:08d}"
    if bases.whole:
        text = f"an anchor, with {text}"
    return text


@dataclass(slots=True)
class _Folder:
    """One container: its contents, and totals including everything below it."""

    label: str
    folders: list[int] = field(default_factory=list)
    tensors: list[PlacedTensor] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0
    value_count: int = 0

    def summary(self) -> str:
        parts = []
        if self.count:
            parts += [one_of(self.count, "tensor"), size_text(self.nbytes)]
        if self.value_count:
            parts.append(one_of(self.value_count, "value"))
        return ", ".join(parts) or "empty"


class Outline:
    """The lines of the tree. Each container lists its values, its tensors, and then its
    containers."""

    def __init__(self, manifest: Manifest, *, whole_values: bool, depth: int | None) -> None:
        self._m = manifest
        self._placed = Placed(manifest)
        self._whole_values = whole_values
        self._depth = depth
        self._pretty = is_terminal()
        self._prefix = [len(prefix) for prefix in manifest.tree.prefixes()]
        self._folders = [_Folder(printable(str(c.key))) for c in manifest.tree.containers]
        self._folders[0].label = "state"
        self._fill()

    def _fill(self) -> None:
        containers = self._m.tree.containers
        for container, tensor in self._placed.tensors():
            folder = self._folders[container]
            folder.tensors.append(tensor)
            folder.count += 1
            if not self._placed.alias_of(tensor):
                folder.nbytes += tensor.nbytes * len(tensor.rows)
        for value in self._m.tree.values:
            self._folders[value.container].values.append(value)
        for number in range(len(containers) - 1, -1, -1):  # parents have smaller numbers
            folder = self._folders[number]
            parent = self._folders[containers[number].parent]
            folder.value_count += len(folder.values)
            folder.folders.reverse()
            if number:
                parent.folders.append(number)
                parent.count += folder.count
                parent.nbytes += folder.nbytes
                parent.value_count += folder.value_count

    def lines(self) -> Iterator[str]:
        """Yield the lines from the top."""
        pending = [(0, 0, "", "")]
        while pending:  # no recursion: a state may be nested deeper than Python's stack
            number, level, guide, inner = pending.pop()
            folder = self._folders[number]
            yield f"{guide}{paint(folder.label, 'bold')}  {paint(folder.summary(), 'dim')}".rstrip()
            if self._depth is not None and level >= self._depth:
                continue
            leaves = self._leaves(number)
            for i, leaf in enumerate(leaves):
                yield self._guides(inner, i + 1 == len(leaves) and not folder.folders)[0] + leaf
            below = [
                (child, level + 1, *self._guides(inner, child == folder.folders[-1]))
                for child in folder.folders
            ]
            pending += reversed(below)

    def _guides(self, inner: str, last: bool) -> tuple[str, str]:
        """Return the prefixes of a line and of the lines below it."""
        if not self._pretty:
            return inner + "  ", inner + "  "
        if last:
            return inner + "└── ", inner + "    "
        return inner + "├── ", inner + "│   "

    def _leaves(self, number: int) -> list[str]:
        """Return the lines of a container's values and tensors: in order for lists, values first
        for dicts."""
        folder = self._folders[number]
        cut = self._prefix[number]
        rows: list[tuple[str, ...]] = [(_key_text(v.key), self._value(v)) for v in folder.values]
        rows += [(printable(tensor.name[cut:]), *self._fields(tensor)) for tensor in folder.tensors]
        if self._m.tree.containers[number].kind != "dict":
            rows.sort(key=lambda row: int(row[0]))
        if not self._pretty:
            return ["  ".join(row) for row in rows]
        name_width = min(_NAME_WIDTH_MAX, max((len(row[0]) for row in rows), default=0))
        widths = [
            max(map(len, column))
            for column in zip(*(row[1:] for row in rows if len(row) > 2), strict=True)
        ]
        return [_aligned(row, [name_width, *widths]) for row in rows]

    def _value(self, value: Value) -> str:
        return value_text(value, self._m.world, whole=self._whole_values)

    def _fields(self, tensor: PlacedTensor) -> tuple[str, str, str]:
        kind = f"{printable(tensor.dtype)} {shape_text(tensor.shape)}"
        return kind, size_text(tensor.nbytes), printable(self._placed.words(tensor))


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """Align the cells of a row. A value has a name and its text; the last cell of a tensor is its
    layout."""
    cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
    last = row[-1]
    if len(row) > 2:
        last = paint(last, "dim")
    return "  ".join([*cells, last])


def _key_text(key: Key) -> str:
    if isinstance(key, str):
        return printable(key)
    return printable(repr(key))


def document(
    uri: str, m: Manifest, manifest_nbytes: int, homes: Mapping[str, str]
) -> dict[str, object]:
    """Return the output of ``--json``. ``homes``: paths of lenders, by attempt."""
    placed = Placed(m)
    paths = m.tree.paths()
    tensors = [
        {
            "name": t.name,
            "dtype": t.dtype,
            "shape": t.shape,
            "nbytes": t.nbytes,
            "shards": placed.shards(t),
            "ranks": placed.ranks(t),
            "owners": t.owners,
            "alias_of": placed.alias_of(t),
        }
        for _, t in placed.tensors()
    ]
    values = [
        {
            "path": format_path((*paths[v.container], v.key)),
            "by_rank": [{"ranks": ranks, "value": encoded} for ranks, encoded in v.by_rank],
        }
        for v in m.tree.values
    ]
    return {
        "uri": uri,
        "format_version": m.version,
        "compression": m.compression,
        "attempt": m.attempt,
        "step": m.step,
        "created_s": m.created_s,
        "saved": time_text(m.created_s),
        "world": m.world,
        "nbytes": m.tensor_nbytes,
        "files": len(m.files) + 1,
        "stored_nbytes": _stored_nbytes(m, manifest_nbytes),
        "patches": None if m.bases is None else m.bases.to_json(),
        "own_nbytes": m.own_nbytes,
        "borrowed_nbytes": m.stored_nbytes - m.own_nbytes,
        "lenders": [
            {"attempt": attempt, "path": homes.get(attempt), "nbytes": nbytes}
            for attempt, nbytes in m.lent_nbytes.items()
        ],
        "tensors": tensors,
        "values": values,
    }
