"""Labels: metadata of the images in slots. Written last, so an image with a label is complete.

A label is encoded as a line of JSON (an array, see :mod:`..ranks.messages`), the contents of its
byte fields, and the xxh3-128 digest of everything before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...core.units import ceil_div
from ...errors import CoordinationError, DamagedError
from ...planner.image import DIGEST_NBYTES, PAGE_NBYTES
from ..format.digest import digest
from ..format.extents import Extents
from ..format.fragment import Fragment, decode_fragment
from ..format.manifest import image_key
from ..format.tables import ImageTable
from ..ranks.messages import codec

LABEL_NBYTES_MAX = 1 << 30
_NO_TIME = "19700101T000000"


@dataclass(frozen=True, slots=True, order=True)
class GenerationId:
    """One step of a job in memory. Each resume begins an epoch; steps increase within one."""

    epoch: int
    step: int

    @property
    def attempt(self) -> str:
        """Attempt id in the manifest of this generation. Derived from epoch and step, so that no
        rank has to ask for it."""
        return f"{_NO_TIME}-{digest(f'{self.epoch}/{self.step}'.encode())[:4].hex()}"


@dataclass(frozen=True)
class Label:
    """Metadata of one image in memory."""

    run: str
    generation: GenerationId
    rank: int
    world: int
    nbytes: int
    """Size of the image's file."""
    hashed_end: int
    """Bytes [0, hashed_end) are hashed, in chunks of ``chunk_nbytes``."""
    chunk_nbytes: int
    block_nbytes: int
    created_s: float
    agreement: str = ""
    """The plan by which ranks share the writing; "" for a rank without peers."""
    equal: Mapping[str, str] = field(default_factory=dict)
    """Digests of the values that must be equal in a group of ranks, by the name of the group."""
    host: str = ""
    """Host of the capture."""
    draft: bytes = b""
    """The rank's fragment of the manifest, without its image."""
    digests: bytes = b""
    """16 bytes per chunk. Empty if the rank has no shards, and so no image."""

    @property
    def key(self) -> str:
        """Key of the image in a checkpoint of this generation."""
        return image_key(self.generation.attempt, self.rank)

    def encode(self) -> bytes:
        body = codec(Label).encode(self)
        return body + digest(body)

    @classmethod
    def decode(cls, data: bytes) -> Label:
        """Decode the result of :meth:`encode`. Raises DamagedError, also if the label contradicts
        itself."""
        body = data[:-DIGEST_NBYTES]
        if digest(body) != data[-DIGEST_NBYTES:]:
            raise DamagedError("a label does not match its own checksum")
        try:
            label = codec(Label).decode(body, "a label")
        except CoordinationError as error:
            raise DamagedError(f"a label is malformed: {error.message}") from error
        check_sizes(label)
        return label

    def fragment(
        self,
        attempt: str | None = None,
        stored_nbytes: int | None = None,
        extents: Extents | None = None,
    ) -> Fragment:
        """Return the rank's fragment of a manifest, including its image. ``attempt``: the image's
        attempt, by default the generation's own; ``stored_nbytes``: size of the image's file if
        compressed; ``extents``: where its blocks lie, if not in one file. Raises DamagedError."""
        draft = decode_fragment(self.draft, "the draft of a label", {})
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        images = ImageTable.of(self.rank, self.hashed_end, digests, stored_nbytes)
        head = (attempt or self.generation.attempt, self.generation.step, self.created_s)
        return draft.with_image(head, images, extents)


def check_sizes(label: Label) -> None:
    """Raise DamagedError if the sizes in a label are inconsistent; hashing such an image would read
    beyond its memory."""
    sizes = (label.nbytes, label.chunk_nbytes, label.block_nbytes)
    problem = ""
    if min(sizes) < 1 or label.hashed_end < 0 or label.hashed_end % PAGE_NBYTES:
        problem = "sizes"
    elif label.chunk_nbytes % label.block_nbytes or label.block_nbytes % PAGE_NBYTES:
        problem = "chunks"
    elif label.hashed_end:
        blocks = ceil_div(label.hashed_end, label.block_nbytes)
        if label.nbytes != label.hashed_end + DIGEST_NBYTES * blocks:
            problem = "pages"
    if problem:
        raise DamagedError(f"a label contradicts itself: its {problem}")
