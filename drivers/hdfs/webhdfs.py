"""CONCAT, which hdfs-native lacks, through WebHDFS: one small HTTP request to a name node.

A request is authenticated by a delegation token, by name, or by a Kerberos ticket where the name
node asks for one. Where WebHDFS is switched off, there is no ticket, or it refuses (an encryption
zone, an erasure-coded folder, a snapshot), :meth:`WebHdfs.concat` says so, and the parts of an
upload are joined by copying.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from ..calls import run
from .spnego import NoTicket, negotiate_token

__all__ = ["ConcatRefused", "WebHdfs"]

_ANSWER_NBYTES_MAX = 64 << 10
_REASON_MAX = 300


class ConcatRefused(Exception):
    """No name node did it; the message says why, one reason for each."""


class WebHdfs:
    """The name nodes' HTTP addresses, ``http://host:port`` or ``https://host:port``."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        *,
        moved: tuple[str, str] = ("", ""),
        delegation: str | None = None,
    ) -> None:
        """``moved``: the folder at whose place, the second one, the name nodes know what lies below
        the first one. ``delegation``: a token that authenticates the requests."""
        self.addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._moved = moved
        self._delegation = delegation

    async def concat(self, target: str, sources: Sequence[str], user: str) -> None:
        """Append the files ``sources`` to ``target``, in order; they are gone afterwards. All lie
        in one folder.

        Atomic on the name node, and moves no data. Raises ConcatRefused; then it may still have
        happened where an answer was lost.
        """
        if any("," in path for path in sources):
            raise ConcatRefused("a path with a comma cannot be named in a request")
        names = quote(",".join(map(self._at_server, sources)), safe="/,")
        path = f"/webhdfs/v1{quote(self._at_server(target))}?op=CONCAT&sources={names}"
        reasons = []
        for address in self.addresses:  # the first may be a standby, which refuses
            try:
                answer = await self._answer_of(address, path, user)
            except NoTicket as error:
                reasons.append(f"{address} asks for a Kerberos ticket: {error}")
                continue
            except TimeoutError:
                reasons.append(f"{address}: no answer for {self._timeout_s:g} s")
                continue
            except http.client.HTTPException as error:
                reasons.append(f"{address}: the answer is no HTTP: {error!r}"[:_REASON_MAX])
                continue
            except (OSError, ValueError) as error:
                reasons.append(f"{address}: {str(error) or type(error).__name__}")
                continue
            if answer.status == 200:
                return
            reasons.append(f"{address} answered {answer.status}: {answer.reason}")
        raise ConcatRefused("; ".join(reasons) or "no address of WebHDFS is known")

    def _at_server(self, path: str) -> str:
        old, new = self._moved
        return new + path.removeprefix(old)

    async def _answer_of(self, address: str, path: str, user: str) -> _Answer:
        """Raises what :meth:`_ask` raises, and TimeoutError at the deadline."""
        return await run(lambda call: self._ask(address, path, user), self._timeout_s)

    def _ask(self, address: str, path: str, user: str) -> _Answer:
        """Ask with a delegation token; without one, as ``user``, and then with a Kerberos ticket if
        the server asks for one. Blocks. Raises NoTicket and what :meth:`_post` raises."""
        if self._delegation is not None:
            return self._post(address, f"{path}&delegation={self._delegation}", {})
        answer = self._post(address, f"{path}&user.name={quote(user, safe='')}", {})
        if not answer.asks_for_ticket:
            return answer
        token = base64.b64encode(negotiate_token(urlsplit(address).hostname or "")).decode()
        return self._post(address, path, {"Authorization": f"Negotiate {token}"})

    def _post(self, address: str, path: str, headers: Mapping[str, str]) -> _Answer:
        """Blocks. Raises OSError, HTTPException for what is no HTTP, and ValueError for what is no
        address. A redirect is an answer like any other: it is not followed."""
        parts = urlsplit(address)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=self._timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(
                parts.hostname or "", parts.port, timeout=self._timeout_s
            )
        with contextlib.closing(connection):
            connection.request("POST", path, headers={"Connection": "close", **headers})
            response = connection.getresponse()
            asked = response.headers.get_all("WWW-Authenticate", [])
            body = response.read(_ANSWER_NBYTES_MAX).decode(errors="replace").strip()
            return _Answer(response.status, response.reason, tuple(asked), body)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    phrase: str
    authenticate: tuple[str, ...]
    """The ways to authenticate that a refusal offers."""
    body: str

    @property
    def asks_for_ticket(self) -> bool:
        offered = (way.lower().startswith("negotiate") for way in self.authenticate)
        return self.status == 401 and any(offered)

    @property
    def reason(self) -> str:
        """WebHDFS explains itself in JSON; a page is for people with browsers."""
        if self.body and not self.body.startswith("<"):
            return self.body[:_REASON_MAX]
        return self.phrase
