"""Checkpoints of version 3, whose images lie in their own files and in those of earlier ones.

A reader gets the same from them as from a whole checkpoint of the same state. No checkpoint needs
the folder of another.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.bits import difference, flip
from support.commands import run, run_json
from support.drivers import HookedDriver
from support.forgery import Columns, Head
from support.lending import Base, save_borrowing, save_whole
from support.ranks import load_as_ranks

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.errors import DamagedError, InvisibleFilesError
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES
from holdfast.storage.format.columns import decode_columns, encode_columns
from holdfast.storage.format.extents import FILES_MAX
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.integrations.dcp import HoldfastReader
from holdfast.storage.integrations.fsspec import HoldfastFileSystem
from holdfast.storage.operations.reading.diff import diff
from holdfast.storage.pipeline.mapping import Mapped
from holdfast.storage.protocol.commit import check_images
from holdfast.storage.runtime.engine import start

BLOCK = BLOCK_NBYTES // 4
"""Elements of a block."""
BLOCKS = 300
"""Blocks of each rank's tensor: two chunks, the last one short."""
WORLD = 2


def states(step: int) -> list[dict[str, Any]]:
    """Return the state of each rank: each step changes a few blocks, some of them every time."""
    made = []
    for rank in range(WORLD):
        random = torch.Generator().manual_seed(rank)
        w = torch.randn(BLOCKS * BLOCK + 77, generator=random)
        for number in range(1, step + 1):
            w[[0, 5 * BLOCK]] += number
            w[10 * number * BLOCK : (10 * number + 3) * BLOCK] += 1
        w[-1] += step // 2
        made.append({"w": w, "shared": torch.arange(1000.0), "step": step})
    return made


def seen(rank: int) -> dict[str, Any]:
    """Return the state of the last step, as it is loaded without a target."""
    return states(3)[rank]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save steps 0 (whole) to 3 of a run, and ``whole``: step 3 as version 1."""
    folder = tmp_path_factory.mktemp("run")
    save_whole(folder / "step-0", states(0), 0)
    for step in (1, 2, 3):
        save_borrowing(folder / f"step-{step}", states(step), folder / f"step-{step - 1}", step)
    save_whole(folder / "whole", states(3), 3)
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the run with real links."""
    known: dict[int, Path] = {}
    for path in sorted(made.rglob("*")):
        copy = tmp_path / "run" / path.relative_to(made)
        if path.is_dir():
            copy.mkdir(parents=True)
        elif path.stat().st_ino in known:
            copy.hardlink_to(known[path.stat().st_ino])
        else:
            known[path.stat().st_ino] = Path(shutil.copy(path, copy))
    return tmp_path / "run"


@pytest.fixture
def last(root: Path) -> Path:
    """Return the last step. Its lenders' folders were deleted by hand."""
    for step in range(3):
        shutil.rmtree(root / f"step-{step}")
    return root / "step-3"


def files_of(folder: Path) -> dict[str, list[Path]]:
    """Return the files of a checkpoint: its own, and borrowed ones."""
    files = sorted(path for path in (folder / "data").rglob("*") if path.suffix in IMAGES)
    return {
        "own": [path for path in files if "lent" not in path.parts],
        "lent": [path for path in files if "lent" in path.parts],
    }


IMAGES = {".blocks", ".safetensors"}


def test_the_steps_share_files(made: Path) -> None:
    """Blocks that changed once and blocks that always change lie in files of two kinds."""
    files = files_of(made / "step-3")
    assert {path.name for path in files["own"]} == {"0.0.blocks", "0.1.blocks", "1.0.blocks", "1.1.blocks"}  # fmt: skip
    assert {path.name for path in files["lent"]} == {"0.safetensors", "1.safetensors", "0.0.blocks", "1.0.blocks", "0.1.blocks", "1.1.blocks"}  # fmt: skip
    assert all(path.stat().st_nlink > 1 for path in files["lent"])
    assert sum(path.stat().st_size for path in files["own"]) < 20 * BLOCK_NBYTES
    manifest = Manifest.decode((made / "step-3" / MANIFEST_KEY).read_bytes())
    assert manifest.version == 3
    assert Manifest.decode(manifest.encode()).encode() == manifest.encode()


def test_whole_checkpoints_keep_their_version(made: Path) -> None:
    """A manifest without extents has version 1 and no column of version 3."""
    data = (made / "whole" / MANIFEST_KEY).read_bytes()
    assert Manifest.decode(data).encode() == data
    assert not any(word in data for word in (b"extent", b"lender", b"page.", b"file."))


def read(last: Path) -> None:
    """Read slices, bytes, trees, and the shares of an inference engine."""
    with holdfast.open(last) as c:
        for rank in range(WORLD):
            w = seen(rank)["w"]
            for rows in (slice(0, 9), slice(11 * BLOCK - 5, 12 * BLOCK), slice(len(w) - 3, None)):
                assert torch.equal(c.read("w", rows=rows, rank=rank), w[rows])
            first = 4 * 30 * BLOCK
            data = w.numpy().tobytes()
            for stop in (first + 3, first + CHUNK_NBYTES):
                assert c.read_bytes("w", first - 7, stop, rank=rank) == data[first - 7 : stop]
            assert torch.equal(c.read_tree("w", rank=rank), w)
        shares = dict(c.read_shares("shared", split={"shared": 0}, rank=1, world=2))
        assert torch.equal(shares["shared"], torch.arange(500.0, 1000.0))


def loaded(last: Path) -> None:
    """Load into new tensors, and by the ranks of a job that exchange their reads."""
    assert difference(seen(0), holdfast.load(last)) is None
    for exchange in (False, True):
        driver = open_driver(last)
        into = [{**s, "w": torch.zeros_like(s["w"]), "shared": torch.zeros(1000)} for s in states(3)]  # fmt: skip
        done = load_as_ranks(driver, into, exchange, apart=exchange)
        start(driver.close()).result()
        for rank in range(WORLD):
            assert torch.equal(into[rank]["w"], seen(rank)["w"])
            assert torch.equal(into[rank]["shared"], torch.arange(1000.0))
        assert len(done) == WORLD


def copied(last: Path) -> None:
    """Check a copy: its images and its manifest equal those of a whole save."""
    target = last.parent / "copy"
    for again in range(2):
        report = holdfast.copy(last, target)
        assert (report.sent_nbytes == 0) == (again == 1)
    whole = last.parent / "whole"
    for rank in range(WORLD):
        (a,), (b,) = (folder.glob(f"data/*/{rank}.safetensors") for folder in (whole, target))
        assert a.read_bytes() == b.read_bytes()
    assert Manifest.decode((target / MANIFEST_KEY).read_bytes()).version == 1
    holdfast.copy(last, last.parent / "new", image_nbytes=1 << 20)
    assert diff(last, last.parent / "new").equal
    assert holdfast.copy(target, last).sent_nbytes == 0


def compared(last: Path) -> None:
    """Compare with a whole checkpoint without reads, and with another step."""
    report = diff(last, last.parent / "whole")
    assert report.equal
    assert report.read_nbytes == 0


def exported(last: Path) -> None:
    """Export files for another program."""
    holdfast.export(last, last.parent / "model", only="shared")
    tensors = load_file(last.parent / "model" / "model.safetensors")
    assert torch.equal(tensors["shared"], torch.arange(1000.0))


def viewed(last: Path) -> None:
    """Check the images in the file system, and read the tensors with torch DCP."""
    view = HoldfastFileSystem(str(last))
    for rank in range(WORLD):
        (image,) = last.parent.glob(f"whole/data/*/{rank}.safetensors")
        assert view.cat_file(f"images/{rank}.safetensors") == image.read_bytes()
    into = {"shared": torch.zeros(1000)}
    dcp.load(into, storage_reader=HoldfastReader(last))
    assert torch.equal(into["shared"], torch.arange(1000.0))


def listed(last: Path) -> None:
    """Show it, with all its files, by commands."""
    files = sum(map(len, files_of(last).values()))
    shown = run_json("show", last)
    assert (shown["format_version"], shown["files"]) == (3, files + 1)
    verified = run_json("verify", last)
    assert (verified["ok"], verified["files"]) == (True, files + 1)
    assert "version 3, attempt" in run("show", last).stdout
    assert "damaged" not in run("ls", last).stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "use", [read, loaded, copied, compared, exported, viewed, listed], ids=lambda use: use.__name__
)
def test_readers_see_a_whole_checkpoint(use: Callable[[Path], None], last: Path) -> None:
    """Every reader of a checkpoint gets the same as from a whole one."""
    use(last)


def test_reads_of_adjacent_blocks_are_joined(made: Path) -> None:
    """Each run of adjacent bytes in a file takes one read; only a few reads run at a time."""
    base = Base.at(made / "step-3")
    m = base.manifest
    driver = MemoryDriver()
    for name, file in zip(base.names, m.files, strict=True):
        start(driver.put(file.key, base.paths[name].read_bytes())).result()
    reads: list[str] = []
    running: list[int] = [0]

    async def before(call: str, key: str) -> None:
        reads.append(key)
        running.append(running[-1] + 1)
        await asyncio.sleep(0.001)

    async def after(call: str, key: str) -> None:
        running.append(running[-1] - 1)

    hooked = HookedDriver(driver, before, after)
    concurrency = hooked.traits.concurrency
    mapped = Mapped(hooked, m)
    (image,) = (made / "whole").glob("data/*/0.safetensors")
    whole = image.read_bytes()
    into = memoryview(bytearray(len(whole)))
    start(mapped.read(m.image_key(0), 0, into)).result()
    assert bytes(into) == whole
    parts = m.file_ranges(0, 0, len(whole))
    assert reads == [m.files[part.file].key for part in parts]
    assert len(parts) < 20
    assert max(running) == min(len(parts), concurrency)
    for a, b in ((BLOCK_NBYTES + 1, 7 * BLOCK_NBYTES), (len(whole) - 5, len(whole)), (9, 9)):
        got = start(mapped.fetch(m.image_key(0), a, b - a)).result()
        pieces: list[bytes] = []
        take = lambda piece, pieces=pieces: pieces.append(bytes(piece))  # noqa: E731
        start(mapped.read_pieces(m.image_key(0), a, b - a, take)).result()
        assert bytes(got) == whole[a:b] == b"".join(pieces)
    for a, b in ((-1, 5), (len(whole) - 1, len(whole) + 1)):
        with pytest.raises(DamagedError, match="beyond the end"):
            start(mapped.read(m.image_key(0), a, memoryview(bytearray(b - a)))).result()


@pytest.mark.parametrize(("kind", "name"), [("own", "0.1.blocks"), ("lent", "0.safetensors")])
@pytest.mark.parametrize("how", ["missing", "short", "long", "flipped"])
def test_damage_is_located_in_the_file_it_is_in(kind: str, name: str, how: str, last: Path) -> None:
    """``verify`` names the damaged file and its bytes. A load names it, or all possible files."""
    (file,) = (path for path in files_of(last)[kind] if path.name == name)
    size = file.stat().st_size
    block = 3 if kind == "lent" else 0
    if how == "missing":
        file.unlink()
    elif how == "flipped":
        flip(file, block * BLOCK_NBYTES + 700)
    else:
        with file.open("r+b") as opened:
            opened.truncate(4096 if how == "short" else size + 1)
    key = file.relative_to(last).as_posix()
    with holdfast.open(last) as c:
        report = c.verify()
    damages = [damage for damage in report.damages if damage.key == key]
    (first, *_) = damages
    expected = {
        "missing": (0, size, "the file is missing"),
        "short": (4096, size, f"the file has 4,096 bytes, not {size:,}"),
        "long": (size, size + 1, f"the file has {size + 1:,} bytes, not {size:,}"),
        "flipped": (block * BLOCK_NBYTES, (block + 1) * BLOCK_NBYTES, "not what was written"),
    }[how]
    assert (expected[0], expected[1], expected[2]) in [(d.start, d.stop, d.what) for d in damages]
    assert how in ("long", "flipped") or "w" in first.tensors
    elsewhere = {d.what for d in report.damages if d.key != key}
    assert elsewhere <= {"cannot be checked: a part of their chunk is lost"}
    assert how in ("missing", "short") or not elsewhere
    if how == "long":
        assert difference(seen(0), holdfast.load(last)) is None
        return
    with pytest.raises(DamagedError, match="They belong to tensor 'w'") as caught:
        holdfast.load(last)
    assert key in str(caught.value)


def test_a_commit_checks_every_file(last: Path) -> None:
    """Each file that a manifest names must exist with its full size."""
    manifest = Manifest.decode((last / MANIFEST_KEY).read_bytes())
    driver = open_driver(last)
    start(check_images(driver, manifest)).result()
    for file in [*files_of(last)["own"], *files_of(last)["lent"]]:
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        with pytest.raises(InvisibleFilesError) as caught:
            start(check_images(driver, manifest)).result()
        assert caught.value.key == file.relative_to(last).as_posix()
        file.write_bytes(data)
    start(driver.close()).result()
    file.unlink()
    (line,) = [c for c in holdfast.list_checkpoints(last.parent) if c.path == "step-3"]
    assert line.damage == f"{file.relative_to(last).as_posix()} is missing"


def test_a_deleted_checkpoint_takes_its_links_along(root: Path) -> None:
    """Pruned, removed and replaced checkpoints leave no links, and affect no other checkpoint."""
    assert len(holdfast.list_checkpoints(root)) == 5
    holdfast.save(root / "step-1", states(3)[0], step=1)
    assert len(list((root / "step-1" / "data").iterdir())) == 1
    assert files_of(root / "step-1")["lent"] == []
    run("prune", root, "--keep-last", "1", "--yes")
    assert sorted(path.name for path in root.iterdir()) == ["step-1", "step-3", "whole"]
    with holdfast.open(root / "step-3") as c:
        assert c.verify().ok
        assert torch.equal(c.read("w", rank=1), seen(1)["w"])


def test_leftovers_of_a_saver_include_its_links(root: Path) -> None:
    """An attempt that never committed is collected together with its links."""
    (root / "step-3" / MANIFEST_KEY).unlink()
    holdfast.save(root / "step-3", states(3)[0])
    assert files_of(root / "step-3")["lent"] == []
    with holdfast.open(root / "step-2") as c:
        assert c.verify().ok


def put(name: str, at: Any, value: int) -> Callable[[Columns, Head], None]:
    """Set entries of a column."""

    def alter(columns: Columns, fields: Head) -> None:
        columns[name] = columns[name].astype(np.uint64)
        columns[name][at] = value

    return alter


def shape(name: str, length: int) -> Callable[[Columns, Head], None]:
    """Make a column shorter or longer."""
    return lambda columns, fields: columns.update({name: np.resize(columns[name], length)})


def square(name: str) -> Callable[[Columns, Head], None]:
    """Make a column a table."""
    return lambda columns, fields: columns.update({name: columns[name].reshape(-1, 1)})


def point(name: str) -> Callable[[Columns, Head], None]:
    """Make a column a single number."""
    return lambda columns, fields: columns.update({name: np.array(1, np.uint8)})


def missing(name: str) -> Callable[[Columns, Head], None]:
    """Leave a column out."""
    return lambda columns, fields: columns.update(dict.fromkeys([name])) or columns.pop(name)


def lenders(*names: Any) -> Callable[[Columns, Head], None]:
    """Name other lenders."""
    return lambda columns, fields: fields.update(lenders=list(names))


def many_files(columns: Columns, fields: Head) -> None:
    """Name one file more than a reader may open for a rank, each of another lender."""
    count = FILES_MAX + 1
    fields["lenders"] = [f"20200101T000000-{number:08x}" for number in range(count)]
    rank = np.zeros(count, np.uint8)
    rows = {"lender": np.arange(1, count + 1).astype(np.uint16), "part": rank, "rank": rank}
    for name, more in {**rows, "nbytes": rank}.items():
        columns[f"file.{name}"] = np.concatenate([columns[f"file.{name}"].astype(np.uint64), more])


def wrapping(columns: Columns, fields: Head) -> None:
    """Let the numbers of blocks wrap around to the right sum."""
    blocks = columns["extent.blocks"].astype(np.uint64)
    total = int(blocks.sum())
    blocks[:] = 0
    blocks[:3] = [(1 << 63) - 1, (1 << 63) - 1, total + 2]
    columns["extent.blocks"] = blocks


def overlapping(columns: Columns, fields: Head) -> None:
    """Let two extents take the same blocks of a file."""
    blocks = columns["extent.blocks"]
    a, b = np.flatnonzero(blocks == blocks.min())[:2]
    for name in ("file", "block"):
        columns[f"extent.{name}"][b] = columns[f"extent.{name}"][a]


HUGE = [1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
COLUMNS = [*(f"file.{name}" for name in ("lender", "rank", "part", "nbytes")), "extent.count", "extent.blocks", "extent.file", "extent.block", "page.file", "page.slot"]  # fmt: skip
REFUSED: dict[str, Callable[[Columns, Head], None]] = {
    "a gap": put("extent.blocks", 0, 2), "no blocks": put("extent.blocks", 0, 0), "blocks that wrap": wrapping,
    "an extent too many": put("extent.count", 0, 99), "an unknown lender": put("file.lender", 0, 77), "an unknown part": put("file.part", 0, 3),
    "a block behind the file": put("extent.block", 0, 1 << 20), "a file cut short": put("file.nbytes", 0, 100), "overlapping extents": overlapping,
    "a page behind the file": put("page.slot", 0, 1 << 40), "an unknown file": put("extent.file", 0, 99), "a page in no file": put("page.file", 0, 99),
    "too many files": many_files, "a lender elsewhere": lenders("../../x", "20200101T000000-00000000"), "lenders that repeat": lenders(*["20200101T000000-00000000"] * 3),
    "lenders of numbers": lenders(1, 2, 3), "no lenders": lambda columns, fields: fields.pop("lenders") and None, "lenders null": lambda columns, fields: fields.update(lenders=None),
    "its own lender": lambda columns, fields: fields.update(lenders=[fields["attempt"], *fields["lenders"][1:]]),
    "a file twice": lambda columns, fields: [columns.update({f"file.{n}": np.append(columns[f"file.{n}"], columns[f"file.{n}"][0])}) for n in ("lender", "rank", "part", "nbytes")] and None,
    **{f"{name} short": shape(name, 1) for name in COLUMNS}, **{f"{name} long": shape(name, 40) for name in COLUMNS},
    **{f"{name} square": square(name) for name in COLUMNS}, **{f"{name} a number": point(name) for name in COLUMNS},
    **{f"{name} missing": missing(name) for name in COLUMNS},
    **{f"{name} of {value}": put(name, 0, value) for name in COLUMNS if name not in ("file.rank", "file.nbytes") for value in HUGE},
    **{f"{name} of {value}": put(name, 0, value) for name in ("file.rank", "file.nbytes") for value in HUGE[3:]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_no_writer_makes_is_refused(name: str, made: Path) -> None:
    """Files, extents and pages that contradict each other are damage, whatever their size."""
    columns, metadata = decode_columns((made / "step-3" / MANIFEST_KEY).read_bytes(), "it")
    fields = json.loads(metadata["holdfast"])
    columns = {key: column.copy() for key, column in columns.items()}
    REFUSED[name](columns, fields)
    with pytest.raises(DamagedError, match=r"contradicts itself|malformed"):
        Manifest.decode(encode_columns(columns, {"holdfast": json.dumps(fields)}))
