"""CONCAT, which hdfs-native lacks, through WebHDFS: one small HTTP request to a name node.

Requests are authenticated by a delegation token, by user name, or by a Kerberos ticket if the name
node requires one. :meth:`WebHdfs.concat` reports failure if WebHDFS is switched off, has no ticket,
or refuses (encryption zone, erasure-coded folder, snapshot). The parts of an upload are then joined
by copying.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlsplit

from ..calls import run
from .authentication import NoTicket, negotiate_token

_ANSWER_NBYTES_MAX = 64 << 10
_REASON_MAX = 300


class ConcatRefused(Exception):
    """No name node performed the request. The message lists one reason per name node."""


class WebHdfs:
    """HTTP addresses of the name nodes, ``http://host:port`` or ``https://host:port``."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        *,
        moved: tuple[str, str] = ("", ""),
        delegation: str | None = None,
    ) -> None:
        """Take the addresses of the name nodes. ``moved`` maps the first folder to the second, its
        path there. ``delegation`` is a token that authenticates requests."""
        self.addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._moved = moved
        self._delegation = delegation

    async def concat(self, target: str, sources: Sequence[str], user: str) -> None:
        """Append the files ``sources`` to ``target``, in order, and remove them. All are in one
        folder.

        Atomic on the name node, and moves no data. Raises ConcatRefused; if an answer was lost, it
        may still have happened.
        """
        if any("," in path for path in sources):
            raise ConcatRefused("a path with a comma cannot be sent in a request")
        names = quote(",".join(map(self._at_server, sources)), safe="/,")
        path = f"/webhdfs/v1{quote(self._at_server(target))}?op=CONCAT&sources={names}"
        reasons = []
        for address in self.addresses:  # the first may be a standby, which refuses
            reason = await self._refusal(address, path, user)
            if reason is None:
                return
            reasons.append(reason)
        raise ConcatRefused("; ".join(reasons) or "no address of WebHDFS is known")

    async def _refusal(self, address: str, path: str, user: str) -> str | None:
        """Send the request to one name node. Return why it was not performed, None if it was."""
        try:
            answer = await run(lambda call: self._ask(address, path, user), self._timeout_s)
        except NoTicket as error:
            return f"{address} asks for a Kerberos ticket: {error}"
        except TimeoutError:
            return f"{address}: no answer for {self._timeout_s:g} s"
        except http.client.HTTPException as error:
            return f"{address}: the answer is not HTTP: {error!r}"[:_REASON_MAX]
        except (OSError, ValueError) as error:
            return f"{address}: {str(error) or type(error).__name__}"
        if answer.status == 200:
            return None
        return f"{address} answered {answer.status}: {answer.reason}"

    def _at_server(self, path: str) -> str:
        old, new = self._moved
        return new + path.removeprefix(old)

    def _ask(self, address: str, path: str, user: str) -> _Answer:
        """Send the request with a delegation token; without one, as ``user``, and then with a
        Kerberos ticket if the server demands one. Blocks. Raises NoTicket and the errors of
        :meth:`_post`."""
        if self._delegation is not None:
            return self._post(address, f"{path}&delegation={self._delegation}", {})
        answer = self._post(address, f"{path}&user.name={quote(user, safe='')}", {})
        if not answer.asks_for_ticket:
            return answer
        token = base64.b64encode(negotiate_token(urlsplit(address).hostname or "")).decode()
        return self._post(address, path, {"Authorization": f"Negotiate {token}"})

    def _post(self, address: str, path: str, headers: Mapping[str, str]) -> _Answer:
        """Send one POST request. Does not follow redirects. Blocks. Raises OSError, HTTPException
        for a response that is not HTTP, and ValueError for an invalid address."""
        parts = urlsplit(address)
        connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            connect = partial(http.client.HTTPSConnection, context=ssl.create_default_context())
        connection = connect(parts.hostname or "", parts.port, timeout=self._timeout_s)
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
    """Authentication methods offered in a refusal."""
    body: str

    @property
    def asks_for_ticket(self) -> bool:
        offered = (way.lower().startswith("negotiate") for way in self.authenticate)
        return self.status == 401 and any(offered)

    @property
    def reason(self) -> str:
        """The body if WebHDFS explains itself in JSON, else the status phrase; HTML pages are
        skipped."""
        if self.body and not self.body.startswith("<"):
            return self.body[:_REASON_MAX]
        return self.phrase
