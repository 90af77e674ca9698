"""Name node addresses from Hadoop's configuration, for WebHDFS and for name services named in a
URI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

_WEB_PORTS = {"http": 9870, "https": 9871}
_ROUTER_PORT = "8888"
_ROUTER_WEB_PORTS = {"http": 50071, "https": 50072}
_RPC_ADDRESS = "dfs.namenode.rpc-address"
_MOUNT_TABLE = "fs.viewfs.mounttable"


@dataclass(frozen=True, slots=True)
class Served:
    """The server of a folder.

    ``authority``: a name node, ``host:port``, or a name service. ``root``: absolute path of the
    folder there.
    """

    authority: str
    root: str


def site(conf_dir: str | None) -> dict[str, str]:
    """Return the properties in ``core-site.xml`` and ``hdfs-site.xml`` of ``conf_dir``, else
    HADOOP_CONF_DIR, else HADOOP_HOME; empty if neither file exists. Raises OSError and
    ElementTree.ParseError."""
    home = os.environ.get("HADOOP_HOME")
    folder = conf_dir or os.environ.get("HADOOP_CONF_DIR") or (home and f"{home}/etc/hadoop")
    found: dict[str, str] = {}
    if not folder:
        return found
    for name in ("core-site.xml", "hdfs-site.xml"):
        file = Path(folder, name)
        if file.is_file():
            for entry in ElementTree.parse(file).iter("property"):
                key = entry.findtext("name")
                value = entry.findtext("value")
                if key and value:
                    found[key.strip()] = value.strip()
    return found


def name_service(name: str, namenodes: list[str]) -> dict[str, str]:
    """Return properties that define the name service ``name`` with these name nodes, each
    ``host:port``."""
    ids = [f"nn{n}" for n in range(len(namenodes))]
    addresses = {
        f"{_RPC_ADDRESS}.{name}.{i}": address for i, address in zip(ids, namenodes, strict=True)
    }
    return {"dfs.nameservices": name, f"dfs.ha.namenodes.{name}": ",".join(ids), **addresses}


def served(authority: str, root: str, properties: Mapping[str, str]) -> Served | None:
    """Return the server of the folder ``root`` of ``hdfs://authority``, or of ``fs.defaultFS`` if
    ``authority`` is empty.

    Resolves the links of a ViewFS. Returns None if no single name service holds the folder: nothing
    mounts it, several hold parts of it, or ``fs.defaultFS`` is not HDFS.
    """
    if authority:
        return Served(authority, root)
    default = urlsplit(properties.get("fs.defaultFS", ""))
    if default.scheme == "viewfs":
        return _mounted(default.netloc, root, properties)
    if default.scheme == "hdfs" and default.netloc:
        return Served(default.netloc, root)
    return None


def _mounted(table: str, root: str, properties: Mapping[str, str]) -> Served | None:
    """Resolve ``root`` through the longest matching link of a ViewFS mount table, else its fallback
    link. Returns None if there is neither, links lie below ``root``, or the target is not HDFS."""
    prefix = f"{_MOUNT_TABLE}.{table or 'default'}."
    links = {
        key.removeprefix(f"{prefix}link.").rstrip("/"): target
        for key, target in properties.items()
        if key.startswith(f"{prefix}link.")
    }
    folder = root.rstrip("/")
    if any(path.startswith(f"{folder}/") for path in links):
        return None
    above = [path for path in links if folder == path or folder.startswith(f"{path}/")]
    if above:
        path = max(above, key=len)
        target = urlsplit(links[path])
    else:
        path = ""
        target = urlsplit(properties.get(f"{prefix}linkFallback", ""))
    if target.scheme != "hdfs" or not target.netloc:
        return None
    return Served(target.netloc, target.path.rstrip("/") + folder.removeprefix(path) or "/")


def rpc_addresses(authority: str, properties: Mapping[str, str]) -> list[str]:
    """Return ``host:port`` of each name node of ``authority`` with a known port."""
    found = [
        properties.get(_RPC_ADDRESS + suffix, authority)
        for suffix in _suffixes(authority, properties)
    ]
    return [address for address in found if address.rpartition(":")[2].isdecimal()]


def web_addresses(authority: str, properties: Mapping[str, str]) -> list[str]:
    """Return the HTTP addresses (``http://host:port``) of the name nodes of ``authority``: as
    configured, else at Hadoop's default port."""
    secure = properties.get("dfs.http.policy", "HTTP_ONLY") == "HTTPS_ONLY"
    scheme = "https" if secure else "http"
    found = []
    for suffix in _suffixes(authority, properties):
        rpc = properties.get(_RPC_ADDRESS + suffix, authority)
        host, _, port = rpc.rpartition(":")
        host = host or rpc
        ports = _WEB_PORTS
        if port == _ROUTER_PORT:
            ports = _ROUTER_WEB_PORTS
        configured = properties.get(
            f"dfs.namenode.{scheme}-address{suffix}", f"{host}:{ports[scheme]}"
        )
        if configured.startswith("0.0.0.0:"):  # where it listens, not where it is
            configured = configured.replace("0.0.0.0", host, 1)
        found.append(f"{scheme}://{configured}")
    return found


def _suffixes(authority: str, properties: Mapping[str, str]) -> list[str]:
    """Return the suffixes of property names for ``authority``: ``.service.namenode``, ``.service``,
    or "".

    A single name node, ``host:port``, may belong to a name service; then its own suffix is
    returned.
    """
    ids = _words(properties.get(f"dfs.ha.namenodes.{authority}", ""))
    if ids:
        return [f".{authority}.{i}" for i in ids]
    if authority in _words(properties.get("dfs.nameservices", "")):
        return [f".{authority}"]
    for key, value in properties.items():
        if value == authority and key.startswith(f"{_RPC_ADDRESS}."):
            return [key.removeprefix(_RPC_ADDRESS)]
    return [""]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
