"""Connections between ranks, what they exchange, and forks."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

_STRANGERS = "tests/unit/test_ranks_strangers.py"
_EXCHANGE = "tests/property/test_storage_exchange.py"
_FORKS = "tests/unit/test_forks.py"

MUTANTS = [
    Mutant(
        says="a visitor takes whatever answers for the rank",
        file="storage/exchange/transport.py",
        old="    if not hmac.compare_digest(proof, hands.of_door):\n",
        new="    if False:\n",
        tests=f"{_STRANGERS} -k refused",
    ),
    Mutant(
        says="a door lets in those who do not know its secret",
        file="storage/exchange/transport.py",
        old="        if not hmac.compare_digest(await line.receive(PROOF_NBYTES), hands.of_visitor):\n",
        new="        if not await line.receive(PROOF_NBYTES):\n",
        tests=f"{_STRANGERS} -k repeated",
    ),
    Mutant(
        says="a process of another user is spoken to",
        file="storage/exchange/transport.py",
        old="            if here and line.user() != os.getuid():\n",
        new="            if False:\n",
        tests=f"{_STRANGERS} -k another_user",
    ),
    Mutant(
        says="memory that is handed over may be anybody's",
        file="storage/exchange/transport.py",
        old='    if not hmac.compare_digest(proof, line.digest(b"memory", identity_of(fd))):\n',
        new="    if False:\n",
        tests=f"{_STRANGERS} -k other_memory",
    ),
    Mutant(
        says="memory that can be cut off is looked at",
        file="storage/exchange/shared_memory.py",
        old="            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:\n",
        new="            if False:\n",
        tests=f"{_STRANGERS} -k cut_off",
    ),
    Mutant(
        says="a manifest that was handed on is not compared with its checksum",
        file="storage/exchange/broadcast.py",
        old='    if (await offload(digest, data)).hex() != told["digest"]:\n',
        new="    if False:\n",
        tests=f"{_STRANGERS} -k manifest",
    ),
    Mutant(
        says="what came over a network is not compared with its digest",
        file="storage/exchange/exchange.py",
        old="            if not hmac.compare_digest(digest, told):\n",
        new="            if False:\n",
        tests=f"{_STRANGERS} -k changed_on_the_way",
    ),
    Mutant(
        says="shared memory of an exchange is outside of the budget",
        file="storage/exchange/setup.py",
        old="    return reader.jobs(reads, unit_nbytes)  # each has a buffer, and at most one slot\n",
        new="    return reader.jobs(reads)\n",
        tests=f"{_EXCHANGE} -k budget",
    ),
    Mutant(
        says="copies that a driver holds of what it reads do not count",
        file="storage/runtime/inbox.py",
        old="        self.job_nbytes = chunk_nbytes * (traits.read_copies if self._pool else 1)\n",
        new="        self.job_nbytes = chunk_nbytes\n",
        tests=f"{_EXCHANGE} -k budget",
    ),
    Mutant(
        says="of a unit, a member is handed its first range only",
        file="planner/sharing.py",
        old="stop[np.append(at[1:], len(stop)) - 1] if len(at) else stop\n",
        new="stop[at] if len(at) else stop\n",
        tests=f"{_EXCHANGE} -k handed_all",
    ),
    Mutant(
        says="locks stay held in a forked child",
        file="core/forks/renewal.py",
        old="            held._at_fork_reinit()\n",
        new="            pass\n",
        tests=f"{_FORKS} -k every_lock_free",
    ),
    Mutant(
        says="a fork does not wait for imports",
        file="core/forks/renewal.py",
        old="        if owner is not None and owner != me:\n",
        new="        if False:\n",
        tests=f"{_FORKS} -k until_no_other_thread_imports",
    ),
    Mutant(
        says="a child waits for a save of its parent",
        file="storage/runtime/engine.py",
        old="        if not done and self._pid != os.getpid():\n",
        new="        if False:\n",
        tests=f"{_FORKS} -k told_that_a_save",
    ),
    Mutant(
        "accords of different ids are taken for one",
        "storage/operations/global_plan.py",
        '    if len({other.get("accord") for other in told}) > 1:\n        return False\n',
        "",
        "tests/property/test_storage_accord.py::test_ranks_agree_on_what_they_hold_whatever_was_before",
    ),
    Mutant(
        "accord id without seal and attempt: equal verdicts of other layouts share an id",
        "storage/operations/global_plan.py",
        '        return _packed(body | {"accord": digest(_packed(body | {"seal": self._seal})).hex()})\n',
        '        return _packed(body | {"accord": digest(_packed({k: v for k, v in body.items() if k != "attempt"})).hex()})\n',
        "tests/property/test_storage_accord.py::test_layouts_that_were_never_together_are_not_taken_for_an_accord",
    ),
    Mutant(
        "accord goes on though what differed is equal now",
        "storage/operations/global_plan.py",
        "    return all(len(seen) == 1 for seen in alike.values()) and all(len(seen) > 1 for seen in apart.values())\n",
        "    return all(len(seen) == 1 for seen in alike.values())\n",
        "tests/property/test_storage_accord.py::test_what_was_alike_and_is_not_is_found_out_anew",
    ),
    Mutant(
        "ranks may compress differently",
        "storage/operations/global_plan.py",
        '            if theirs != ours:\n                raise UsageError(f"rank {rank} saves with compression={theirs!r}, rank 0 with {ours!r}", rank=rank)\n',
        "",
        "tests/unit/test_storage_packed.py::test_ranks_that_compress_differently_are_told_so",
    ),
    Mutant(
        "others are told of a slot before it is filled",
        "storage/exchange/exchange.py",
        "        self._arena.fill(start, buffer, int(self.plan.stop[job] - self.plan.start[job]))\n        untaken = self._untaken[unit]\n        untaken.start = start\n        for member in untaken.near:\n            with _told_of(member):\n                self._takers[member].send_now(_HANDED.pack(unit, start, _NO_DIGEST))\n",
        "        untaken = self._untaken[unit]\n        untaken.start = start\n        for member in untaken.near:\n            with _told_of(member):\n                self._takers[member].send_now(_HANDED.pack(unit, start, _NO_DIGEST))\n        self._arena.fill(start, buffer, int(self.plan.stop[job] - self.plan.start[job]))\n",
        "tests/property/test_storage_exchange.py::test_each_wanted_byte_is_read_once",
    ),
    Mutant(
        "slot of shared memory is freed before others have copied",
        "storage/exchange/exchange.py",
        "        await untaken.taken\n        del self._untaken[unit]\n        if untaken.start is not None:\n            self._arena.free(untaken.start)\n            self._freed.set()\n",
        "        if untaken.start is not None:\n            self._arena.free(untaken.start)\n            self._freed.set()\n        await untaken.taken\n        del self._untaken[unit]\n",
        "tests/property/test_storage_exchange.py::test_each_wanted_byte_is_read_once",
    ),
    Mutant(
        "commit before the last rank has reported",
        "storage/ranks/team.py",
        '        payloads = [payload, *await self._gather(name, tellers[1:], f"round {name!r}")]\n',
        '        payloads = [payload, *await self._gather(name, tellers[1:-1] if name == "commit" else tellers[1:], f"round {name!r}")]\n',
        "tests/unit/test_storage_settled.py::test_a_copy_is_settled_and_another_one_of_the_same_leaves_it_alone",
    ),
    Mutant(
        "parts of one DTensor that differ between meshes are not refused",
        "storage/operations/global_plan.py",
        "    _refuse(told, {name for name, alike in zip(names, same.tolist(), strict=True) if not alike})\n",
        "",
        "tests/property/test_storage_accord.py::test_ranks_agree_on_what_they_hold_whatever_was_before",
    ),
]
