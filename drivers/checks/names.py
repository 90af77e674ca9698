"""Probes of listings and names: prefixes, bulk deletes, and keys with odd characters."""

from __future__ import annotations

from .findings import Kept
from .ground import Ground, Probe, outcome_of

__all__ = ["NAMES"]

_TREE = ("tree/a", "tree/ab", "tree/b/1", "tree/b/2", "tree/b/c/3", "tree/bc")
_MANY = 24
_ODD = (
    "with space",
    "back\\slash",
    "plus+and%25percent",
    "größe-日本",
    "~a!b'c(d)*",
    "a=b&c;d,e",
    "what?#hash",
    "colon:at@",
)


async def _list(ground: Ground) -> Kept:
    for name in _TREE:
        await ground.driver.put(ground.key(name), name.encode())
    for prefix in ("tree", "tree/b", "tree/a", "tree/b/1", "tree/nothing"):
        keys = [
            ground.key(name) for name in _TREE if name == prefix or name.startswith(prefix + "/")
        ]
        await ground.expect_listed(ground.key(prefix), keys, "right after the puts")
    await ground.driver.delete(ground.key("tree/b/1"))
    left = [ground.key(name) for name in _TREE if name != "tree/b/1"]
    await ground.expect_listed(ground.key("tree"), left, "right after a delete")
    return Kept()


async def _delete_all(ground: Ground) -> Kept:
    keys = [ground.key(f"many/{n % 3}/{n}") for n in range(_MANY)]
    spared = ground.key("many-others/0")
    for key in (*keys, spared):
        await ground.driver.put(key, b"many")
    await ground.driver.delete_all(ground.key("many"))
    await ground.expect_listed(
        ground.key("many"), [], f"right after {_MANY} objects were deleted at once"
    )
    await ground.expect(spared, b"many", "after others were deleted")
    return Kept(f"{_MANY} objects")


async def _odd_names(ground: Ground) -> Kept:
    kept: list[str] = []
    refused: list[str] = []
    for n, name in enumerate(_ODD):
        error = await outcome_of(ground.driver.put(ground.key(f"odd/{name}"), b"%d" % n))
        if error is None:
            kept.append(name)
        else:
            refused.append(name)
    for name in kept:
        await ground.expect(
            ground.key(f"odd/{name}"), b"%d" % _ODD.index(name), f"the key has {name!r}, and"
        )
    await ground.expect_listed(
        ground.key("odd"), [ground.key(f"odd/{name}") for name in kept], "of odd names"
    )
    return Kept(f"refused: {', '.join(map(repr, refused))}" if refused else "")


NAMES = (
    Probe(
        "list",
        "list at and below a prefix",
        "leftovers",
        (
            "checkpoints are missing in listings, and leftovers of dead saves are not "
            "found. Saves and loads need no listings"
        ),
        "Expect ls, prune and the clean-up of dead saves to lag, or to miss files.",
        _list,
    ),
    Probe(
        "bulk",
        "delete many objects at once",
        "leftovers",
        "checkpoints cannot be pruned, and failed saves cost money",
        "Does the server support DeleteObjects? Use the driver's option that "
        "switches it off, if it has one (holdfast drivers URI lists options).",
        _delete_all,
    ),
    Probe(
        "odd",
        "keys with odd characters",
        "names",
        "two checkpoints whose names differ in such a character may be confused",
        "Name checkpoints with letters, digits, '-', '_' and '.' only.",
        _odd_names,
    ),
)
