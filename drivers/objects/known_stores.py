"""What this process has learnt about stores, so that no driver in it asks a second time."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["KNOWN"]


@dataclass(frozen=True, slots=True)
class _KnownStores:
    no_bulk_delete: set[tuple[str, ...]] = field(default_factory=set)
    """Containers whose store has refused to delete many objects with one request."""
    no_upload_list: set[tuple[str, str]] = field(default_factory=set)
    """(endpoint, bucket) where the list of unfinished uploads is unknown."""
    wrong_dates: set[tuple[str, str]] = field(default_factory=set)
    """(endpoint, bucket) where the dates of unfinished uploads are wrong."""
    wants_checksum: set[tuple[str, ...]] = field(default_factory=set)
    """Containers that take no object without a checksum, as those with Object Lock."""
    regions: dict[str, str] = field(default_factory=dict)
    """The regions of AWS that buckets are in, by the URLs of these."""
    trusted: set[tuple[str, ...]] = field(default_factory=set)
    """Servers whose certificates are trusted, with the options that make them so."""

    def forget(self) -> None:
        """Ask every store anew."""
        self.no_bulk_delete.clear()
        self.no_upload_list.clear()
        self.wrong_dates.clear()
        self.wants_checksum.clear()
        self.regions.clear()
        self.trusted.clear()


KNOWN = _KnownStores()
