"""Kubernetes manifests: the complete ones in docs/examples/kubernetes, and the YAML of the how-to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import yaml
from support.documents import ROOT

import holdfast
from holdfast.cli.app import command_parser
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE
from holdfast.storage.keeper.process import TOKEN_VARIABLE

PAGE = ROOT / "docs/how-to/run-on-kubernetes.md"
FILES = sorted((ROOT / "docs/examples/kubernetes").glob("*.yaml"))
MANIFESTS = {file.name: list(yaml.safe_load_all(file.read_text())) for file in FILES}
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\$\((\w+)\)")
FIELDS = {"spec.nodeName": "node-7", "status.hostIP": "10.0.0.7", "status.podIP": "10.1.0.7"}
"""Fields of the downward API, with an example of each."""


def pods_in(part: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod's spec in a manifest."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        for value in part.values():
            yield from pods_in(value)
    elif isinstance(part, list):
        for value in part:
            yield from pods_in(value)


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod."""
    return [*pod.get("initContainers", []), *pod["containers"]]


PODS = [(name, pod) for name, parts in MANIFESTS.items() for pod in pods_in(parts)]
CONTAINERS = [
    pytest.param(pod, container, id=f"{name}: {container['name']}")
    for name, pod in PODS
    for container in containers_of(pod)
]
KEEPERS = [one for one in CONTAINERS if one.values[1]["command"][0] == "holdfast"]


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container, with an example for each value from elsewhere."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = FIELDS[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"].keys() == {"name", "key"}
            found[variable["name"]] = "secret"
        else:
            found[variable["name"]] = variable["value"]
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_say_what_they_are(name: str) -> None:
    """Each document has its version, its kind and a name, and selects the pods that it creates."""
    for document in MANIFESTS[name]:
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert re.fullmatch(r"[a-z][a-z0-9-]*", document["metadata"]["name"])
        assert list(pods_in(document))
        if document["kind"] == "DaemonSet":
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert labels == document["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_containers_fit_their_pod(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Commands are lists, mounted volumes exist, and Holdfast knows its variables."""
    assert container["image"]
    command = container["command"]
    assert isinstance(command, list)
    assert all(isinstance(word, str) for word in command)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() <= {volume["name"] for volume in pod["volumes"]}
    environment = environment_of(container)
    ours = {name for name in environment if name.startswith("HOLDFAST_")}
    assert ours <= {KEEPER_DIR_VARIABLE, TOKEN_VARIABLE}
    if ours:
        assert environment[KEEPER_DIR_VARIABLE].startswith(mounts["keepers"] + "/")
    used = {name for word in command for name in VARIABLE.findall(word)}
    assert used <= environment.keys()


@pytest.mark.parametrize(("pod", "container"), KEEPERS)
def test_keepers_take_their_options(pod: object, container: dict[str, Any]) -> None:
    """The command of each keeper is parsed, and its values are valid. A probe fits the port."""
    environment = environment_of(container)
    call = [
        VARIABLE.sub(lambda name: environment[name[1]], word) for word in container["command"][1:]
    ]
    options = vars(command_parser().parse_args(call))
    names = options.keys() & {field.name for field in fields(holdfast.Keeper)}
    keeper = holdfast.Keeper(**{name: options[name] for name in names})
    probe = container.get("startupProbe", {}).get("httpGet")
    if probe is not None:
        assert probe["path"] == "/health"
        assert (keeper.serve or "").endswith(f":{probe['port']}")


def test_keepers_and_trainers_meet() -> None:
    """Containers that use a keeper find the same folder, as the same user."""
    for name in MANIFESTS:
        pods = [pod for of, pod in PODS if of == name]
        containers = [container for pod in pods for container in containers_of(pod)]
        folders = {environment_of(one).get(KEEPER_DIR_VARIABLE) for one in containers} - {None}
        assert len(folders) == 1
        assert len({pod["securityContext"]["runAsUser"] for pod in pods}) == 1
        text = " ".join(str(pod) for pod in pods)
        assert set(re.findall(r"(/keepers/[a-z]+)", text)) == folders


def is_part(part: Any, whole: Any) -> bool:
    """Return whether YAML is an excerpt: keys and elements of lists may be left out."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and is_part(value, whole[key]) for key, value in part.items()
        )
    if isinstance(part, list) and all(isinstance(one, dict) for one in part):
        return isinstance(whole, list) and all(any(is_part(a, b) for b in whole) for a in part)
    return bool(part == whole)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_the_page_are_excerpts(block: str) -> None:
    """Each block is part of a pod's spec in a complete manifest."""
    wanted = yaml.safe_load(block)
    assert wanted.keys() == {"spec"}
    assert any(is_part(wanted["spec"], pod) for _, pod in PODS), block


def test_every_manifest_is_linked() -> None:
    """The page links each manifest."""
    assert len(BLOCKS) >= 3
    assert [file.name for file in FILES if f"kubernetes/{file.name})" not in PAGE.read_text()] == []
