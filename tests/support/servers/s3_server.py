"""What all S3 servers of the tests have in common: how clients reach them, and with which
credentials."""

from __future__ import annotations

import os
from typing import Any

from support.servers.daemon import Daemon

__all__ = ["S3Program", "S3Server"]


class S3Server:
    """Somebody who speaks S3 at ``endpoint``, with a bucket, ``holdfast``."""

    port: int
    """Of the loopback."""
    access_key: str = "test"
    secret_key: str = "secret"

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """What its clients need, and nothing of this host's that they could mistake for it."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, *, attempts: int = 5) -> Any:
        """Another client than the one under test."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"}, retries={"total_max_attempts": attempts}
            ),
        )


class S3Program(S3Server):
    """One that is one program."""

    def __init__(self, program: Daemon) -> None:
        self._program = program
        self.port = program.port

    @property
    def uri(self) -> str:
        """Of the bucket."""
        return f"s3://holdfast?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Start it, and make the bucket."""
        self._program.start()
        self.client().create_bucket(Bucket="holdfast")

    def stop(self) -> None:
        """End its process."""
        self._program.stop()
