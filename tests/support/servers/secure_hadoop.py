"""A real HDFS that requires Kerberos tickets, with its own realm: see :mod:`hadoop` and
:mod:`kerberos`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from support.servers.hadoop import Hadoop
from support.servers.kerberos import REALM, Kdc

HOST = "localhost"

Protection = Literal["authentication", "integrity", "privacy"]


class _Servers(Hadoop):
    """Servers whose web pages require tickets, so that their logs must tell whether they are up."""

    def _live(self, name: str) -> int:
        up = "Quota initialization completed" in (self.folder / f"{name}.log").read_text(
            errors="replace"
        )
        return self.datanodes if up else -1


class SecureHadoop:
    """A name node and DataNodes in secure mode. Users are ``alice``, who owns the root, and
    ``bob``."""

    def __init__(
        self, folder: Path, protection: Protection = "authentication", datanodes: int = 2
    ) -> None:
        """``protection``: protection of data sent to the name node and DataNodes."""
        self.folder = folder
        self.kdc = Kdc(folder / "kdc")
        self.keytab = folder / "kdc/users.keytab"
        self.hadoop = _Servers(
            folder / "hadoop",
            datanodes=datanodes,
            host=HOST,
            java=(f"-Djava.security.krb5.conf={self.kdc.config}",),
            extra=self._properties(protection),
        )

    @property
    def conf(self) -> Path:
        """The folder of ``core-site.xml`` and ``hdfs-site.xml``, for clients."""
        return self.hadoop.folder / "conf/client"

    def at(self, path: str) -> str:
        """Return the URI of a folder."""
        return self.hadoop.at(path)

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Return a client's variables; without ``cache`` it has no ticket."""
        return self.kdc.environment(cache) | {"HADOOP_CONF_DIR": str(self.conf)}

    def ticket(self, user: str = "alice") -> Path:
        """Return a cache with a ticket of a user."""
        return self.kdc.ticket(user, self.keytab)

    def token(self, path: Path) -> Path:
        """Write a delegation token of alice's to a file, as ``hdfs fetchdt`` does."""
        self._fetcher("--renewer", "alice", str(path))
        return path

    def cancel(self, token: Path) -> None:
        """Make the name node forget a token."""
        self._fetcher("--cancel", str(token))

    def _fetcher(self, *words: str) -> None:
        environment = {"KRB5CCNAME": str(self.ticket())}
        self.hadoop.run(
            "client",
            "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher",
            *words,
            environment=environment,
        )

    def start(self) -> None:
        """Boot the realm, then the servers."""
        self.hadoop.folder.mkdir(parents=True)
        self.kdc.start()
        try:
            self.kdc.keytab("servers", f"nn/{HOST}", f"dn/{HOST}", f"HTTP/{HOST}")
            self.kdc.keytab("users", "alice", "bob")
            self.hadoop.start()
            self._open_root()
        except BaseException:
            self.kdc.stop()
            raise

    def stop(self) -> None:
        """End everything."""
        self.hadoop.stop()
        self.kdc.stop()

    def _open_root(self) -> None:
        """Let everybody create folders below the root, which belongs to the name node's own
        principal."""
        cache = self.kdc.ticket(f"nn/{HOST}", self.kdc.folder / "servers.keytab")
        program = (
            f"import hdfs_native; "
            f"hdfs_native.Client('hdfs://{self.hadoop.address}').set_permission('/', 0o1777)"
        )
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | self.environment(cache),
            check=True,
            timeout=60,
        )

    def _properties(self, protection: Protection) -> dict[str, object]:
        keytab = self.kdc.folder / "servers.keytab"
        found: dict[str, object] = {
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            "hadoop.rpc.protection": protection,
            "dfs.data.transfer.protection": protection,
            "dfs.block.access.token.enable": "true",
            # otherwise DataNodes require ports below 1024, or HTTPS
            "ignore.secure.ports.for.testing": "true",
            "dfs.permissions.superusergroup": "nobody-is-in-it",
            "dfs.cluster.administrators": "alice",
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": f"HTTP/{HOST}@{REALM}",
            "hadoop.http.authentication.kerberos.keytab": keytab,
            "dfs.web.authentication.kerberos.principal": f"HTTP/{HOST}@{REALM}",
            "dfs.web.authentication.kerberos.keytab": keytab,
        }
        for role, short in (("namenode", "nn"), ("datanode", "dn")):
            found[f"dfs.{role}.kerberos.principal"] = f"{short}/{HOST}@{REALM}"
            found[f"dfs.{role}.keytab.file"] = keytab
        return found
