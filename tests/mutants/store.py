"""Lists defects in the batch store and in its readers' checks."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

SERVER = "services/batch_store/server.py"
STATE = "services/batch_store/state.py"
KILLED = "tests/integration/batch_store/test_store_kill.py"
DAMAGED = "tests/integration/batch_store/test_damaged_shards.py"
WIRE = "tests/unit/shared/test_stream_wire.py"
PROPERTY = "tests/property/test_store_state.py::TestStoreMachine"

STORE = [
    Mutation(
        "a tombstone is written after the clear",
        Promise.COLLECTED,
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
        Promise.COLLECTED,
        SERVER,
        "self.index.recall(files.tombstones.read())",
        "files.tombstones.read()",
        f"{KILLED}::test_a_clear_interrupted_by_the_stores_death_stays_in_effect",
    ),
    Mutation(
        "recovery restores cleared shards",
        Promise.COLLECTED,
        STATE,
        "            if self.tombstones.get(task_id, -1) < fence\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "a put is acknowledged before its file has its sealed name",
        Promise.READABLE,
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
        Promise.READABLE,
        "services/batch_store/files.py",
        "if digest.intdigest() != shard.checksum:",
        "if False:",
        f"{KILLED}::test_file_damaged_while_the_store_was_down_is_not_served",
    ),
    Mutation(
        "a damaged shard is read without a check",
        Promise.READABLE,
        "shared/dataplane/mapping.py",
        "if wrong.any():",
        "if False:",
        f"{DAMAGED}::test_a_flipped_bit_is_detected_only_by_readers_of_its_shard",
    ),
    Mutation(
        "a late put of a collected task is sealed",
        Promise.COLLECTED,
        STATE,
        "        self._refuse_collected(grant.tasks)\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "different bytes under a known fence are sealed",
        Promise.ONCE,
        STATE,
        "if mine.get(key, digest) != digest:",
        "if False:",
        PROPERTY,
    ),
    Mutation(
        "a store grants more bytes than its limit",
        Promise.BYTES,
        "services/batch_store/room.py",
        "if self.missing_bytes(nbytes, spare) > 0:",
        "if False:",
        PROPERTY,
    ),
    Mutation(
        "a file that is still mapped is no longer counted",
        Promise.BYTES,
        "services/batch_store/room.py",
        "        self.zombie_bytes += held_bytes(nbytes)\n        if lend",
        "        self.used[place] -= held_bytes(nbytes)\n        if lend",
        PROPERTY,
    ),
    Mutation(
        "a file is deleted while some of its tasks are still alive",
        Promise.READABLE,
        STATE,
        "        if sealed.alive:\n            return []\n",
        "",
        PROPERTY,
    ),
    Mutation(
        "a reader accepts a row with a wrong checksum",
        Promise.READABLE,
        "shared/dataplane/stream_arrival.py",
        "if computed != checksums[mine]:",
        "if False:",
        f"{WIRE}::test_one_wrong_bit_anywhere_is_detected",
    ),
    Mutation(
        "nonces are reused because a connection's counter does not advance",
        Promise.WIRE,
        "shared/dataplane/bulk_connection.py",
        "        self._counter += 1\n",
        "        self._counter = 1\n",
        f"{WIRE}::test_sealed_messages_open_in_order_and_never_share_a_nonce",
    ),
    Mutation(
        "both directions of a connection use the same keys",
        Promise.WIRE,
        "shared/dataplane/bulk_connection.py",
        'b"rlbus bulk " + direction',
        'b"rlbus bulk "',
        f"{WIRE}::test_forged_replayed_reordered_and_misdirected_messages_do_not_open",
    ),
]
