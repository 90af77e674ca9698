"""Translation of errors from botocore into Holdfast's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import StorageDownError, StorageError
from .errors import translated
from .trust import TRUST


@contextmanager
def aws_failures(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate botocore's errors in the body into a StorageError. ``doing`` starts the message."""
    from botocore.exceptions import BotoCoreError, ClientError, SSLError

    try:
        yield
    except ClientError as error:
        code = error.response["Error"]["Code"]
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        answer = RuntimeError(f"<Code>{code}</Code> status {status}")
        raise translated(answer, doing, uri, key) from error
    except SSLError as error:
        message = f"{doing} failed: the server's certificate is not trusted: {error}"
        raise StorageError(message, uri=uri, key=key, advice=TRUST) from error
    except BotoCoreError as error:
        raise StorageDownError(f"{doing} failed: {error}", uri=uri, key=key) from error
