"""One-off requests of a command to a keeper: status and stop."""

from __future__ import annotations

import asyncio
import json
import os

from ...core.decoded_json import Json, object_in
from ...errors import CoordinationError
from .folder import KeeperFolder
from .messages import Done, Message, Status, StatusAsked, Stop, decode, encode
from .sockets import MessageError, connected

__all__ = ["status_of", "stop"]

ANSWER_S = 5.0


def status_of(folder: KeeperFolder) -> dict[str, Json] | None:
    """Return the status of a run's keeper as JSON, or None if no keeper is alive. Raises
    CoordinationError if it does not answer."""
    answer = _answer(folder, StatusAsked())
    if answer is None:
        return None
    if not isinstance(answer, Status):
        raise CoordinationError(f"a keeper has answered with a {type(answer).__name__}")
    try:
        return object_in(json.loads(answer.text), "a status")
    except ValueError as error:
        raise CoordinationError(f"a keeper's status cannot be read: {error}") from error


def stop(folder: KeeperFolder) -> bool:
    """Stop the keeper of a run; return False if none is alive. It finishes its flushes, and
    releases all memory. Raises CoordinationError if it does not answer."""
    answer = _answer(folder, Stop())
    if answer is not None and not isinstance(answer, Done):
        raise CoordinationError(f"a keeper has answered with a {type(answer).__name__}")
    return answer is not None


def _answer(folder: KeeperFolder, request: Message) -> Message | None:
    try:
        return asyncio.run(_asked(folder, request))
    except (FileNotFoundError, ConnectionError):
        return None
    except TimeoutError as error:
        raise CoordinationError(
            f"the keeper at {folder.path} has not answered within {ANSWER_S:g} s"
        ) from error
    except (MessageError, OSError) as error:
        raise CoordinationError(f"the keeper at {folder.path} does not answer: {error}") from error


async def _asked(folder: KeeperFolder, request: Message) -> Message:
    line = connected(folder.socket)
    try:
        if line.peer_uid != os.getuid():
            raise MessageError(f"it belongs to the user {line.peer_uid}")
        async with asyncio.timeout(ANSWER_S):
            await line.send(encode(1, request))
            received = await line.receive()
        received.close()
        return decode(received.data)[1]
    finally:
        line.close()
