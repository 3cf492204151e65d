"""Compares the catalogue, tables and numbers of proto/SPEC.md with the code."""

from __future__ import annotations

import re

import zmq

from proto import blockfile, bulk, codec, dtypes, envelope, excerpt, tensors
from proto.limits import CONTROL, MAX_INLINE_BYTES, MAX_NDIM
from proto.messages import ErrorCode, Outcome
from proto.registry import Request, all_messages
from services.batch_store import server as store_server
from services.batch_store import state as store_state
from services.batch_store import stream_server
from services.monitor import server as monitor_server
from services.monitor import state as monitor_state
from services.monitor import subscriptions
from services.scheduler import registry
from services.scheduler.state import RECONCILE_S
from shared.actor import logging as actor_logging
from shared.dataplane import bulk_connection, stream, stream_line
from shared.rpc import client, errors, mailbox, replies, senders, transport, unread
from shared.rpc.mailbox import Mailbox
from shared.security import connections, curve
from shared.security.roles import LEAST_ROLE, Role
from shared.stages import GRAPH, RECORD, Key, Per
from tests.golden.block_files import hash_of
from tests.golden.catalogue import ROUTES, SPEC, catalogue, split_spec
from tests.golden.catalogue import errors as errors_of
from tests.golden.vectors import FOLDER, read

LINE_CHARACTERS = 156
CODES = list(ErrorCode)


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def seconds(duration: float) -> str:
    return f"{duration:g} s"


def socket_seconds(option: int) -> str:
    """Return the value in seconds of a socket option that peers set in milliseconds."""
    with zmq.Context() as context, transport.open_socket(context, zmq.DEALER) as socket:
        return seconds(float(str(socket.getsockopt(option))) / 1000)


NUMBERS = {
    "messages in a socket's queue, each way": str(transport.HIGH_WATER_MESSAGES),
    "interval of ZMTP heartbeats": socket_seconds(zmq.HEARTBEAT_IVL),
    "timeout of ZMTP heartbeats": socket_seconds(zmq.HEARTBEAT_TIMEOUT),
    "linger of a socket": seconds(transport.LINGER_MS / 1000),
    "unread answers to a service": size(unread.SERVICE_BYTES),
    "unread answers on a connection of an observer or operator": size(unread.GUEST_BYTES),
    "unread answers to all observers and operators": size(unread.GUESTS_BYTES),
    "connections of a tcp endpoint": str(connections.MOST_CONNECTIONS),
    "duration of a handshake": seconds(curve.HANDSHAKE_MS / 1000),
    "names in an error": str(errors.MAX_NAMES),
    "bytes of a `LogLines`": size(actor_logging.TAIL_BYTES),
    "troubles in a heartbeat": str(registry.MOST_TROUBLES),
    "requests in progress in a mailbox": str(mailbox.MAX_RUNNING),
    "requests in progress of all observers, and of all operators": str(mailbox.MAX_RUNNING_OF_GUESTS),
    "`retry_after_s` of a mailbox with too many requests in progress": seconds(mailbox.BUSY_S),
    "bytes received without one whole message": size(connections.UNSEEN_BYTES),
    "strikes that lead to quarantine": str(senders.STRIKES),
    "time within which strikes count": seconds(senders.WINDOW_S),
    "duration of a quarantine": seconds(senders.QUARANTINE_S),
    "first wait before a request is sent again": seconds(client.FIRST_RESEND_S),
    "assumed rate for the bytes of a request": f"{size(client.RESEND_BYTES_PER_S)}/s",
    "longest wait before a request is sent again": seconds(client.LAST_RESEND_S),
    "stored answers per role": str(replies.CACHED_REPLIES),
    "bytes of the stored answers per role": size(replies.CACHED_REPLY_BYTES),
    "time after which a stored answer was sent long ago": seconds(replies.SETTLED_S),
    "stored answers per role beyond which those sent long ago are dropped": str(replies.SETTLED_REPLIES),
    "bytes of the stored answers per role beyond which those sent long ago are dropped": size(replies.SETTLED_BYTES),
    "time after the deadline of a request for which its answer is stored": seconds(replies.GRACE_S),
    "interval of reconciliation": seconds(RECONCILE_S),
    "time for a grant to be sealed": seconds(store_state.GRANT_S),
    "updates in a subscriber's queue": str(monitor_server.SUBSCRIBER_MESSAGES),
    "topics to which a connection may subscribe": str(subscriptions.MOST_TOPICS),
    "bytes of a topic in a subscription": str(subscriptions.TOPIC_BYTES),
    "bytes of the topics of all connections": size(subscriptions.ALL_BYTES),
    "bytes of one telemetry row": size(monitor_state.MAX_ROW_BYTES),
    "lines of a store": str(stream_server.MAX_LINES),
    "time for a line to be connected": seconds(stream_server.UNCLAIMED_S),
    "streams of a store": str(stream_server.MAX_STREAMS),
    "tasks of a stream": str(store_server.MAX_STREAM_TASKS),
    "missing shards that a store looks for": str(excerpt.MAX_NAMED),
    "time without requests or sends after which a stream ends": seconds(stream_server.STREAM_IDLE_S),
    "requests for one stream after mismatches": str(stream.CORRUPT_TRIES),
    "connections of a store": str(stream_server.MAX_CONNECTIONS),
    "time for a HELLO": seconds(stream_server.PROVE_S),
    "time without requests or reads after which a connection ends": seconds(stream_server.IDLE_S),
    "bytes waiting to be sent on a connection": size(stream_server.READER_BYTES),
    "ranges waiting to be sent on a connection": str(stream_server.READER_RANGES),
}
"""Expected table of section 13."""


def section(number: int) -> str:
    return SPEC.read_text().split(f"\n## {number} ")[1].split("\n## ")[0]


def prose(number: int) -> str:
    """Return a section without line breaks, so that whole sentences can be found."""
    return " ".join(section(number).split())


def test_catalogue_is_generated_from_the_code() -> None:
    _, inside, _ = split_spec()
    assert inside == catalogue(), "run: python -m tests.golden.catalogue"


def test_lines_are_short() -> None:
    lines = SPEC.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > LINE_CHARACTERS] == []


def test_every_message_has_a_route_or_is_a_reply() -> None:
    names = {cls.__name__ for cls in all_messages().values()}
    answers = {cls.REPLY.__name__ for cls in all_messages().values() if issubclass(cls, Request)} | {"Error"}
    assert set(ROUTES) == names - answers


def test_offsets_of_envelope_and_tensor_table_add_up() -> None:
    sizes = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "4 bytes": 4, "8 × u64": 64}
    for number, total in ((2, envelope.SIZE), (4, tensors.ROW_BYTES)):
        rows = re.findall(r"^\| (\d+) \| ([^|]+?) \| ", section(number), re.M)
        at = 0
        for offset, kind in rows:
            assert int(offset) == at
            at += sizes[kind]
        assert at == total


def test_element_types_match_the_code() -> None:
    listed = re.findall(r"(\d+) \| (\w+)(?: \(0 or 1\))? \| (\d+)", section(5))
    assert sorted((int(code), name, int(size)) for code, name, size in listed) == [
        (row.code, row.name, row.itemsize) for row in dtypes.TABLE
    ]


def test_flags_versions_and_inline_types_match_the_code() -> None:
    assert "1 REPLY, 2 ONE_WAY, 4 TABLE" in section(2)
    assert (envelope.FLAG_REPLY, envelope.FLAG_ONE_WAY, envelope.FLAG_TABLE) == (1, 2, 4)
    assert f"version {envelope.MAJOR}.{envelope.MINOR}" in SPEC.read_text().splitlines()[0]
    listed = re.search(r"one of `([^`]+)` and nothing else", section(3))
    assert listed is not None
    assert set(listed.group(1).replace("\\|", "|").split()) == codec.INLINE_TYPES


def test_limits_match_the_code() -> None:
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    rows = dict(re.findall(r"^\| ([\w ,]+) \| (\d+ ?\w*) \| .+ \|$", section(7), re.M))
    values = {name: int(text.split()[0]) * units[text.partition(" ")[2]] for name, text in rows.items()}
    assert values == {
        "body": CONTROL.body_bytes,
        "raw frames, and tensors": CONTROL.frames,
        "one raw frame": CONTROL.frame_bytes,
        "one tensor": CONTROL.tensor_bytes,
        "body, table and raw frames": CONTROL.total_bytes,
        "inline array": MAX_INLINE_BYTES,
        "dimensions": MAX_NDIM,
    }


def test_error_codes_and_outcomes_match_the_code() -> None:
    listed = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", section(6).split("Codes of `Error.code`")[1], re.M)
    assert listed == list(ErrorCode)
    assert (Outcome.DONE, Outcome.RETRY, Outcome.DROP) == (0, 1, 2)
    assert re.findall(r"^- `(\d)` \((\w+)\)", section(6), re.M) == [("0", "done"), ("1", "retry"), ("2", "drop")]


def test_errors_documented_for_requests_have_known_codes() -> None:
    requests = [cls for cls in all_messages().values() if issubclass(cls, Request)]
    named = {cls.__name__: own for cls in requests if (own := errors_of(cls))}
    assert {"PutBegin", "Locate", "LeaseRequest", "NextBatch", "OptimStep"} <= named.keys()
    for own in named.values():
        assert own.keys() <= set(CODES)
        assert all(text.endswith(".") for text in own.values())


def test_numbers_match_the_code() -> None:
    listed = re.findall(r"^\| (.+) \| (\d\S*(?: \S+)?) \| (\d+) \|$", section(13), re.M)
    assert {what: value for what, value, _ in listed} == NUMBERS
    assert [int(number) for *_, number in listed] == sorted(int(number) for *_, number in listed)
    assert len(section(13).split("|---|---|---|")[1].strip().splitlines()) == len(NUMBERS)
    assert stream_line.IDLE_S < stream_server.IDLE_S  # A reader closes its line before the store does.


def test_roles_and_their_messages_match_the_code() -> None:
    listed: dict[str, list[str]] = {}
    for label, text in re.findall(r"^\| (observer|operator) \| (.+) \|$", section(1), re.M):
        listed.setdefault(label, []).extend(re.findall(r"`(\w+)`", text))
    assert {label: set(names) for label, names in listed.items()} == {
        role.label: {kind.__name__ for kind, least in LEAST_ROLE.items() if least == role}
        for role in (Role.OBSERVER, Role.OPERATOR)
    }
    counted = re.findall(r"^\| [^|]+ \| [^|]+ \| `(\w+)` \| [^|]+ \|$", section(7), re.M)
    assert set(counted) == Mailbox("m", 1).counts().keys() - {"quarantines", "lost_replies"}


def test_stages_and_their_keys_match_the_code() -> None:
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\|([^|]*)\|([^|]*)\|$", section(8), re.M)
    listed = {name: (re.findall(r"`(\w+)`", needs), re.findall(r"`(\w+)`", makes)) for name, needs, makes in rows}
    assert listed == {stage.name: (list(stage.needs), list(stage.makes)) for stage in GRAPH if stage.leased}


def letter(key: Key) -> str:
    """Return the letter of a width that the topology decides."""
    return "k" if key.per is Per.TRAINED else "W"


def test_keys_match_their_declarations() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| \[([\w, ]+)\] \| `([\w-]+)` \| (.+) \|$", section(8), re.M)
    assert rows == [
        (key.name, key.dtype, ", ".join([key.per, *(str(n or letter(key)) for n in key.row)]), stage.name, key.meaning)
        for stage in (*GRAPH, RECORD)
        for key in stage.keys
    ]


def test_bulk_messages_match_the_code() -> None:
    text = section(11)
    sentences = prose(11)
    assert f"its key has sealed more than 2^{bulk_connection.KEY_LIMIT_BYTES.bit_length() - 1} bytes" in sentences
    assert bulk_connection.KEY_LIMIT_BYTES.bit_count() == 1
    assert f"| version | {bulk.VERSION} |" in text
    assert f"a head of {bulk.HEAD_BYTES} bytes" in sentences
    assert f"1 to {bulk.MAX_RANGE_BYTES};" in text
    assert re.findall(r"^\| (\d) ([A-Z]+) \|", text, re.M) == [(str(kind.value), kind.name) for kind in bulk.Kind]


def test_limits_of_block_files_match_the_code() -> None:
    text = section(9)
    assert f"magic `{blockfile.MAGIC.decode()}`" in text
    assert f"layout, {blockfile.LAYOUT} " in text
    bounds = (blockfile.MAX_TASKS, blockfile.MAX_ROWS, blockfile.MAX_FILE_BYTES, blockfile.MAX_NAMES_BYTES)
    powers = [bound.bit_length() - 1 for bound in bounds]
    assert (
        f"2^{powers[0]} tasks, 2^{powers[1]} rows, 2^{powers[2]} bytes in all, and 2^{powers[3]} bytes of names"
        in prose(9)
    )


def test_worked_exchange_has_the_bytes_of_the_golden_files() -> None:
    listed = []
    for dump in re.findall(r"```\n(.+?)```", section(14), re.S):
        data = b""
        for line in filter(None, dump.splitlines()):
            found = re.match(r"([0-9a-f]{2})  ((?:[0-9a-f]{2} ){0,7}[0-9a-f]{2})(?:  |$)", line)
            assert found is not None, line
            if found[1] == "00" and data:
                listed.append(data)
                data = b""
            assert int(found[1], 16) == len(data), line
            data += bytes.fromhex(found[2])
        listed.append(data)
    request, answer = (read(name, [64, nbytes]) for name, nbytes in (("put_seal", 42), ("put_sealed", 10)))
    file = (FOLDER / "block_one_shard.blk").read_bytes()
    assert listed == [*request, *answer, file]
    [shard] = blockfile.parse(file, len(file)).shards(0)
    assert f"`{hash_of([shard.checksum])}`" in prose(14)
