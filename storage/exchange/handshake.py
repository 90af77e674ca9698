"""Mutual authentication of two ranks of a job, by a secret that is never sent.

A challenge-response protocol: each side sends a fresh nonce, and gets an HMAC of both nonces under
the secret. The proofs of the two sides differ, so a proof cannot be reflected. The key of the
connection is derived from the same nonces.
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
    """Nonces of a client and a server, and the values derived from them with the secret.
    ``member``: number of the client."""

    secret: bytes
    client_nonce: bytes
    server_nonce: bytes
    member: int

    @property
    def server_proof(self) -> bytes:
        """Proof by the server that it knows the secret."""
        return self._derived(b"server")

    @property
    def client_proof(self) -> bytes:
        """Proof by the client that it knows the secret."""
        return self._derived(b"client")

    @property
    def key(self) -> bytes:
        """Key for the digests of this connection."""
        return self._derived(b"digests")

    def _derived(self, purpose: bytes) -> bytes:
        """Return 32 bytes that are valid for one purpose in this connection only."""
        nonces = self.client_nonce + self.server_nonce + struct.pack("<I", self.member)
        return hmac.digest(self.secret, nonces + purpose, "sha256")
