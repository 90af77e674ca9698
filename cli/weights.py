"""``holdfast weights``: lists, follows, publishes and copies versions of weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..core.units import size_text
from ..drivers.uri import join, parse
from ..errors import DamagedError, NotACheckpointError, NotFoundError, StorageError, UsageError
from ..storage.format.manifest import Manifest
from ..storage.operations.conversion.export import ExportReport, export
from ..storage.operations.conversion.importing import import_
from ..storage.operations.maintenance.prune import remove
from ..storage.operations.reading.reader import open as open_checkpoint
from ..storage.operations.reading.selection import rules_of
from ..storage.weights.versions import Channel, ListedVersion
from .commands import complain, print_json
from .progress import progress_bar
from .show import Outline, bases_text
from .tables import NONE, columns
from .text import age_text, one_of, paint, printable, time_text

if TYPE_CHECKING:
    from ..storage.weights.mirror import Version

FILE = "model.safetensors"
KEY = "model"
"""Key of published weights in the state, if the source does not say one."""
_TITLES = ("number", "version", "kind", "bytes", "of whole", "age", "leases", "state")
_WAIT_S = 3600.0
_TRIES = 2


def ls(uri: str, *, json_output: bool) -> int:
    """Print the versions of a channel, oldest first. Return 0 if there are any, else 1."""
    with Channel(uri) as channel:
        try:
            found = channel.versions()
        except NotACheckpointError as error:
            found = []
            complain(str(error))
        if json_output:
            print_json({"uri": channel.uri, "versions": [_entry(v) for v in found]})
        elif found:
            print("\n".join(columns(_TITLES, [_cells(v) for v in found], ("kind", "state"))))
    return int(not found)


def _share(version: ListedVersion) -> float:
    return version.stored_nbytes / max(1, version.nbytes)


def _entry(version: ListedVersion) -> dict[str, Any]:
    return {**asdict(version), "share": _share(version), "saved": time_text(version.created_s)}


def _cells(version: ListedVersion) -> tuple[str, ...]:
    return (
        f"{version.sequence:08d}",
        NONE if version.version is None else str(version.version),
        "anchor" if version.is_anchor else "patch",
        size_text(version.stored_nbytes),
        f"{_share(version):.1%}",
        age_text(time.time() - version.created_s),
        str(version.leases),
        "offered" if version.is_offered else "kept as a base",
    )


def show(uri: str, *, number: int | None, depth: int | None, json_output: bool) -> int:
    """Print one version, by default the newest: its bases, bytes of ranks, and tensors. Return
    0."""
    with Channel(uri) as channel:
        version = channel.find(number)
        described = channel.describe(version)
        m = version.manifest
        stored_nbytes = sum(described.rank_nbytes.values())
        document = {
            "uri": channel.uri,
            "version": m.step,
            "sequence": version.sequence,
            "attempt": m.attempt,
            "created_s": m.created_s,
            "patches": None if m.bases is None else m.bases.to_json(),
            "is_anchor": not m.is_patched,
            "changed": described.changed,
            "tensors": len(m.tensors.rows),
            "nbytes": m.tensor_nbytes,
            "stored_nbytes": stored_nbytes,
            "ranks": [
                {"rank": rank, "stored_nbytes": nbytes}
                for rank, nbytes in sorted(described.rank_nbytes.items())
            ],
        }
    if json_output:
        print_json(document)
        return 0
    share = stored_nbytes / max(1, m.tensor_nbytes)
    facts = {
        "uri": printable(channel.uri),
        "version": f"{m.step}, number {version.sequence:08d}",
        "saved": time_text(m.created_s),
        "stored": "an anchor" if m.bases is None else bases_text(m.bases),
        "bytes": f"{size_text(stored_nbytes)}, {share:.1%} of {size_text(m.tensor_nbytes)}",
    }
    if described.changed is not None:
        facts["changed"] = f"{described.changed:.2%} of the weights"
    print("\n".join(f"{paint(f'{name:<9}', 'dim')}{fact}" for name, fact in facts.items()))
    rows = [(str(r), size_text(nbytes)) for r, nbytes in sorted(described.rank_nbytes.items())]
    print("\n" + "\n".join(columns(("rank", "bytes"), rows, ())) + "\n")
    for line in Outline(m, whole_values=False, depth=depth).lines():
        print(line)
    return 0


def follow(uri: str, *, into: str | None, count: int | None, json_output: bool) -> int:
    """Print each version once it is published, and keep the file in ``into`` up to date. Return 0
    after ``count`` versions."""
    last = -1
    shown = 0
    with Channel(uri, holds_all=into is not None) as channel:
        while count is None or shown < count:
            version = channel.wait(last, _WAIT_S)
            if version is None:
                continue
            last = version.manifest.step or 0
            written = None
            if into is not None:
                written = _kept_up_to_date(channel, version, into)
                if written is None:
                    continue
            shown += 1
            _print_version(version, written, json_output=json_output)
    return 0


def _kept_up_to_date(channel: Channel, version: Version, into: str) -> ExportReport | None:
    """Replace the file in the folder ``into``; return None if the version cannot be read."""
    for left in reversed(range(_TRIES)):
        try:
            with channel.leased(version), channel.opened(version) as checkpoint:
                names = _without_top(version.manifest)
                dest = join(into, FILE)
                return export(
                    checkpoint, str(dest), format="safetensors", rename=names, overwrite=True
                )
        except (DamagedError, NotFoundError) as error:
            channel.forget()
            if not left:
                complain(f"version {version.manifest.step} is skipped: {error}")
    return None


def _print_version(version: Version, written: ExportReport | None, *, json_output: bool) -> None:
    m = version.manifest
    stored_nbytes = m.stored_nbytes
    kind = "patch" if m.is_patched else "anchor"
    if json_output:
        document = {
            "version": m.step,
            "sequence": version.sequence,
            "kind": kind,
            "created_s": m.created_s,
            "nbytes": m.tensor_nbytes,
            "stored_nbytes": stored_nbytes,
            "into": None if written is None else written.uri,
            "seconds": None if written is None else written.seconds,
        }
        print_json(document)
    else:
        age = age_text(time.time() - m.created_s)
        facts = [f"version {m.step}", f"number {version.sequence:08d}", kind]
        facts += [size_text(stored_nbytes), age]
        if written is not None:
            facts.append(f"written in {written.seconds:.2f} s")
        print("  ".join(facts), flush=True)


def pull(
    uri: str,
    dest: str,
    *,
    number: int | None,
    checkpoint: bool,
    only: list[str],
    rename: list[str],
    overwrite: bool,
    json_output: bool,
) -> int:
    """Write a version, by default the newest, to the folder ``dest``. Return 0."""
    if checkpoint and (only or rename):
        raise UsageError(
            "a checkpoint is copied as a whole", advice="Leave out --only and --rename."
        )
    began_s = time.perf_counter()
    with Channel(uri) as channel, progress_bar("pull", lines=True) as progress:
        version = channel.find(number)
        m = version.manifest
        with channel.leased(version):
            if checkpoint:
                channel.copy(version, dest, overwrite=overwrite, progress=progress)
                files, nbytes = len(m.images) + 1, version.whole.stored_nbytes
            else:
                with channel.opened(version) as opened:
                    report = export(
                        opened,
                        dest,
                        only=only,
                        rename=rules_of(rename) or _without_top(m),
                        overwrite=overwrite,
                        progress=progress,
                    )
                files, nbytes = len(report.files), report.nbytes
    seconds = time.perf_counter() - began_s
    there = parse(dest).redacted
    if json_output:
        document = {"version": m.step, "sequence": version.sequence, "uri": there}
        print_json({**document, "files": files, "nbytes": nbytes, "seconds": seconds})
    else:
        print(
            f"{paint('pulled', 'green')}: version {m.step}: {printable(there)}: "
            f"{one_of(files, 'file')}, {size_text(nbytes)}, {nbytes / seconds / 1e9:.2f} GB/s"
        )
    return 0


def _without_top(m: Manifest) -> Mapping[str, str]:
    """Return the rule that removes the key of the state, such as ``model``, from names, if there is
    a single one."""
    tops = {name.partition(".")[0] for name in m.tensors.names if "." in name}
    whole = all("." in name for name in m.tensors.names)
    if whole and len(tops) == 1:
        return {f"{tops.pop()}.*": "*"}
    return {}


def push(uri: str, source: str, *, number: int | None, only: list[str], json_output: bool) -> int:
    """Publish the weights in ``source`` as the next version. Return 0."""
    from ..storage.weights.api import publish

    began_s = time.perf_counter()
    with publish(uri) as publisher:
        step, state = _loaded(source, only)
        if number is None:
            newest = publisher.newest
            number = step if step is not None else 0 if newest is None else newest + 1
        report = publisher.push(number, state).wait()
    assert report is not None
    seconds = time.perf_counter() - began_s
    if json_output:
        document = {"uri": parse(uri).redacted, "version": number}
        print_json({**document, "nbytes": report.stored_nbytes, "seconds": seconds})
    else:
        there = printable(parse(uri).redacted)
        size = size_text(report.stored_nbytes)
        print(f"{paint('published', 'green')}: version {number}: {there}: {size}, {seconds:.1f} s")
    return 0


def _loaded(source: str, only: list[str]) -> tuple[int | None, object]:
    """Return the step and the weights of a checkpoint, or of files of another program."""
    from ..storage.api import load

    try:
        with open_checkpoint(source) as checkpoint:
            step = checkpoint.step
    except (NotACheckpointError, StorageError):
        copy = f"memory://push-{secrets.token_hex(8)}"
        import_(source, copy, only=only)
        try:
            return None, {KEY: load(copy)}
        finally:
            remove(copy)
    if not only:
        return step, load(source)
    if len(only) > 1:
        raise UsageError("of a checkpoint, one part is published", advice="Give --only once.")
    return step, {KEY: load(source, only=only[0])}
