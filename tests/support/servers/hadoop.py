"""A real HDFS, on free ports of the loopback: DataNodes and one name node, or two, one of them
active.

``make test-servers`` installs it (``.servers/hadoop``). Nothing outside of its folder is
configured, and its processes are stopped by their ids.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.servers.daemon import INSTALLED, output_of
from support.servers.ports import free_port

BOOT_S = 90.0
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
NAME_SERVICE = "holdfast"

JAVA = (
    "java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Djava.net.preferIPv4Stack=true",
    *(f"--add-opens=java.base/{p}=ALL-UNNAMED" for p in ("java.lang", "java.nio", "java.util", "sun.nio.ch")),
)  # fmt: skip

LOGGING = """log4j.rootLogger=INFO,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.target=System.err
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""


def find_hadoop() -> Path | None:
    """Return the folder of its jars, if they and Java are installed."""
    folder = INSTALLED / "hadoop"
    return folder if (folder / "lib/unshaded.jar").exists() and shutil.which("java") else None


@dataclass
class Hadoop:
    """A file system below ``folder``. Between ``start`` and ``stop``, its servers can be killed and
    restarted."""

    folder: Path
    datanodes: int = 2
    """Number of DataNodes. Each file is on two of them, if there are two. With a single copy, the
    name node closes a file only after the DataNode has reported the block, and clients look again
    after half a second."""
    ha: bool = False
    """True if there are two name nodes, the first of them active."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further properties for every server."""
    host: str = "127.0.0.1"
    """Name of this machine in URIs: Kerberos does not know its address."""
    java: tuple[str, ...] = ()
    """Further arguments of Java."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Servers by name: ``nn0``, ``nn1``, ``dn0``, …"""
    _begun: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = ["nn0", "nn1"] if self.ha else ["nn0"]
        self._ports = {name: (free_port(), free_port()) for name in self._names}
        self._data_names = [f"dn{n}" for n in range(self.datanodes)]

    @property
    def uri(self) -> str:
        """URI of the root, or of the name service if there are two name nodes."""
        if not self.ha:
            return f"hdfs://{self.address}/?webhdfs={self.host}:{self._ports['nn0'][1]}"
        return f"hdfs://{NAME_SERVICE}/?conf={self._folder('client')}"

    def at(self, path: str) -> str:
        """Return the URI of a folder."""
        return self.uri.replace("/?", f"/{path}?", 1)

    @property
    def address(self) -> str:
        """``host:port`` of the first name node."""
        return f"{self.host}:{self._ports['nn0'][0]}"

    def environment(self) -> Mapping[str, str]:
        """Return the variables that clients need: none."""
        return {}

    def start(self) -> None:
        """Format and boot. Raises RuntimeError, with the end of a log, if it does not come up."""
        try:
            self._write("client", {})
            for name in self._names:
                self._write(name, {"dfs.namenode.name.dir": f"file://{self.folder}/{name}"})
            self.run("nn0", NAME_NODE, "-format", "-force", "-nonInteractive")
            if self.ha:
                shutil.copytree(self.folder / "nn0", self.folder / "nn1")
            for name in self._names:
                self.begin(name)
            for name in self._data_names:
                anywhere = {
                    f"dfs.datanode.{key}": "127.0.0.1:0"
                    for key in ("address", "ipc.address", "http.address")
                }
                self._write(
                    name, {**anywhere, "dfs.datanode.data.dir": f"file://{self.folder}/{name}"}
                )
                self.begin(name)
            if self.ha:
                self.activate("nn0")
            self.wait()
        except BaseException:
            self.stop()
            raise

    def begin(self, name: str) -> None:
        """Start one server."""
        self._begun[name] = self._begun.get(name, 0) + 1
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                self._command(name, NAME_NODE if name.startswith("nn") else DATA_NODE),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill a server, as a crash would. SIGSTOP makes it a black hole, SIGCONT ends that."""
        self.running[name].send_signal(how)
        if how == signal.SIGKILL:
            self.running.pop(name).wait()

    def activate(self, name: str) -> None:
        """Make a standby name node the active one."""
        self.wait_for_standby(name)
        self._admin(name, "-transitionToActive", "--forceactive", name)
        self._until(name, lambda: self._admin(name, "-getServiceState", name) == "active")

    def wait_for_standby(self, name: str) -> None:
        """Wait until a name node is up as a standby."""
        self._until(name, lambda: self._admin(name, "-getServiceState", name) == "standby")

    def wait(self) -> None:
        """Wait until the first name node has left safe mode and knows all DataNodes."""
        self._until(
            "nn0",
            lambda: (
                self._live("nn0") >= self.datanodes and all(map(self._registered, self._data_names))
            ),
        )

    def stop(self) -> None:
        """End all processes."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def admin(self, *words: str) -> str:
        """Return the output of ``hdfs dfsadmin``."""
        return self.run(
            "client" if self.ha else "nn0", "org.apache.hadoop.hdfs.tools.DFSAdmin", *words
        )

    def _admin(self, name: str, *words: str) -> str:
        try:
            return self.run(name, "org.apache.hadoop.hdfs.tools.DFSHAAdmin", *words).strip()
        except RuntimeError:
            return ""

    def _registered(self, name: str) -> bool:
        """Return whether a running DataNode has registered since its last start."""
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        return (
            name not in self.running
            or log.count("successfully registered with NN") >= self._begun[name]
        )

    def _live(self, name: str) -> int:
        try:
            if self._bean(name, "NameNodeInfo")["Safemode"]:
                return -1
            return int(self._bean(name, "FSNamesystemState")["NumLiveDataNodes"])
        except (OSError, LookupError, ValueError):
            return -1

    def _bean(self, name: str, bean: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._ports[name][1]}/jmx?qry=Hadoop:service=NameNode,name={bean}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["beans"][0]
            return found

    def _until(self, name: str, true: Any) -> None:
        deadline_s = time.monotonic() + BOOT_S
        while not true():
            ended = [other for other, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                log = (self.folder / f"{(ended or [name])[0]}.log").read_text(errors="replace")
                raise RuntimeError(f"{(ended or [name])[0]} does not come up:\n{log[-2000:]}")
            time.sleep(0.1)

    def _folder(self, name: str) -> Path:
        return self.folder / "conf" / name

    def _write(self, name: str, properties: Mapping[str, object]) -> None:
        """Write the configuration of one server, or of clients."""
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        every = self._properties() | dict(properties)
        if name.startswith("nn") and self.ha:
            every["dfs.ha.namenode.id"] = name
        entries = [
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in every.items()
        ]
        for file in (
            "core-site.xml",
            "hdfs-site.xml",
        ):  # write both: otherwise the defaults of the second would override the first
            (folder / file).write_text(f"<configuration>{''.join(entries)}</configuration>")
        (folder / "log4j.properties").write_text(LOGGING)

    def _properties(self) -> dict[str, object]:
        suffix = {name: f".{NAME_SERVICE}.{name}" if self.ha else "" for name in self._names}
        found: dict[str, object] = {
            "fs.defaultFS": f"hdfs://{NAME_SERVICE}" if self.ha else f"hdfs://{self.address}"
        }
        for name, (rpc, http) in self._ports.items():
            found[f"dfs.namenode.rpc-address{suffix[name]}"] = f"{self.host}:{rpc}"
            found[f"dfs.namenode.http-address{suffix[name]}"] = f"{self.host}:{http}"
        if self.ha:
            provider = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            found |= {
                "dfs.nameservices": NAME_SERVICE,
                f"dfs.ha.namenodes.{NAME_SERVICE}": ",".join(self._names),
                f"dfs.client.failover.proxy.provider.{NAME_SERVICE}": provider,
                "dfs.namenode.shared.edits.dir": f"file://{self.folder}/shared",
                "dfs.ha.fencing.methods": "shell(/bin/true)",
                "dfs.ha.tail-edits.period": 1,
            }
        found |= {
            "dfs.replication": min(2, self.datanodes),
            "hadoop.tmp.dir": f"{self.folder}/tmp",
            **self._secret(),
        }
        return found | _QUICK | self.extra

    def _secret(self) -> dict[str, object]:
        file = self.folder / "secret"
        file.write_text("for tests")
        return {"hadoop.http.authentication.signature.secret.file": file}

    def _command(self, name: str, program: str) -> list[str]:
        root = find_hadoop()
        if root is None:
            raise RuntimeError("Hadoop is not installed: make test-servers")
        path = [self._folder(name), root / "webroot", *sorted((root / "lib").glob("*.jar"))]
        return [*JAVA, *self.java, "-cp", os.pathsep.join(map(str, path)), program]

    def run(self, name: str, program: str, *words: str, environment: Mapping[str, str] = {}) -> str:
        """Return the output of a Java program. Raises RuntimeError if it fails."""
        command = [*self._command(name, program), *words]
        return output_of(f"{program} {words}", command, environment)


_QUICK: dict[str, object] = {
    "dfs.heartbeat.interval": 1,
    "dfs.namenode.safemode.extension": 0,
    "dfs.namenode.safemode.threshold-pct": 0,
    "dfs.namenode.heartbeat.recheck-interval": 1000,
    # close a file at once, not when both DataNodes have reported
    "dfs.namenode.file.close.num-committed-allowed": 1,
    # so that a closed file cannot be read at first, unless the driver waits
    "dfs.blockreport.incremental.intervalMsec": 30,
    "dfs.namenode.fs-limits.min-block-size": 4096,
    "dfs.namenode.acls.enabled": "true",
    "dfs.datanode.du.reserved": 0,
    # there is hardly more than one DataNode
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
}
