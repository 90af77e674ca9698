"""Stored timings of a save: one small object next to the images.

It is a gzip file of JSON lines: a head, written by the leader, and a record per rank. Each line is
a separate gzip member, so a rank sends its record in stored form (at most ``RECORD_NBYTES_MAX``)
and the leader concatenates records without decoding them. ``docs/reference/format.md`` documents
the fields.

This module only converts between bytes and dataclasses. A checkpoint whose telemetry is missing or
damaged is still complete.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.decoded_json import Json, int_in, ints_in, list_in, number_in, object_in, str_in
from ...core.forks.cached import cached_property
from ...core.histogram import BUCKETS, bucket_of
from ...core.spans import SLOWEST, SlowOperation, StageReport
from ...errors import TelemetryError

RECORD_NBYTES_MAX = 900
"""Largest compressed record of a rank."""
TELEMETRY_NBYTES_MAX = 256 << 20
"""Largest object that readers accept, compressed or not."""

_VERSION = 1
_GZIP = 31
"""zlib's wbits for a gzip container."""
_PIECE_NBYTES = 4 << 10
"""Bytes decompressed at a time. Input after the end of a member is copied, so keep it small."""
_DIGITS = 4
"""Decimal places of times in seconds."""
_DEFAULTS: tuple[Json, ...] = ([], 0, 0, 0, None, 0.0)
"""Values of a stage row's last columns, omitted where equal."""
_COLUMNS_MIN = 7
"""Number of columns before those."""
_WHY_MAX = 200
"""Characters of ``why_whole`` to store."""
_SLOWEST_KEPT = (SLOWEST, 4, 0)
"""Numbers of slowest operations to try to store, until the record fits."""


@dataclass(frozen=True, slots=True)
class RankTelemetry:
    """Timings of one rank in a save, in seconds since the call on that rank.

    ``nbytes``: size of its image; ``stored_nbytes``: size of its file. ``elapsed_s``: time until
    the rank reported to the leader; on rank 0, until the commit. Later work is not recorded. The
    other fields match :class:`~holdfast.SaveReport`.
    """

    rank: int
    nbytes: int
    stored_nbytes: int
    elapsed_s: float
    fenced_s: float
    cpu_s: float
    peak_nbytes: int
    stages: Mapping[str, StageReport]
    slowest: tuple[SlowOperation, ...] = ()
    borrowed_nbytes: int = 0
    why_whole: str = ""


@dataclass(frozen=True)
class SaveTelemetry:
    """Timings recorded while a checkpoint was saved.

    ``attempt``: of the save, also in a copy. ``created_s``: seconds since the epoch. ``seconds``:
    from the call on rank 0 to the commit. ``arrivals``: per round in which rank 0 gathered
    messages, (sender, arrival time) in order of arrival, in seconds since the call on rank 0.
    ``ranks``: by rank, ascending; ranks that recorded nothing are missing.
    """

    attempt: str
    step: int | None
    world: int
    created_s: float
    seconds: float
    arrivals: Mapping[str, Sequence[tuple[int, float]]]
    ranks: Mapping[int, RankTelemetry]

    @property
    def slowest(self) -> tuple[SlowOperation, ...]:
        """The slowest operations of all ranks, slowest first."""
        found = [slow for record in self.ranks.values() for slow in record.slowest]
        return tuple(sorted(found, key=lambda slow: -slow.seconds)[:SLOWEST])

    @cached_property
    def called_s(self) -> Mapping[int, float]:
        """By rank, how much later than the earliest rank it began the save.

        All ranks learn the verdict of a round at about the same time, so a rank that saw it sooner
        after its call was called later. A rank without such a round counts as earliest.
        """
        rounds = {rank: record.stages.get("round agree") for rank, record in self.ranks.items()}
        latest = max((stage.last_s for stage in rounds.values() if stage is not None), default=0.0)
        return {
            rank: 0.0 if stage is None else latest - stage.last_s for rank, stage in rounds.items()
        }


def telemetry_key(attempt: str) -> str:
    """Return the key of an attempt's telemetry. It is moved and deleted with the attempt."""
    return f"data/{attempt}/telemetry.jsonl.gz"


def encode_record(record: RankTelemetry) -> bytes:
    """Encode the record of one rank in at most ``RECORD_NBYTES_MAX`` bytes.

    Drops what does not fit: first the fastest of the slowest operations, then histograms, then the
    shortest stages.
    """
    for kept in _SLOWEST_KEPT:
        data = _record_line(replace(record, slowest=record.slowest[:kept]))
        if len(data) <= RECORD_NBYTES_MAX:
            return data
    bare = {name: replace(stage, histogram=()) for name, stage in record.stages.items()}
    record = replace(record, stages=bare, slowest=())
    while len(data := _record_line(record)) > RECORD_NBYTES_MAX:
        by_length = sorted(record.stages, key=lambda name: record.stages[name].busy_s)
        left_out = set(by_length[: 1 + len(by_length) // 4])
        fewer = {n: stage for n, stage in record.stages.items() if n not in left_out}
        record = replace(record, stages=fewer)
    return data


def encode_head(telemetry: SaveTelemetry) -> bytes:
    """Encode the first line: everything except the records of ranks."""
    return _line(
        {
            "version": _VERSION,
            "attempt": telemetry.attempt,
            "step": telemetry.step,
            "world": telemetry.world,
            "created_s": telemetry.created_s,
            "seconds": round(telemetry.seconds, _DIGITS),
            "arrivals": {
                name: [[rank, round(at_s, _DIGITS)] for rank, at_s in arrived]
                for name, arrived in telemetry.arrivals.items()
            },
        }
    )


def decode_telemetry(data: bytes) -> SaveTelemetry:
    """Decode a head and the records after it. Raises TelemetryError for anything else."""
    try:
        lines = b"".join(_members(data)).splitlines()
        head, *records = [object_in(json.loads(line), "a line") for line in lines]
        ranks = [_record(record) for record in records]
        return _telemetry(head, sorted(ranks, key=lambda record: record.rank))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError, zlib.error) as error:
        raise TelemetryError(
            f"the telemetry of this save cannot be read: {error!r}",
            advice="The checkpoint itself does not depend on it; `holdfast verify` checks that.",
        ) from error


def _line(fields: Mapping[str, object]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")) + "\n"
    packer = zlib.compressobj(wbits=_GZIP)
    return packer.compress(text.encode()) + packer.flush()


def _record_line(record: RankTelemetry) -> bytes:
    return _line(
        {
            **_encoded(record, _RANK),
            **_borrowed(record),
            "stages": [_stage_row(name, stage) for name, stage in record.stages.items()],
            "slowest": [list(_encoded(slow, _SLOW).values()) for slow in record.slowest],
        }
    )


def _borrowed(record: RankTelemetry) -> dict[str, object]:
    fields = {"borrowed_nbytes": record.borrowed_nbytes, "why_whole": record.why_whole[:_WHY_MAX]}
    return {name: value for name, value in fields.items() if value}


def _encoded(item: object, columns: Iterable[str]) -> dict[str, object]:
    """Return these attributes of ``item``, times rounded."""
    values = {name: getattr(item, name) for name in columns}
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in values.items()
    }


def _stage_row(name: str, stage: StageReport) -> list[object]:
    columns = _encoded(stage, _STAGE) | {"histogram": _trimmed(stage)}
    row = [name, *columns.values()]
    while len(row) > _COLUMNS_MIN and row[-1] == _DEFAULTS[len(row) - _COLUMNS_MIN - 1]:
        row.pop()
    return row


def _trimmed(stage: StageReport) -> list[int]:
    """Return the first non-empty bucket of the histogram, then the counts from there.

    Empty for a single operation, whose duration already determines the bucket.
    """
    counted = [i for i, count in enumerate(stage.histogram) if count]
    if not counted or stage.count == 1:
        return []
    first = counted[0]
    return [first, *stage.histogram[first : counted[-1] + 1]]


def _members(data: bytes) -> Iterator[bytes]:
    """Yield the decompressed members of the gzip file, up to ``TELEMETRY_NBYTES_MAX``."""
    view = memoryview(data)
    position = 0
    room = TELEMETRY_NBYTES_MAX
    while position < len(view):
        unpacker = zlib.decompressobj(wbits=_GZIP)
        while not unpacker.eof:
            piece = view[position : position + _PIECE_NBYTES]
            if not piece:
                raise ValueError("it is truncated")
            text = unpacker.decompress(piece, room)
            room -= len(text)
            if room <= 0:
                raise ValueError("it is too large")
            position += len(piece) - len(unpacker.unused_data)
            yield text


def _time_in(value: Json, what: str) -> float:
    seconds = number_in(value, what)
    if not math.isfinite(seconds):
        raise ValueError(f"{what} is no time")
    return seconds


def _optional_int_in(value: Json, what: str) -> int | None:
    return None if value is None else int_in(value, what)


def _counts_in(value: Json, what: str) -> tuple[int, ...]:
    return tuple(ints_in(value, what))


_Reader = Callable[[Json, str], object]
_RANK: Mapping[str, _Reader] = {
    "rank": int_in, "nbytes": int_in, "stored_nbytes": int_in, "elapsed_s": _time_in,
    "fenced_s": _time_in, "cpu_s": _time_in, "peak_nbytes": int_in,
}  # fmt: skip
_STAGE: Mapping[str, _Reader] = {
    "count": int_in, "nbytes": int_in, "first_s": _time_in, "last_s": _time_in,
    "busy_s": _time_in, "seconds": _time_in, "histogram": _counts_in, "queued_max": int_in,
    "retries": int_in, "hedges": int_in, "last_rank": _optional_int_in, "throttled_s": _time_in,
}  # fmt: skip
_SLOW: Mapping[str, _Reader] = {
    "stage": str_in, "key": str_in, "offset": int_in, "nbytes": int_in, "began_s": _time_in,
    "seconds": _time_in,
}  # fmt: skip
"""Stored attributes of ranks, stages and slowest operations, in order, and how to read them."""


def _telemetry(head: Mapping[str, Json], records: Sequence[RankTelemetry]) -> SaveTelemetry:
    version = int_in(head["version"], "version")
    if version != _VERSION:
        raise ValueError(f"its version is {version}, which this release does not know")
    return SaveTelemetry(
        attempt=str_in(head["attempt"], "attempt"),
        step=_optional_int_in(head["step"], "step"),
        world=int_in(head["world"], "world"),
        created_s=_time_in(head["created_s"], "created_s"),
        seconds=_time_in(head["seconds"], "seconds"),
        arrivals={
            name: tuple(_arrival(row) for row in list_in(rows, "arrivals"))
            for name, rows in object_in(head["arrivals"], "arrivals").items()
        },
        ranks={record.rank: record for record in records},
    )


def _arrival(row: Json) -> tuple[int, float]:
    rank, at_s = list_in(row, "an arrival")
    return int_in(rank, "a rank"), _time_in(at_s, "a time")


def _record(record: Mapping[str, Json]) -> RankTelemetry:
    rank = int_in(record["rank"], "rank")
    stages = [_stage(list_in(row, "a stage")) for row in list_in(record["stages"], "stages")]
    slowest = [
        SlowOperation(rank=rank, **_decoded(list_in(row, "a request"), _SLOW))
        for row in list_in(record["slowest"], "slow")
    ]
    figures = _decoded([record[name] for name in _RANK], _RANK)
    figures["borrowed_nbytes"] = int_in(record.get("borrowed_nbytes", 0), "borrowed_nbytes")
    figures["why_whole"] = str_in(record.get("why_whole", ""), "why_whole")
    return RankTelemetry(stages=dict(stages), slowest=tuple(slowest), **figures)


def _decoded(values: Sequence[Json], columns: Mapping[str, _Reader]) -> dict[str, Any]:
    """Invert :func:`_encoded`. Raises ValueError."""
    pairs = zip(columns.items(), values, strict=True)
    return {name: read(value, name) for (name, read), value in pairs}


def _stage(row: Sequence[Json]) -> tuple[str, StageReport]:
    name, *columns = [*row, *_DEFAULTS[max(0, len(row) - _COLUMNS_MIN) :]]
    stage = StageReport(**_decoded(columns, _STAGE))
    histogram = _whole_histogram(stage, stage.histogram)
    return str_in(name, "a stage"), replace(stage, histogram=histogram)


def _whole_histogram(stage: StageReport, counts: Sequence[int]) -> tuple[int, ...]:
    """Invert :func:`_trimmed`; empty if the histogram was left out."""
    whole = [0] * BUCKETS
    if stage.count == 1:
        whole[bucket_of(stage.seconds)] = 1
    elif counts:
        first, *others = counts
        if not 0 <= first <= BUCKETS - len(others):
            raise ValueError("a histogram has too many buckets")
        whole[first : first + len(others)] = others
    else:
        return ()
    return tuple(whole)
