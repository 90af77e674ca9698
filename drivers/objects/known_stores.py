"""Facts about stores that this process has learned, so that no driver has to ask twice."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class _KnownStores:
    no_bulk_delete: set[tuple[str, ...]] = field(default_factory=set)
    """Containers whose store rejected a bulk delete."""
    no_upload_list: set[tuple[str, str]] = field(default_factory=set)
    """(endpoint, bucket) pairs whose store cannot list unfinished uploads."""
    wrong_dates: set[tuple[str, str]] = field(default_factory=set)
    """(endpoint, bucket) pairs whose store gives unfinished uploads wrong dates."""
    wants_checksum: set[tuple[str, ...]] = field(default_factory=set)
    """Containers that reject objects without a checksum, such as those with Object Lock."""
    regions: dict[str, str] = field(default_factory=dict)
    """AWS regions of buckets, by bucket URL."""
    trusted: set[tuple[str, ...]] = field(default_factory=set)
    """Servers whose certificates are trusted, each with the options used."""

    def forget(self) -> None:
        """Discard everything, so that stores are asked again."""
        for known in fields(self):
            getattr(self, known.name).clear()


KNOWN = _KnownStores()
