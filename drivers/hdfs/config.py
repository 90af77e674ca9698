"""What Hadoop's own configuration says of name nodes: for WebHDFS, and for name services given in a URI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["name_service", "site", "web_addresses"]

_WEB_PORT = 9870


def site(conf_dir: str | None) -> dict[str, str]:
    """The properties in ``core-site.xml`` and ``hdfs-site.xml`` of ``conf_dir``, else of HADOOP_CONF_DIR, else of
    HADOOP_HOME; empty where there are none. Raises OSError, and ElementTree.ParseError."""
    home = os.environ.get("HADOOP_HOME")
    folder = conf_dir or os.environ.get("HADOOP_CONF_DIR") or (home and f"{home}/etc/hadoop")
    found: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        file = Path(folder, name) if folder else None
        if file is not None and file.is_file():
            for entry in ElementTree.parse(file).iter("property"):
                key, value = entry.findtext("name"), entry.findtext("value")
                if key and value:
                    found[key.strip()] = value.strip()
    return found


def name_service(name: str, namenodes: list[str]) -> dict[str, str]:
    """The properties that make ``name`` stand for these name nodes, each ``host:port``."""
    ids = [f"nn{n}" for n in range(len(namenodes))]
    addresses = {f"dfs.namenode.rpc-address.{name}.{i}": address for i, address in zip(ids, namenodes, strict=True)}
    return {"dfs.nameservices": name, f"dfs.ha.namenodes.{name}": ",".join(ids), **addresses}


def web_addresses(authority: str, properties: Mapping[str, str]) -> list[str]:
    """Where the name nodes of ``authority`` answer HTTP, ``http://host:port``: as configured, else at Hadoop's own port."""
    ids = [i.strip() for i in properties.get(f"dfs.ha.namenodes.{authority}", "").split(",") if i.strip()]
    suffixes = [f".{authority}.{i}" for i in ids] or [""]
    policy = properties.get("dfs.http.policy", "HTTP_ONLY")
    scheme, key = ("https", "https") if policy == "HTTPS_ONLY" else ("http", "http")
    found = [properties.get(f"dfs.namenode.{key}-address{suffix}") for suffix in suffixes]
    rpc = [properties.get(f"dfs.namenode.rpc-address{suffix}", authority) for suffix in suffixes]
    hosts = [address.rpartition(":")[0] or address for address in rpc]
    return [
        f"{scheme}://{_reachable(web, host) if web else f'{host}:{_WEB_PORT}'}"
        for web, host in zip(found, hosts, strict=True)
    ]


def _reachable(address: str, host: str) -> str:
    """``0.0.0.0`` is where a server listens; it is reached at its host."""
    return address.replace("0.0.0.0", host, 1) if address.startswith("0.0.0.0:") else address
