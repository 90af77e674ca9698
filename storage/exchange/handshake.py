"""Mutual authentication of two ranks of one job, by a secret that neither sends.

A challenge-response protocol: each side sends a nonce that it uses once, and gets an HMAC of both
nonces under the secret. The proofs of the two sides differ, so that neither can be reflected; and a
key for this one connection is derived from the same nonces.
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
    """The nonces of a client and of a server, and what can be derived from them with the secret.
    ``member``: the number under which the client connects."""

    secret: bytes
    client_nonce: bytes
    server_nonce: bytes
    member: int

    @property
    def server_proof(self) -> bytes:
        """What the server sends to prove that it knows the secret."""
        return self._derived(b"server")

    @property
    def client_proof(self) -> bytes:
        """What the client sends to prove that it knows the secret."""
        return self._derived(b"client")

    @property
    def key(self) -> bytes:
        """The key of the digests of this connection."""
        return self._derived(b"digests")

    def _derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose, of no use for another one or in another connection."""
        nonces = self.client_nonce + self.server_nonce + struct.pack("<I", self.member)
        return hmac.digest(self.secret, nonces + purpose, "sha256")
