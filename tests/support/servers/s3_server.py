"""Base classes of the S3 servers of the tests: endpoint, credentials and client."""

from __future__ import annotations

import os
from typing import Any

from support.servers.daemon import Daemon

__all__ = ["S3Program", "S3Server"]


class S3Server:
    """A server that speaks S3 at ``endpoint``, with a bucket, ``holdfast``."""

    port: int
    """Port on the loopback interface."""
    access_key: str = "test"
    secret_key: str = "secret"

    @property
    def endpoint(self) -> str:
        """URL at which the server listens."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the variables that clients need, and hide the AWS configuration of this host."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, *, attempts: int = 5) -> Any:
        """Return a botocore client, independent of the driver under test."""
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
    """An S3 server that runs as a single process."""

    def __init__(self, program: Daemon) -> None:
        self._program = program
        self.port = program.port

    @property
    def uri(self) -> str:
        """URI of the bucket."""
        return f"s3://holdfast?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Start the server and create the bucket."""
        self._program.start()
        self.client().create_bucket(Bucket="holdfast")

    def stop(self) -> None:
        """Stop the server process."""
        self._program.stop()
