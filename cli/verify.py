"""``holdfast verify``: reads every byte of a checkpoint and checks it."""

from __future__ import annotations

import time
from dataclasses import asdict

from ..core.units import size_text
from ..drivers.uri import parse
from ..errors import DamagedError
from ..storage.format.manifest import MANIFEST_KEY
from ..storage.operations.reading.reader import open as open_checkpoint
from ..storage.pipeline.verifier import Damage, VerifyReport
from .commands import print_json
from .progress import progress_bar
from .text import one_of, paint, printable

_TENSORS_SHOWN = 5


def run(uri: str, *, json_output: bool) -> int:
    """Verify a checkpoint and print the damage. Return 0 if there is none, else 1."""
    began_s = time.perf_counter()
    report = _verified(uri)
    seconds = time.perf_counter() - began_s
    damages = _joined(report.damages)
    files = one_of(report.files, "file")
    size = size_text(report.nbytes)
    if json_output:
        print_json(
            {
                "uri": parse(uri).redacted,
                "ok": report.ok,
                "files": report.files,
                "nbytes": report.nbytes,
                "seconds": seconds,
                "damages": [asdict(d) for d in damages],
            }
        )
    elif report.ok:
        rate = report.nbytes / seconds / 1e9
        print(f"{paint('ok', 'green')}: {files}, {size}, {rate:.2f} GB/s")
    else:
        places = one_of(len(damages), "place")
        print(f"{paint('damaged', 'red')}: {places}; {files}, {size} read")
        print("\n".join(map(_line, damages)))
    return int(not report.ok)


def _verified(uri: str) -> VerifyReport:
    """Return the report, with the manifest counted as a file."""
    try:
        checkpoint = open_checkpoint(uri)
    except DamagedError as error:
        return VerifyReport(1, 0, [Damage(MANIFEST_KEY, 0, 0, error.message, ())])
    with checkpoint, progress_bar("verify") as progress:
        report = checkpoint.verify(progress)
    return VerifyReport(
        report.files + 1, report.nbytes + checkpoint.manifest_nbytes, report.damages
    )


def _joined(damages: list[Damage]) -> list[Damage]:
    """Join adjacent damages of one kind."""
    groups: list[list[Damage]] = []
    for d in damages:
        last = groups[-1][-1] if groups else None
        if last and (last.key, last.stop, last.what) == (d.key, d.start, d.what):
            groups[-1].append(d)
        else:
            groups.append([d])
    return [
        Damage(
            g[0].key,
            g[0].start,
            g[-1].stop,
            g[0].what,
            tuple(dict.fromkeys(name for d in g for name in d.tensors)),
        )
        for g in groups
    ]


def _line(d: Damage) -> str:
    line = f"  {d.key}: "
    if d.stop:
        line += f"bytes {d.start:,} to {d.stop:,}: "
    line += printable(d.what)
    names = ", ".join(map(printable, d.tensors[:_TENSORS_SHOWN]))
    if names:
        line += f"; tensors: {names}"
    if len(d.tensors) > _TENSORS_SHOWN:
        line += f" and {len(d.tensors) - _TENSORS_SHOWN:,} more"
    return line
