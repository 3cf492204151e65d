"""proto/SPEC.md says what the code does: catalogue, tables and numbers are compared, not trusted."""

from __future__ import annotations

import re

from proto import blockfile, bulk, dtypes, envelope, inline, tensors
from proto.limits import CONTROL, MAX_INLINE_BYTES, MAX_NDIM
from proto.messages import ErrorCode, Outcome
from proto.registry import Request, all_messages
from services.batch_store import stream_places, stream_server
from services.scheduler.state import RECONCILE_S
from shared.dataplane import bulk_seal, stream_line
from shared.rpc import client, errors, mailbox, offenders, replies, transport, unread
from shared.rpc.mailbox import Mailbox
from shared.security import connections, curve
from shared.security.roles import LEAST_ROLE, Role
from shared.stages import train_graph
from tests.golden.catalogue import ROUTES, SPEC, catalogue, split_spec


def section(number: int) -> str:
    return SPEC.read_text().split(f"\n## {number} ")[1].split("\n## ")[0]


def prose(number: int) -> str:
    """A section without its line breaks, for sentences."""
    return " ".join(section(number).split())


def test_catalogue_is_in_step_with_the_code() -> None:
    _, inside, _ = split_spec()
    assert inside == catalogue(), "run: python -m tests.golden.catalogue"


def test_every_message_has_a_route_or_is_an_answer() -> None:
    names = {cls.__name__ for cls in all_messages().values()}
    answers = {cls.REPLY.__name__ for cls in all_messages().values() if issubclass(cls, Request)} | {"Error"}
    assert set(ROUTES) == names - answers


def test_envelope_and_row_tables_add_up() -> None:
    sizes = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "4 bytes": 4, "8 × u64": 64}
    for number, total in ((2, envelope.SIZE), (4, tensors.ROW_BYTES)):
        rows = re.findall(r"^\| (\d+) \| ([^|]+?) \| ", section(number), re.M)
        at = 0
        for offset, kind in rows:
            assert int(offset) == at
            at += sizes[kind]
        assert at == total


def test_element_types_are_those_of_the_table() -> None:
    listed = re.findall(r"(\d+) \| (\w+)(?: \(0 or 1\))? \| (\d+)", section(5))
    assert sorted((int(code), name, int(size)) for code, name, size in listed) == [
        (row.code, row.name, row.itemsize) for row in dtypes.TABLE
    ]


def test_flags_versions_and_inline_types_are_the_codes() -> None:
    assert "1 REPLY, 2 ONE_WAY, 4 TABLE" in section(2)
    assert (envelope.FLAG_REPLY, envelope.FLAG_ONE_WAY, envelope.FLAG_TABLE) == (1, 2, 4)
    assert f"version {envelope.MAJOR}.{envelope.MINOR}" in SPEC.read_text().splitlines()[0]
    listed = re.search(r"one of `([^`]+)` and nothing else", section(3))
    assert listed is not None
    assert set(listed.group(1).replace("\\|", "|").split()) == inline.INLINE_TYPES


def test_limits_are_the_codes() -> None:
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


def test_error_codes_and_outcomes_are_the_codes() -> None:
    listed = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", section(6).split("Codes of `Error.code`")[1], re.M)
    assert listed == list(ErrorCode)
    assert (Outcome.DONE, Outcome.RETRY, Outcome.DROP) == (0, 1, 2)
    assert "0 done, 1 retry (another attempt may succeed), 2 drop" in section(6)
    assert f"`names` holds the first {errors.MAX_NAMES} names of what the error is about" in prose(6)


def test_numbers_of_the_rpc_layer_are_the_codes() -> None:
    assert f"newest {replies.CACHED_REPLIES} answers and at most {replies.CACHED_REPLY_BYTES >> 20} MiB" in prose(8)
    assert f"at least {replies.GRACE_S:g} s after the deadline" in prose(8)
    assert f"first after {client.FIRST_RESEND_S:g} s plus" in prose(8)
    assert f"bytes take at {client.RESEND_BYTES_PER_S >> 20} MiB/s" in prose(8)
    assert f"up to {client.LAST_RESEND_S:g} s" in prose(8)
    assert f"({transport.HIGH_WATER_MESSAGES} messages each way)" in prose(1)
    unread_mib = [each >> 20 for each in (unread.SERVICE_BYTES, unread.GUEST_BYTES, unread.GUESTS_BYTES)]
    assert unread_mib == [int(each) for each in re.findall(r"(\d+) MiB", section(1))]
    assert f"linger {transport.LINGER_MS} ms" in prose(1)


def test_roles_and_their_messages_are_the_codes() -> None:
    listed = dict(re.findall(r"^\| (observer|operator) \| (?:those, )?(.+) \|$", section(1), re.M))
    assert {label: set(re.findall(r"`(\w+)`", text)) for label, text in listed.items()} == {
        role.label: {kind.__name__ for kind, least in LEAST_ROLE.items() if least == role}
        for role in (Role.OBSERVER, Role.OPERATOR)
    }
    assert f"end within {curve.HANDSHAKE_MS // 1000} s" in prose(1)
    assert (
        f"with {offenders.STRIKES} messages that could not be read or that its role may not send, within "
        f"{offenders.WINDOW_S:g} s, is in quarantine for {offenders.QUARANTINE_S:g} s"
    ) in prose(7)
    counted = re.findall(r"^\| [^|]+ \| [^|]+ \| `(\w+)` \| [^|]+ \|$", section(7), re.M)
    assert set(counted) == Mailbox("m", 1).counts().keys() - {"quarantines", "lost_replies"}
    assert f"{mailbox.MAX_RUNNING} requests in progress | `busy`, with `retry_after_s` {mailbox.BUSY_S:g} |" in prose(7)
    assert f"{connections.UNSEEN_BYTES >> 20} MiB without one whole message" in prose(7)


def test_stages_and_their_keys_are_the_codes() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|$", section(8), re.M)
    listed = {name: (re.findall(r"`(\w+)`", needs), re.findall(r"`(\w+)`", makes)) for name, needs, makes in rows}
    graph = train_graph(with_reference=True)
    assert listed == {stage.name: (list(stage.needs), list(stage.makes)) for stage in graph}
    assert f"every {RECONCILE_S:g} s" in prose(8)


def test_numbers_of_streams_are_the_codes() -> None:
    text = section(11)
    sentences = prose(11)
    assert f"its key has sealed more than 2^{bulk_seal.KEY_LIMIT_BYTES.bit_length() - 1} bytes" in sentences
    assert bulk_seal.KEY_LIMIT_BYTES.bit_count() == 1
    assert f"| version | {bulk.VERSION} |" in text
    assert f"a head of {bulk.HEAD_BYTES} bytes" in sentences
    assert f"1 to {bulk.MAX_RANGE_BYTES};" in text
    assert re.findall(r"^\| (\d) ([A-Z]+) \|", text, re.M) == [(str(kind.value), kind.name) for kind in bulk.Kind]
    assert f"{stream_server.MAX_LINES} lines at a time" in sentences
    assert f"{stream_server.MAX_STREAMS} streams are open" in sentences
    assert f"While {stream_server.READER_BYTES >> 20} MiB or {stream_server.READER_RANGES} ranges" in sentences
    assert f"asked for or sent for {stream_server.STREAM_IDLE_S:g} s" in sentences
    assert f"HELLO within {stream_places.PROVE_S:g} s" in sentences
    assert f"took anything for {stream_places.IDLE_S:g} s" in sentences
    assert stream_line.IDLE_S < stream_places.IDLE_S  # a reader closes its line before the store does


def test_block_file_numbers_are_the_codes() -> None:
    text = section(9)
    assert f"magic `{blockfile.MAGIC.decode()}`" in text
    assert f"layout, {blockfile.LAYOUT} " in text
    bounds = (blockfile.MAX_TASKS, blockfile.MAX_ROWS, blockfile.MAX_FILE_BYTES, blockfile.MAX_NAMES_BYTES)
    powers = [bound.bit_length() - 1 for bound in bounds]
    assert (
        f"2^{powers[0]} tasks, 2^{powers[1]} rows, 2^{powers[2]} bytes of file, 2^{powers[3]} bytes of names"
        in prose(9)
    )
