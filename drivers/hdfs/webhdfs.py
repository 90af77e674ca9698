"""CONCAT, which hdfs-native lacks, through WebHDFS: one small HTTP request to a name node.

Scope: user names, not Kerberos. Where WebHDFS is switched off, wants Kerberos, or refuses (an encryption zone, an
erasure-coded folder, a snapshot), :meth:`WebHdfs.concat` says so, and the parts of an upload are joined by copying.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

__all__ = ["ConcatRefused", "WebHdfs"]

_ANSWER_NBYTES_MAX = 64 << 10


class ConcatRefused(Exception):
    """No name node did it; the message says why, one reason for each."""


class WebHdfs:
    """The name nodes' HTTP addresses, ``http://host:port`` or ``https://host:port``."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        self._addresses, self._timeout_s = addresses, timeout_s

    async def concat(self, target: str, sources: Sequence[str], user: str) -> None:
        """Append the files ``sources`` to ``target``, in order; they are gone afterwards. All lie in one folder.

        Atomic on the name node, and moves no data. Raises ConcatRefused; then it may still have happened where an
        answer was lost.
        """
        if any("," in path for path in sources):
            raise ConcatRefused("a path with a comma cannot be named in a request")
        names = quote(",".join(sources), safe="/,")
        path = f"/webhdfs/v1{quote(target)}?op=CONCAT&sources={names}&user.name={quote(user, safe='')}"
        reasons = []
        for address in self._addresses:  # the first may be a standby, which refuses
            try:
                status, body = await asyncio.wait_for(_post(address, path), self._timeout_s)
            except (OSError, ValueError, TimeoutError) as error:
                reasons.append(f"{address}: {str(error) or type(error).__name__}")
                continue
            if status == 200:
                return
            reasons.append(f"{address} answered {status}: {body[:300]}")
        raise ConcatRefused("; ".join(reasons) or "no address of WebHDFS is known")


async def _post(address: str, path: str) -> tuple[int, str]:
    """Status and body of the answer. Raises OSError, and ValueError for what is no HTTP."""
    parts = urlsplit(address)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=secure)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        answer = await _all_of(reader)
    finally:
        writer.close()
    version, _, status = answer.partition("\r\n")[0].partition(" ")
    if not version.startswith("HTTP/") or not status[:3].isdecimal():
        raise ValueError("the answer is no HTTP")
    return int(status[:3]), answer.partition("\r\n\r\n")[2].strip()


async def _all_of(reader: asyncio.StreamReader) -> str:
    answer = b""
    while (more := await reader.read(4096)) and len(answer) < _ANSWER_NBYTES_MAX:
        answer += more
    return answer.decode(errors="replace")
