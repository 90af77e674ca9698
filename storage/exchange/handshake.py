"""How two ranks prove to each other that they are ranks of one job: by a secret that neither sends.

Each side sends a challenge, which it uses once, and gets an HMAC of both challenges under the
secret. The two sides' proofs differ, so that neither can be sent back; and a key for this one
connection follows from the same challenges.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

__all__ = ["NONCE_NBYTES", "PROOF_NBYTES", "Handshake"]

NONCE_NBYTES = 16
PROOF_NBYTES = 32


@dataclass(frozen=True)
class Handshake:
    """The challenges of a visitor and of a door, and what follows from them for those who know the
    secret."""

    secret: bytes
    visitor_nonce: bytes
    door_nonce: bytes
    member: int

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose. What one side sends proves nothing for the other, nor in
        another connection."""
        challenges = self.visitor_nonce + self.door_nonce + struct.pack("<I", self.member)
        return hmac.digest(self.secret, challenges + purpose, "sha256")

    @property
    def of_door(self) -> bytes:
        """The door's proof."""
        return self.derived(b"door")

    @property
    def of_visitor(self) -> bytes:
        """The visitor's proof."""
        return self.derived(b"visitor")

    @property
    def key(self) -> bytes:
        """What digests of this connection are made with."""
        return self.derived(b"digests")
