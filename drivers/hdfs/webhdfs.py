"""CONCAT, which hdfs-native lacks, through WebHDFS: one small HTTP request to a name node.

Who asks is said by a delegation token, by name, or by a Kerberos ticket where the name node asks
for one. Where WebHDFS is switched off, there is no ticket, or it refuses (an encryption zone, an
erasure-coded folder, a snapshot), :meth:`WebHdfs.concat` says so, and the parts of an upload are
joined by copying.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from .calls import run
from .spnego import NoTicket, negotiate_token

__all__ = ["ConcatRefused", "WebHdfs"]

_ANSWER_NBYTES_MAX = 64 << 10


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
        the first one. ``delegation``: a token, which says who asks."""
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
                answer = await asyncio.wait_for(self._ask(address, path, user), self._timeout_s)
            except NoTicket as error:
                reasons.append(f"{address} asks for a Kerberos ticket: {error}")
                continue
            except (OSError, ValueError, TimeoutError) as error:
                reasons.append(f"{address}: {str(error) or type(error).__name__}")
                continue
            if answer.status == 200:
                return
            reasons.append(f"{address} answered {answer.status}: {answer.reason}")
        raise ConcatRefused("; ".join(reasons) or "no address of WebHDFS is known")

    def _at_server(self, path: str) -> str:
        old, new = self._moved
        return new + path.removeprefix(old)

    async def _ask(self, address: str, path: str, user: str) -> _Answer:
        """Ask by a token, or as ``user``, then with a ticket where one is asked for. Raises
        NoTicket, too."""
        if self._delegation is not None:
            return await _post(address, f"{path}&delegation={self._delegation}")
        answer = await _post(address, f"{path}&user.name={quote(user, safe='')}")
        if not answer.asks_for_ticket:
            return answer
        host = urlsplit(address).hostname or ""
        token = await run(lambda call: negotiate_token(host), self._timeout_s)
        return await _post(
            address, path, f"Authorization: Negotiate {base64.b64encode(token).decode()}\r\n"
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    head: str
    body: str

    @property
    def asks_for_ticket(self) -> bool:
        return self.status == 401 and "www-authenticate: negotiate" in self.head.lower()

    @property
    def reason(self) -> str:
        """WebHDFS explains itself in JSON; a page is for people with browsers."""
        if self.body and not self.body.startswith("<"):
            return self.body[:300]
        return self.head.partition("\r\n")[0].partition(" ")[2]


async def _post(address: str, path: str, headers: str = "") -> _Answer:
    """Raises OSError, and ValueError for what is no HTTP."""
    parts = urlsplit(address)
    if parts.scheme == "https":
        secure = ssl.create_default_context()
    else:
        secure = None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=secure)
    try:
        fixed = "Content-Length: 0\r\nConnection: close\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{fixed}{headers}\r\n"
        writer.write(head.encode("ascii"))
        answer = await _all_of(reader)
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    version, _, status = head.partition("\r\n")[0].partition(" ")
    if not version.startswith("HTTP/") or not status[:3].isdecimal():
        raise ValueError("the answer is no HTTP")
    return _Answer(int(status[:3]), head, body.strip())


async def _all_of(reader: asyncio.StreamReader) -> str:
    answer = b""
    while (more := await reader.read(4096)) and len(answer) < _ANSWER_NBYTES_MAX:
        answer += more
    return answer.decode(errors="replace")
