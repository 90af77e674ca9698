"""Labels: what is known of the image that a slot holds. Written last, so an image with a label is
whole.

The bytes of a label are a line of JSON, an array that :mod:`..ranks.messages` describes, and the
contents of its fields of bytes; then an xxh3-128 digest of all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...core.units import ceil_div
from ...errors import CoordinationError, DamagedError
from ...planner.image import DIGEST_NBYTES, PAGE_NBYTES
from ..format.digest import digest
from ..format.fragment import Fragment, decode_fragment
from ..format.manifest import image_key
from ..format.tables import ImageTable
from ..ranks.messages import codec

__all__ = ["LABEL_NBYTES_MAX", "GenerationId", "Label", "check_sizes"]

LABEL_NBYTES_MAX = 1 << 30
_NO_TIME = "19700101T000000"


@dataclass(frozen=True, slots=True, order=True)
class GenerationId:
    """One step of a job in memory. Each resume begins an epoch; steps grow within one."""

    epoch: int
    step: int

    @property
    def attempt(self) -> str:
        """The id of the attempt that a manifest of this generation names: it follows from epoch and
        step, so that no rank has to be asked for it."""
        return f"{_NO_TIME}-{digest(f'{self.epoch}/{self.step}'.encode())[:4].hex()}"


@dataclass(frozen=True)
class Label:
    """What is known of one image in memory.

    ``run``: the id of the run. ``nbytes``: of the image's file, of which ``hashed_end`` bytes are
    hashed in chunks of ``chunk_nbytes``. ``accord``: the plan by which ranks have divided the
    writing among them, "" for a rank without peers; ``equal``: digests of what has to be equal on
    the ranks of a group, by the group's name. ``host``: the host that it was captured on.
    ``draft``: the rank's fragment of the manifest, without its image. ``digests``: 16 bytes for
    each chunk; none where the rank has no shard, and so no image.
    """

    run: str
    generation: GenerationId
    rank: int
    world: int
    nbytes: int
    hashed_end: int
    chunk_nbytes: int
    block_nbytes: int
    created_s: float
    accord: str = ""
    equal: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    draft: bytes = b""
    digests: bytes = b""

    @property
    def key(self) -> str:
        """The key of the image in a checkpoint of this generation."""
        return image_key(self.generation.attempt, self.rank)

    def encode(self) -> bytes:
        """The bytes of the label."""
        body = codec(Label).encode(self)
        return body + digest(body)

    @classmethod
    def decode(cls, data: bytes) -> Label:
        """The inverse of :meth:`encode`. Raises DamagedError."""
        body = data[:-DIGEST_NBYTES]
        if digest(body) != data[-DIGEST_NBYTES:]:
            raise DamagedError("a label does not match its own checksum")
        try:
            return codec(Label).decode(body, "a label")
        except CoordinationError as error:
            raise DamagedError(f"a label is malformed: {error.message}") from error

    def fragment(self, attempt: str | None = None, stored_nbytes: int | None = None) -> Fragment:
        """The rank's fragment of a manifest, with its image. ``attempt``: the attempt that the
        image is a part of, if it is not that of the generation; ``stored_nbytes``: the size of its
        file, if it is compressed. Raises DamagedError."""
        draft = decode_fragment(self.draft, "the draft of a label", {})
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        count = int(len(digests) > 0)
        stored = None
        if stored_nbytes is not None:
            stored = np.full(count, stored_nbytes, np.int64)
        rank = np.full(count, self.rank, np.int64)
        hashed = np.full(count, self.hashed_end, np.int64)
        images = ImageTable(rank, hashed, digests, stored)
        head = (attempt or self.generation.attempt, self.generation.step, self.created_s)
        return replace(draft, head=head, groups=[replace(g, images=images) for g in draft.groups])


def check_sizes(label: Label) -> None:
    """Raise DamagedError where the sizes that a label tells cannot be those of an image: whoever
    hashes it would leave its memory."""
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
