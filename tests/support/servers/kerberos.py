"""A Kerberos realm on the loopback: a KDC, keytabs and tickets, all below one folder.

``make test-servers`` installs the programs into ``.servers/kerberos``. Nothing outside of the
folder is configured. A process uses the realm if it is started with :meth:`Kdc.environment`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from support.servers.daemon import INSTALLED, Daemon, output_of
from support.servers.ports import free_port

REALM = "HOLDFAST.TEST"

CLIENTS = """[libdefaults]
default_realm = {realm}
dns_lookup_kdc = false
dns_lookup_realm = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{realm} = {{
  kdc = 127.0.0.1:{port}
}}
"""

SERVER = """[kdcdefaults]
kdc_listen = 127.0.0.1:{port}
kdc_tcp_listen = 127.0.0.1:{port}
[realms]
{realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  max_life = 1d
  max_renewable_life = 7d
  supported_enctypes = aes128-cts:normal
}}
[dbmodules]
db_module_dir = {modules}
"""


def find_kerberos() -> Path | None:
    """Return the folder of its programs, if they are installed."""
    folder = INSTALLED / "kerberos"
    return folder if (folder / "usr/sbin/krb5kdc").exists() else None


@dataclass
class Kdc:
    """A realm whose files are below ``folder``. ``start`` it, add principals, get tickets, ``stop``
    it."""

    folder: Path
    _daemon: Daemon | None = None
    _port: int = field(default_factory=free_port)

    @property
    def config(self) -> Path:
        """The ``krb5.conf`` of clients."""
        return self.folder / "krb5.conf"

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Return a client's variables; without ``cache`` it has no ticket."""
        return {
            "KRB5_CONFIG": str(self.config),
            "KRB5CCNAME": f"FILE:{cache or self.folder / 'no-cache'}",
            "KRB5_CLIENT_KTNAME": f"FILE:{self.folder / 'no-keytab'}",
            "LD_LIBRARY_PATH": str(self._libraries()),
        }

    def start(self) -> None:
        """Make the realm and boot its KDC. Raises RuntimeError if it does not come up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(CLIENTS.format(realm=REALM, port=self._port))
        modules = self._libraries() / "krb5/plugins/kdb"
        server = SERVER.format(realm=REALM, port=self._port, folder=self.folder, modules=modules)
        (self.folder / "kdc.conf").write_text(server)
        self._run("usr/sbin/kdb5_util", "create", "-s", "-P", "for tests")
        self._daemon = Daemon(
            [self._program("usr/sbin/krb5kdc"), "-n", "-P", self.folder / "kdc.pid"],
            port=self._port,
            log=self.folder / "kdc.log",
            environment=self._server_environment(),
        )
        self._daemon.start()

    def stop(self) -> None:
        """End the KDC."""
        if self._daemon is not None:
            self._daemon.stop()

    def keytab(self, name: str, *principals: str) -> Path:
        """Add principals, ``user`` or ``service/host``, with keys in the keytab of this name."""
        path = self.folder / f"{name}.keytab"
        for principal in principals:
            self._run("usr/sbin/kadmin.local", "-q", f"addprinc -randkey {principal}")
            self._run("usr/sbin/kadmin.local", "-q", f"ktadd -k {path} {principal}")
        return path

    def ticket(self, principal: str, keytab: Path) -> Path:
        """Return a cache with a ticket of ``principal``, who must have been added."""
        cache = self.folder / f"{principal.replace('/', '_')}.cache"
        self._run("usr/bin/kinit", "-k", "-t", str(keytab), "-c", f"FILE:{cache}", principal)
        return cache

    def _run(self, program: str, *words: str) -> None:
        command = [self._program(program), *words]
        output_of(f"{program} {words}", command, self._server_environment())

    def _server_environment(self) -> dict[str, str]:
        return {**self.environment(), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf")}

    def _program(self, name: str) -> str:
        return str(self._root() / name)

    def _libraries(self) -> Path:
        return next((self._root() / "usr/lib").glob("*/libkrb5.so.3")).parent

    def _root(self) -> Path:
        root = find_kerberos()
        if root is None:
            raise RuntimeError("Kerberos is not installed: make test-servers")
        return root
