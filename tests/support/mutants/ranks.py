"""Connections between ranks, what they exchange, and forks."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="a client takes whatever answers for the rank",
        file="storage/exchange/transport.py",
        old="    if not hmac.compare_digest(proof, handshake.derived(b'server')):\n",
        new="    if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k refused",
    ),
    Mutant(
        says="a listener accepts clients that do not know its secret",
        file="storage/exchange/transport.py",
        old="        if not hmac.compare_digest(proof, handshake.derived(b'client')):\n",
        new="        if not await connection.receive(PROOF_NBYTES):\n",
        tests="tests/unit/test_ranks_strangers.py -k repeated",
    ),
    Mutant(
        says="a process of another user is spoken to",
        file="storage/exchange/transport.py",
        old="            if is_local and connection.peer_uid() != os.getuid():\n",
        new="            if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k another_user",
    ),
    Mutant(
        says="memory that is handed over may be anybody's",
        file="storage/exchange/transport.py",
        old="    if not hmac.compare_digest(proof, connection.digest(b'memory', identity_of(fd))):\n",
        new="    if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k other_memory",
    ),
    Mutant(
        says="memory that can be cut off is looked at",
        file="storage/arenas/memory.py",
        old="    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:\n",
        new="    if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k cut_off",
    ),
    Mutant(
        says="a manifest that was handed on is not compared with its checksum",
        file="storage/exchange/broadcast.py",
        old="    if await offload(digest, data) != shared.digest:\n",
        new="    if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k manifest",
    ),
    Mutant(
        says="what came over a network is not compared with its digest",
        file="storage/exchange/receiving.py",
        old="            if not hmac.compare_digest(found, digest):\n",
        new="            if False:\n",
        tests="tests/unit/test_ranks_strangers.py -k changed_on_the_way",
    ),
    Mutant(
        says="shared memory of an exchange is outside of the budget",
        file="storage/exchange/setup.py",
        old="    return reader.jobs(reads, unit_nbytes)\n",
        new="    return reader.jobs(reads)\n",
        tests="tests/property/test_storage_exchange.py -k budget",
    ),
    Mutant(
        says="copies that a driver holds of what it reads do not count",
        file="storage/runtime/read_buffers.py",
        old="            copies = traits.read_copies\n",
        new="            copies = 1\n",
        tests="tests/property/test_storage_exchange.py -k budget",
    ),
    Mutant(
        says="of a unit, a member gets its first range only",
        file="planner/sharing.py",
        old="        stop = stop[np.append(at[1:], len(stop)) - 1]\n",
        new="        stop = stop[at]\n",
        tests="tests/property/test_planner_loading.py::test_ranks_that_share_read_each_wanted_byte_once",
    ),
    Mutant(
        says="locks stay held in a forked child",
        file="core/forks/renewal.py",
        old="            held._at_fork_reinit()\n",
        new="            pass\n",
        tests="tests/unit/test_forks.py::test_child_finds_every_lock_free",
    ),
    Mutant(
        says="a fork does not wait for imports",
        file="core/forks/renewal.py",
        old="        if owner is not None and owner != me:\n",
        new="        if False:\n",
        tests="tests/unit/test_forks.py::test_fork_waits_for_imports",
    ),
    Mutant(
        says="a child waits for a save of its parent",
        file="storage/runtime/engine.py",
        old="        if not done and self._pid != os.getpid():\n",
        new="        if False:\n",
        tests="tests/unit/test_forks.py::test_child_cannot_wait_for_a_save_of_its_parent",
    ),
    Mutant(
        says="plans of different ids are taken for one",
        file="storage/operations/saving/plan_leader.py",
        old=("    if len({plan.id for plan in followed}) > 1:\n        return False\n"),
        new="",
        tests="tests/property/test_storage_global_plan.py::test_layouts_that_were_never_together_are_not_taken_for_one_plan",
    ),
    Mutant(
        says="plan id without seal: equal verdicts of other layouts share an id",
        file="storage/operations/saving/plan_leader.py",
        old="        plan_id = digest(codec(PlanDecision).encode(decision) + self._seal)\n",
        new="        plan_id = digest(codec(PlanDecision).encode(decision))\n",
        tests="tests/property/test_storage_global_plan.py::test_layouts_that_were_never_together_are_not_taken_for_one_plan",
    ),
    Mutant(
        says="plan goes on though what differed is equal now",
        file="storage/operations/saving/plan_leader.py",
        old="    return all((len(values) > 1 for values in divergent.values()))\n",
        new="    return True\n",
        tests="tests/property/test_storage_global_plan.py::test_what_was_alike_and_is_not_is_found_out_anew",
    ),
    Mutant(
        says="ranks may compress differently",
        file="storage/operations/saving/plan_leader.py",
        old=(
            "        if other.compression != first.compression:\n"
            "            raise UsageError(f'rank {rank} saves with compression={other.compression!r}, rank 0 with {first.compression!r}', rank=rank)\n"
        ),
        new="",
        tests="tests/unit/test_storage_packed.py::test_ranks_that_compress_differently_are_told_so",
    ),
    Mutant(
        says="others are told of a slot before it is filled",
        file="storage/exchange/sending.py",
        old=(
            "        self._arena.fill(start, buffer, int(self._plan.stop[job] - self._plan.start[job]))\n"
            "        pending = self._pending[unit]\n"
            "        pending.start = start\n"
            "        for member in pending.local:\n"
            "            with naming_member(member):\n"
            "                self.connections[member].send_now(HANDOVER.pack(unit, start, NO_DIGEST))\n"
        ),
        new=(
            "        pending = self._pending[unit]\n"
            "        pending.start = start\n"
            "        for member in pending.local:\n"
            "            with naming_member(member):\n"
            "                self.connections[member].send_now(HANDOVER.pack(unit, start, NO_DIGEST))\n"
            "        self._arena.fill(start, buffer, int(self._plan.stop[job] - self._plan.start[job]))\n"
        ),
        tests="tests/property/test_storage_exchange.py::test_each_wanted_byte_is_read_once",
    ),
    Mutant(
        says="slot of shared memory is freed before others have copied",
        file="storage/exchange/sending.py",
        old=(
            "        await pending.confirmed\n"
            "        del self._pending[unit]\n"
            "        if pending.start is not None:\n"
            "            self._arena.free(pending.start)\n"
            "            self._slot_freed.set()\n"
        ),
        new=(
            "        if pending.start is not None:\n"
            "            self._arena.free(pending.start)\n"
            "            self._slot_freed.set()\n"
            "        await pending.confirmed\n"
            "        del self._pending[unit]\n"
        ),
        tests="tests/property/test_storage_exchange.py::test_each_wanted_byte_is_read_once",
    ),
    Mutant(
        says="commit before the last rank has reported",
        file="storage/ranks/store_team.py",
        old="        payloads = [payload, *await self._gather(name, senders[1:], f'round {name!r}')]\n        try:\n",
        new="        payloads = [payload, *await self._gather(name, senders[1:-1] if name == 'commit' else senders[1:], f'round {name!r}')]\n        try:\n",
        tests="tests/unit/test_storage_commit_records.py::test_a_copy_is_settled_and_another_one_of_the_same_leaves_it_alone",
    ),
    Mutant(
        says="parts of one DTensor that differ between meshes are not refused",
        file="storage/operations/saving/plan_leader.py",
        old="    _refuse_different_parts(findings, different)\n",
        new="",
        tests="tests/property/test_storage_global_plan.py::test_parts_of_one_tensor_that_differ_between_meshes_are_refused",
    ),
    Mutant(
        says="two process groups meet under one name",
        file="storage/ranks/process_group.py",
        old="    return f'{prefix}/{group.group_name}'\n",
        new="    return prefix\n",
        tests="tests/distributed/test_groups.py",
    ),
    Mutant(
        says="holders of a DTensor are numbered as in the job",
        file="storage/ranks/process_group.py",
        old="    return {rank: number for number, rank in enumerate(ranks)}\n",
        new="    return {rank: rank for rank in ranks}\n",
        tests="tests/distributed/test_groups.py",
    ),
]
