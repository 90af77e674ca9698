"""A real S3 server: Ceph's radosgw on a free port of the loopback, with a monitor and one object store.

``make test-servers`` installs it (``.servers/ceph``), or it is installed on the host. Nothing
outside of its folder is configured, and its processes are stopped by their ids.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.servers.daemon import DIES_WITH_US, INSTALLED, output_of
from support.servers.ports import free_port, listens

BOOT_S = 90.0
DISK_NBYTES = 12 << 30
"""Size of a sparse file."""

CONFIG = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_type = async+posix
ms_mon_client_mode = crc secure
auth_allow_insecure_global_id_reclaim = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
run_dir = {folder}/run
admin_socket =
log_file = {folder}/log/$name.log
mon_cluster_log_file = {folder}/log/cluster.log
crash_dir = {folder}/log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 2000
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
osd_class_dir = {libraries}/rados-classes
[mon]
mon_data = {folder}/mon
mon_data_avail_warn = 1
mon_data_avail_crit = 1
mon_osd_full_ratio = 0.99
mon_osd_backfillfull_ratio = 0.98
mon_osd_nearfull_ratio = 0.97
[osd]
osd_data = {folder}/osd
osd_objectstore = bluestore
osd_heartbeat_addr = 127.0.0.1
bluestore_block_create = true
bluestore_block_size = {disk_nbytes}
bluestore_fsck_on_mount = false
osd_memory_target = 1073741824
osd_class_load_list = *
osd_class_default_list = *
osd_mclock_skip_benchmark = true
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
{extra}
"""


@dataclass(frozen=True, slots=True)
class _Ceph:
    """Folders of Ceph's programs and libraries."""

    programs: Path
    libraries: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Return the environment for its programs."""
        system = self.programs.parents[1] / "lib" / self.libraries.name
        paths = [str(self.libraries), str(self.libraries / "ceph"), str(system)]
        return os.environ | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(paths),
            "PYTHONPATH": str(self.python),
        }


def find_ceph() -> _Ceph | None:
    """Return Ceph, if all required parts are installed."""
    for root in (INSTALLED / "ceph", Path("/")):
        libraries = next(root.glob("usr/lib/*/ceph"), None)
        programs = root / "usr/bin"
        if libraries and all(
            (programs / name).exists()
            for name in ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd")
        ):
            return _Ceph(programs, libraries.parent, root / "usr/lib/python3/dist-packages")
    return None


@dataclass
class Radosgw:
    """A server below ``folder``.

    Its gateway can be killed and restarted between ``start`` and ``stop``. ``extra`` is added to
    the gateway's section of the configuration.
    """

    folder: Path
    extra: str = ""
    access_key: str = "test"
    secret_key: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)
    port: int = field(default_factory=free_port)
    _mon_port: int = field(default_factory=free_port)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """URI of the bucket."""
        return f"s3://holdfast?endpoint={self.endpoint}"

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

    def client(self) -> Any:
        """Return a botocore client, independent of the driver under test."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 5}),
        )

    def start(self) -> None:
        """Boot it. Raises RuntimeError, with the end of its logs, if it does not come up."""
        for name in ("mon", "osd", "rgw", "log", "run"):
            (self.folder / name).mkdir(parents=True)
        try:
            self._boot()
        except BaseException:
            self.stop()
            raise

    def _boot(self) -> None:
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        ceph = self._ceph
        self._config.write_text(
            CONFIG.format(
                fsid=fsid,
                folder=self.folder,
                mon_port=self._mon_port,
                port=self.port,
                extra=self.extra,
                disk_nbytes=DISK_NBYTES,
                libraries=ceph.libraries,
            )
        )
        monmap = str(self.folder / "monmap")
        self.run(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v2:127.0.0.1:{self._mon_port}]",
            monmap,
        )
        self.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        self._spawn("mon", "ceph-mon", "-i", "a", "-f")
        self.admin("osd", "new", osd)
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("osd", "ceph-osd", "-i", "0", "-f")
        self._until("the object store", lambda: " 1 up" in self.admin("osd", "stat"))
        self.admin("osd", "pool", "create", "default.rgw.buckets.data", "32", "32")
        self.admin("osd", "pool", "application", "enable", "default.rgw.buckets.data", "rgw")
        keys = ("--access-key", self.access_key, "--secret-key", self.secret_key)
        self.rgw_admin("user", "create", "--uid=test", "--display-name=test", *keys)
        self.start_gateway()
        self.client().create_bucket(Bucket="holdfast")

    def start_gateway(self) -> None:
        """Start the gateway, and wait until it listens."""
        self._spawn("rgw", "radosgw", "-n", "client.rgw", "-f")
        self._until("the gateway", lambda: listens(self.port))

    def kill_gateway(self) -> None:
        """Kill the gateway, as a crash would."""
        self._end("rgw", signal.SIGKILL)

    def rgw_admin(self, *words: str) -> str:
        """Run a command of radosgw-admin and return its output."""
        return self.run("radosgw-admin", "-n", "client.rgw", *words)

    def stop(self) -> None:
        """End all processes."""
        for name in reversed(tuple(self._running)):
            self._end(name, signal.SIGTERM if name == "mon" else signal.SIGKILL)

    def admin(self, *words: str) -> str:
        """Run a command of the cluster, a script for the host's own Python."""
        return self.run(
            str(self._ceph.programs / "ceph"), "--connect-timeout", "20", *words, script=True
        )

    def run(self, program: str, *words: str, script: bool = False) -> str:
        """Return the output of a Ceph program. Raises RuntimeError if it fails."""
        command = [
            *(["/usr/bin/python3"] if script else []),
            program,
            "-c",
            str(self._config),
            *words,
        ]
        if program == "monmaptool":
            command = [program, *words]
        return output_of(f"{program} {words}", command, self._ceph.environment())

    @property
    def _config(self) -> Path:
        return self.folder / "ceph.conf"

    @property
    def _ceph(self) -> _Ceph:
        found = find_ceph()
        if found is None:
            raise RuntimeError("Ceph is not installed: make test-servers")
        return found

    def _spawn(self, name: str, program: str, *words: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            self._running[name] = subprocess.Popen(
                [*DIES_WITH_US, program, "-c", str(self._config), *words],
                env=self._ceph.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def _until(self, what: str, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + BOOT_S
        while not ready():
            dead = [name for name, process in self._running.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline_s:
                raise RuntimeError(f"{what} did not come up; dead: {dead}\n{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        texts = [
            (path.name, path.read_text(errors="replace")[-1500:])
            for path in (self.folder / "log").glob("*.out")
        ]
        return "\n".join(f"== {name}\n{text}" for name, text in texts)
