"""Lists defects in the wire contract and in the bus: checks before allocation, retries, roles, keys."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

ENVELOPE = "proto/envelope.py"
CODEC = "proto/codec.py"
MAILBOX = "shared/rpc/mailbox.py"
NEWER = "tests/unit/proto/test_codec.py::test_newer_major_version_is_reported_even_with_another_kind_of_checksum"
HEADER = "tests/unit/proto/test_codec.py::test_malformed_header_is_refused"
RPC = "tests/unit/shared/rpc/test_rpc.py"
RPC_MISUSE = "tests/unit/shared/rpc/test_rpc_misuse.py"
SECURITY = "tests/unit/shared/test_security.py"

BUS = [
    Mutation(
        "an envelope with a wrong checksum is accepted",
        ENVELOPE,
        "if checksum != xxhash.xxh3_64_intdigest(data[: _LAYOUT.size]):",
        "if False:",
        NEWER,
    ),
    Mutation(
        "a body that exceeds its limit is accepted",
        ENVELOPE,
        "if body_bytes > limits.body_bytes:",
        "if False:",
        HEADER,
    ),
    Mutation(
        "a message whose total size exceeds the limit is accepted",
        ENVELOPE,
        "if total_bytes > limits.total_bytes or ",
        "if ",
        HEADER,
    ),
    Mutation(
        "a message with an unknown major version is accepted",
        ENVELOPE,
        "if major != MAJOR:",
        "if False:",
        NEWER,
    ),
    Mutation(
        "frames that differ from the envelope's announcement are accepted",
        CODEC,
        "if len(body) != head.body_bytes or len(table) != head.table_bytes or len(rest) != head.frame_count:",
        "if False:",
        "tests/unit/proto/test_codec.py::test_extra_and_missing_frames_are_refused",
    ),
    Mutation(
        "an inline array of any dtype is accepted, even one of objects",
        "proto/inline.py",
        "kind not in INLINE_TYPES or value",
        "value",
        "tests/unit/proto/test_codec.py::test_malformed_inline_array_is_refused",
    ),
    Mutation(
        "a control message carries a tensor over 64 KiB",
        "proto/inline.py",
        "or len(data) > MAX_INLINE_BYTES:",
        "or False:",
        "tests/unit/proto/test_codec.py::test_malformed_inline_array_is_refused",
    ),
    Mutation(
        "a retry of an answered request is executed again",
        MAILBOX,
        "known = self._replies[call.role].get(key)",
        "known = None",
        f"{RPC}::test_duplicate_of_an_answered_request_gets_the_same_bytes_again",
    ),
    Mutation(
        "a retry of a request in progress is executed concurrently",
        MAILBOX,
        "running = self._running.get(key)",
        "running = None",
        f"{RPC}::test_slow_answer_is_computed_once_although_the_client_asks_again",
    ),
    Mutation(
        "a different request under a used id gets the first one's reply",
        MAILBOX,
        "if known[0] != call.request:",
        "if False:",
        f"{SECURITY}::test_another_request_under_a_used_id_is_a_conflict_during_and_after_the_first",
    ),
    Mutation(
        "a reply is sent to another role that uses the same id",
        MAILBOX,
        "known = self._replies[call.role].get(key)",
        "known = next((r.get(k) for r in self._replies.values() for k in r._kept if k[1:] == key[1:]), None)",
        f"{SECURITY}::test_an_answer_is_never_given_to_another_role_under_the_same_id",
    ),
    Mutation(
        "an observer may send messages reserved for services",
        MAILBOX,
        "if who.is_guest and who.role < least_role(kind):",
        "if False:",
        f"{SECURITY}::test_a_role_reaches_the_handlers_of_its_messages_and_no_others",
    ),
    Mutation(
        "a message without a declared role is open to observers",
        "shared/security/roles.py",
        "LEAST_ROLE.get(kind, Role.SERVICE)",
        "LEAST_ROLE.get(kind, Role.OBSERVER)",
        f"{SECURITY}::test_unlisted_messages_are_reserved_for_services_and_each_role_includes_the_rights_of_lesser_roles",
    ),
    Mutation(
        "a key of another run is admitted",
        "shared/security/zap.py",
        "        if role is None:\n",
        "        role = role or Role.SERVICE\n        if role is None:\n",
        f"{SECURITY}::test_strangers_and_lesser_roles_never_get_past_the_handshake_and_are_counted",
    ),
    Mutation(
        "an endless message uses four times its memory limit",
        "shared/security/connections.py",
        "UNSEEN_BYTES = 64 << 20",
        "UNSEEN_BYTES = 256 << 20",
        "tests/fuzz/test_hostile_peers.py::test_an_endless_message_loses_its_connection_before_it_fills_the_memory",
    ),
    Mutation(
        "every missing shard of two long lists is named",
        "proto/excerpt.py",
        "MAX_NAMED = 1 << 16",
        "MAX_NAMED = 1 << 21",
        "tests/integration/batch_store/test_lying_store.py"
        "::test_requests_for_too_much_are_refused_or_truncated_and_take_little_memory",
    ),
    Mutation(
        "a handler that outlives its caller's deadline continues",
        MAILBOX,
        "asyncio.timeout_at(call.deadline if not call.one_way else None)",
        "asyncio.timeout_at(None)",
        f"{RPC}::test_coroutine_handler_ends_at_the_callers_deadline",
    ),
    Mutation(
        "replies are kept without limit",
        "shared/rpc/replies.py",
        "if len(self._kept) > CACHED_REPLIES or self.nbytes > CACHED_REPLY_BYTES:",
        "if False:",
        f"{RPC_MISUSE}::test_reply_memory_is_bounded",
    ),
    Mutation(
        "answers are kept until the deadline of their callers, however far away it is",
        "shared/rpc/replies.py",
        "return next(iter(self._kept.values())).since < now - SETTLED_S",
        "return False",
        "tests/unit/shared/rpc/test_replies.py::test_answers_whose_callers_wait_for_an_hour_do_not_accumulate",
    ),
    Mutation(
        "an answer is dropped while its caller may still repeat its request",
        "shared/rpc/replies.py",
        "return next(iter(self._kept.values())).since < now - SETTLED_S",
        "return True",
        "tests/unit/shared/rpc/test_replies.py::test_an_answer_that_its_caller_may_have_missed_is_kept_however_many_follow",
    ),
]
