"""Lists defects in the batch store and in its readers' checks."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

SERVER = "services/batch_store/server.py"
STATE = "services/batch_store/state.py"
KILLED = "tests/integration/batch_store/test_store_kill.py"
UNIT = "tests/unit/batch_store/test_state.py"
DAMAGED = "tests/integration/batch_store/test_damaged_shards.py"
WIRE = "tests/unit/shared/test_stream_wire.py"
PROPERTY = "tests/property/test_store_state.py::TestStoreMachine"

STORE = [
    Mutation(
        "tables of collected files are kept",
        "shared/dataplane/mapping.py",
        "if len(self._tables) > self._sweep_at else []",
        "if False else []",
        "tests/unit/shared/test_stream_source.py::test_tables_of_collected_files_are_not_kept",
    ),
    Mutation(
        "a tombstone is written after the clear",
        SERVER,
        """\
        try:
            files.tombstones.append(self.index.entomb(request.tasks))
        except OSError as error:  # a full mount must not prevent the clear, which makes room
            self.log.error("tombstones not written", error=str(error))
        self._retirement.take(self.index.clear(request.tasks))
""",
        """\
        fresh = self.index.entomb(request.tasks)
        self._retirement.take(self.index.clear(request.tasks))
        try:
            files.tombstones.append(fresh)
        except OSError as error:
            self.log.error("tombstones not written", error=str(error))
""",
        f"{KILLED}::test_a_clear_interrupted_by_the_stores_death_stays_in_effect",
    ),
    Mutation(
        "a restarted store forgets its tombstones",
        SERVER,
        "self.index.recall(files.tombstones.read())",
        "files.tombstones.read()",
        f"{KILLED}::test_a_clear_interrupted_by_the_stores_death_stays_in_effect",
    ),
    Mutation(
        "recovery ignores tombstones",
        STATE,
        "            if self.tombstones.get(task_id, -1) < fence\n",
        "",
        f"{UNIT}::test_recovery_of_a_file_skips_the_tasks_that_were_cleared",
    ),
    Mutation(
        "recovery restores cleared shards",
        STATE,
        "            if self.tombstones.get(task_id, -1) < fence\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "a put is acknowledged before its file has its sealed name",
        SERVER,
        """\
            try:
                files.seal(put_id)
""",
        """\
            self.index.seal(put_id, table)
            try:
                files.seal(put_id)
""",
        f"{KILLED}::test_a_put_whose_file_cannot_be_renamed_is_not_acknowledged",
    ),
    Mutation(
        "a file that was damaged while the store was down is served",
        "services/batch_store/files.py",
        "if digest.intdigest() != shard.checksum:",
        "if False:",
        f"{KILLED}::test_file_damaged_while_the_store_was_down_is_not_served",
    ),
    Mutation(
        "a damaged shard is read without a check",
        "shared/dataplane/mapping.py",
        "if wrong.any():",
        "if False:",
        f"{DAMAGED}::test_a_flipped_bit_is_detected_only_by_readers_of_its_shard",
    ),
    Mutation(
        "a store that is asked about a shard does not check the shard's bytes",
        SERVER,
        "            await self._check(files, request.tasks)\n",
        "",
        f"{DAMAGED}::test_a_store_that_is_asked_to_check_drops_damaged_shards_and_serves_the_rest",
    ),
    Mutation(
        "a late put of a collected task is sealed",
        STATE,
        "        self._refuse_collected(grant.tasks)\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "different bytes under a known fence are sealed",
        STATE,
        "if mine.get(key, digest) != digest:",
        "if False:",
        PROPERTY,
    ),
    Mutation(
        "a reader of a collected task is told to wait for it",
        STATE,
        "        self._refuse_collected(tasks)\n        numbers",
        "        numbers",
        PROPERTY,
    ),
    Mutation(
        "a store grants more bytes than its limit",
        "services/batch_store/room.py",
        "if self.missing_bytes(nbytes, spare) > 0:",
        "if False:",
        PROPERTY,
    ),
    Mutation(
        "a file that is still mapped is no longer counted",
        "services/batch_store/room.py",
        "        self.zombie_bytes += held_bytes(nbytes)\n        if lend",
        "        self.used[place] -= held_bytes(nbytes)\n        if lend",
        PROPERTY,
    ),
    Mutation(
        "a file is deleted while some of its tasks are still alive",
        STATE,
        "        if sealed.alive:\n            return []\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "a reader accepts a row with a wrong checksum",
        "shared/dataplane/stream_arrival.py",
        "if computed != checksums[mine]:",
        "if False:",
        f"{WIRE}::test_one_wrong_bit_anywhere_is_detected",
    ),
    Mutation(
        "a reader accepts a large row with a wrong checksum",
        "shared/dataplane/stream_arrival.py",
        "if self._partial.intdigest() != checksum:",
        "if False:",
        f"{WIRE}::test_one_wrong_bit_anywhere_is_detected",
    ),
    Mutation(
        "a reader accepts shards of tasks that it did not request",
        "shared/dataplane/stream_arrival.py",
        "            self._check_content(table)\n",
        "",
        f"{WIRE}::test_stream_of_shards_other_than_those_requested_is_refused",
    ),
    Mutation(
        "nonces are reused because a connection's counter does not advance",
        "shared/dataplane/bulk_seal.py",
        "        self._counter += 1\n",
        "        self._counter = 1\n",
        f"{WIRE}::test_sealed_messages_open_in_order_and_never_share_a_nonce",
    ),
    Mutation(
        "a bulk message decrypts with a head other than its own",
        "shared/dataplane/bulk_seal.py",
        "            self._cipher.decrypt_into(self._nonce(into), sealed, associated, into)\n",
        "            self._cipher.decrypt_into(self._nonce(into), sealed, associated[:8], into)\n",
        f"{WIRE}::test_sealed_messages_open_in_order_and_never_share_a_nonce",
    ),
    Mutation(
        "both directions of a connection use the same keys",
        "shared/dataplane/bulk_seal.py",
        'b"rlbus bulk " + direction',
        'b"rlbus bulk "',
        f"{WIRE}::test_forged_replayed_reordered_and_misdirected_messages_do_not_open",
    ),
]
