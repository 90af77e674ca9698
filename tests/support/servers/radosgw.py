"""A real S3 server: Ceph's radosgw, on a cluster of its own and a free port of the loopback."""

from __future__ import annotations

import signal
import uuid
from dataclasses import dataclass, field

from support.servers.ceph import CephCluster, find_ceph
from support.servers.ports import free_port, listens
from support.servers.s3_server import S3Server

__all__ = ["Radosgw", "find_ceph"]

CONFIG = """
[client.rgw]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_enable_usage_log = false
rgw_enable_ops_log = false
rgw_max_chunk_size = 4194304
rgw_obj_stripe_size = 4194304
rgw_put_obj_min_window_size = 33554432
rgw_get_obj_window_size = 33554432
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 5
rgw_gc_processor_max_time = 60
"""


@dataclass
class Radosgw(CephCluster, S3Server):
    """A server below ``folder``.

    Its gateway can be killed and restarted between ``start`` and ``stop``. ``extra`` is added to
    the gateway's section of the configuration.
    """

    access_key: str = "test"
    secret_key: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        """Prepend the gateway's section to the configuration."""
        self.extra = CONFIG.format(folder=self.folder, port=self.port) + self.extra

    def _boot(self) -> None:
        """Boot the cluster and create one user."""
        super()._boot()
        (self.folder / "rgw").mkdir()
        self.admin("osd", "pool", "create", "default.rgw.buckets.data", "32", "32")
        self.admin("osd", "pool", "application", "enable", "default.rgw.buckets.data", "rgw")
        keys = ("--access-key", self.access_key, "--secret-key", self.secret_key)
        self.rgw_admin("user", "create", "--uid=test", "--display-name=test", *keys)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Start the gateway, and wait until it listens."""
        self._spawn("rgw", "radosgw", "-n", "client.rgw", "-f")
        self._until("the gateway", lambda: listens(self.port))

    def kill_gateway(self) -> None:
        """Kill the gateway, as a crash would."""
        self._end("rgw", signal.SIGKILL)

    def rgw_admin(self, *words: str) -> bytes:
        """Run a command of radosgw-admin and return its output."""
        return self.run("radosgw-admin", "-n", "client.rgw", *words)
