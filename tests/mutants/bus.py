"""Lists defects in the wire contract and in the bus: checks before allocation, retries, roles, keys."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

ENVELOPE = "proto/envelope.py"
MAILBOX = "shared/rpc/mailbox.py"
NEWER = "tests/unit/proto/test_codec.py::test_newer_major_version_is_reported_even_with_another_kind_of_checksum"
HEADER = "tests/unit/proto/test_codec.py::test_malformed_header_is_refused"
RPC = "tests/unit/shared/rpc/test_rpc.py"
SECURITY = "tests/unit/shared/test_security.py"

BUS = [
    Mutation(
        "an envelope with a wrong checksum is accepted",
        Promise.WIRE,
        ENVELOPE,
        "if checksum != xxhash.xxh3_64_intdigest(data[: _LAYOUT.size]):",
        "if False:",
        NEWER,
    ),
    Mutation(
        "a body that exceeds its limit is accepted",
        Promise.WIRE,
        ENVELOPE,
        "if body_bytes > limits.body_bytes:",
        "if False:",
        HEADER,
    ),
    Mutation(
        "an inline array of any dtype is accepted, even one of objects",
        Promise.WIRE,
        "proto/codec.py",
        "kind not in INLINE_TYPES or value",
        "value",
        "tests/unit/proto/test_codec.py::test_malformed_inline_array_is_refused",
    ),
    Mutation(
        "a control message carries a tensor over 64 KiB",
        Promise.METADATA,
        "proto/codec.py",
        "or len(data) > MAX_INLINE_BYTES:",
        "or False:",
        "tests/unit/proto/test_codec.py::test_malformed_inline_array_is_refused",
    ),
    Mutation(
        "a retry of an answered request is executed again",
        Promise.ONCE,
        MAILBOX,
        "answer = self._replies[call.role].get(key)",
        "answer = None",
        f"{RPC}::test_duplicate_of_an_answered_request_gets_the_same_bytes_again",
    ),
    Mutation(
        "a retry of a request in progress is executed concurrently",
        Promise.ONCE,
        MAILBOX,
        "running = self._running.get(key)",
        "running = None",
        f"{RPC}::test_slow_answer_is_computed_once_although_the_client_asks_again",
    ),
    Mutation(
        "a reply is sent to another role that uses the same id",
        Promise.WIRE,
        MAILBOX,
        "answer = self._replies[call.role].get(key)",
        "answer = next((r.get(k) for r in self._replies.values() for k in r._kept if k[1:] == key[1:]), None)",
        f"{SECURITY}::test_an_answer_is_never_given_to_another_role_under_the_same_id",
    ),
    Mutation(
        "an observer may send messages reserved for services",
        Promise.WIRE,
        MAILBOX,
        "if who.is_guest and who.role < least_role(kind):",
        "if False:",
        f"{SECURITY}::test_a_role_reaches_the_handlers_of_its_messages_and_no_others",
    ),
    Mutation(
        "a key of another run is admitted",
        Promise.WIRE,
        "shared/security/zap.py",
        "        if role is None:\n",
        "        role = role or Role.SERVICE\n        if role is None:\n",
        f"{SECURITY}::test_strangers_and_lesser_roles_never_get_past_the_handshake_and_are_counted",
    ),
    Mutation(
        "an endless message uses four times its memory limit",
        Promise.WIRE,
        "shared/security/connections.py",
        "UNSEEN_BYTES = 64 << 20",
        "UNSEEN_BYTES = 256 << 20",
        "tests/fuzz/test_hostile_peers.py::test_an_endless_message_loses_its_connection_before_it_fills_the_memory",
    ),
    Mutation(
        "a handler that outlives its caller's deadline continues",
        Promise.DEADLINES,
        MAILBOX,
        "asyncio.timeout_at(call.deadline if not call.one_way else None)",
        "asyncio.timeout_at(None)",
        f"{RPC}::test_coroutine_handler_ends_at_the_callers_deadline",
    ),
    Mutation(
        "any token opens the page",
        Promise.WIRE,
        "shared/guest_server.py",
        'return kind.lower() == "bearer" and self.matches(given)',
        'return kind.lower() == "bearer"',
        "tests/unit/web/test_guard.py::test_data_needs_the_token_if_one_is_set",
    ),
]
