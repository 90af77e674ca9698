"""``holdfast verify``: reads every byte of a checkpoint, or of a folder of them, and checks it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ..core.units import size_text
from ..drivers.uri import divided, join, parse
from ..errors import DamagedError, NotACheckpointError, NotFoundError, ReplacedError, UsageError
from ..storage.format.manifest import MANIFEST_KEY, PATCH, Manifest
from ..storage.operations.maintenance.listing import list_checkpoints
from ..storage.operations.maintenance.space import name_of
from ..storage.operations.reading.reader import Checkpoint, manifest_of
from ..storage.operations.reading.reader import open as open_checkpoint
from ..storage.pipeline.verifier import Damage, VerifyReport
from .commands import complain, print_json
from .progress import progress_bar
from .text import one_of, paint, printable, some

_TENSORS_SHOWN = 5


@dataclass(slots=True)
class _Place:
    """Damaged bytes, by the key below the URI; see :class:`Damage`. ``checkpoints``: paths of those
    with this damage."""

    key: str
    start: int
    stop: int
    what: str
    tensors: list[str]
    checkpoints: list[str]


def run(uri: str, *, json_output: bool) -> int:
    """Verify a checkpoint, or all below a folder, and print the damage. Return 0 if there is none,
    else 1."""
    began_s = time.perf_counter()
    reports = _reports(uri)
    seconds = time.perf_counter() - began_s
    places = _joined(_places(reports))
    nbytes = sum(report.nbytes for report in reports.values())
    number = sum(report.files for report in reports.values())
    files = one_of(number, "file")
    if json_output:
        print_json(
            {
                "uri": parse(uri).redacted,
                "ok": not places,
                "files": number,
                "nbytes": nbytes,
                "seconds": seconds,
                "damages": [asdict(place) for place in places],
            }
        )
    elif not places:
        rate = nbytes / seconds / 1e9
        print(f"{paint('ok', 'green')}: {files}, {size_text(nbytes)}, {rate:.2f} GB/s")
    else:
        count = one_of(len(places), "place")
        print(f"{paint('damaged', 'red')}: {count}; {files}, {size_text(nbytes)} read")
        print("\n".join(map(_line, places)))
    return int(bool(places))


def _reports(uri: str) -> dict[str, VerifyReport]:
    """Return the report of the checkpoint at ``uri``, or of each below it, by path."""
    try:
        return {"": _verified(uri)}
    except NotACheckpointError:
        listed = list_checkpoints(uri)
        if not listed:
            raise
    reports = {}
    for c in sorted(listed, key=lambda c: c.created_s):
        if c.problem is not None:
            reports[c.path] = VerifyReport(1, 0, [Damage("", 0, 0, c.problem, ())])
            continue
        try:
            reports[c.path] = _verified(str(join(parse(uri), *c.path.split("/"))))
        except (NotACheckpointError, ReplacedError):
            complain(f"not verified, since it was deleted or replaced meanwhile: {c.path}")
    return reports


def _verified(uri: str) -> VerifyReport:
    """Return the report, with the manifest counted as a file."""
    try:
        checkpoint = open_checkpoint(uri)
    except DamagedError as error:
        return VerifyReport(1, 0, [Damage(MANIFEST_KEY, 0, 0, error.message, ())])
    with checkpoint:
        m = manifest_of(checkpoint)
        report = _verified_version(uri, m) if m.is_patched else _verified_images(checkpoint)
    return VerifyReport(
        report.files + 1, report.nbytes + checkpoint.manifest_nbytes, report.damages
    )


def _verified_images(checkpoint: Checkpoint) -> VerifyReport:
    with progress_bar("verify") as progress:
        return checkpoint.verify(progress)


def _verified_version(uri: str, manifest: Manifest) -> VerifyReport:
    """Verify a version of a weight channel: apply its patches, and check the result."""
    channel_uri, name = divided(parse(uri))
    if not name.isdecimal():
        raise UsageError(
            "a version of a weight channel is a patch of others, which are not here",
            uri=channel_uri.redacted,
            advice="Verify it in the folder of its channel.",
        )
    from ..storage.weights.versions import Channel

    with Channel(str(channel_uri)) as channel:
        try:
            with channel.opened(channel.at(int(name), manifest.attempt)) as version:
                report = _verified_images(version)
        except (DamagedError, NotFoundError) as error:
            damage = Damage(error.key or MANIFEST_KEY, 0, 0, error.message, ())
            return VerifyReport(len(manifest.files), 0, [damage])
    damages = [
        replace(d, key=f"{d.key}.{PATCH}", what=f"of the image: {d.what}") for d in report.damages
    ]
    return replace(report, damages=damages)


def _places(reports: Mapping[str, VerifyReport]) -> list[_Place]:
    """Return all damage; damage of a shared file once."""
    places: dict[tuple[object, ...], _Place] = {}
    for path, report in reports.items():
        for d in report.damages:
            writer, name = name_of(d.key)
            shared = (writer or path, name, d.start, d.stop, d.what)
            key = f"{path}/{d.key}".strip("/")
            place = places.setdefault(shared, _Place(key, d.start, d.stop, d.what, [], []))
            place.tensors = list(dict.fromkeys([*place.tensors, *d.tensors]))
            place.checkpoints = list(dict.fromkeys([*place.checkpoints, path]))
    return sorted(places.values(), key=lambda place: (place.key, place.start))


def _joined(places: list[_Place]) -> list[_Place]:
    """Join adjacent damages of one kind."""
    joined: list[_Place] = []
    for place in places:
        last = joined[-1] if joined else None
        ours = (place.key, place.start, place.what, place.checkpoints)
        if last and (last.key, last.stop, last.what, last.checkpoints) == ours:
            last.stop = place.stop
            last.tensors = list(dict.fromkeys([*last.tensors, *place.tensors]))
        else:
            joined.append(place)
    return joined


def _line(place: _Place) -> str:
    line = f"  {printable(place.key)}: "
    if place.stop:
        line += f"bytes {place.start:,} to {place.stop:,}: "
    line += printable(place.what)
    names = some([*map(printable, place.tensors)], _TENSORS_SHOWN)
    if names:
        line += f"; tensors: {names}"
    if len(place.checkpoints) > 1:
        line += f"; shared by {', '.join(map(printable, place.checkpoints))}"
    return line
