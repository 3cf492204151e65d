"""Tests that the stored vectors and this implementation agree byte for byte in both directions."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from proto import blockfile, codec, dtypes, tensors
from proto.limits import Limits
from proto.messages import Complete, CompleteAck, Error, Ping, Pong, PutSeal, PutSealed
from shared.rpc.mailbox import Mailbox
from shared.rpc.senders import STRIKES
from tests.golden import block_files, refusals
from tests.golden.block_files import BlockFile
from tests.golden.refusals import Refusal
from tests.golden.values import EXACT, plain, tensor
from tests.golden.vectors import FILES, FOLDER, INDEX, REFUSED, Vector, entry, read, vectors

ENTRIES: list[dict[str, Any]] = json.loads(INDEX.read_text())
BLOCKS: dict[str, dict[str, Any]] = {each["name"]: each for each in json.loads(FILES.read_text())}
REFUSALS: list[dict[str, Any]] = json.loads(REFUSED.read_text())
LOOSE = Limits(body_bytes=1 << 16, frames=64, frame_bytes=1 << 16, total_bytes=1 << 20)
DEADLINE_S = 20.0


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.name)
def test_encoding_produces_the_stored_bytes(vector: Vector) -> None:
    stored = {each["name"]: each for each in ENTRIES}[vector.name]
    frames = vector.frames()
    assert entry(vector, frames) == stored
    assert frames == read(vector.name, stored["frames"])


@pytest.mark.parametrize("stored", ENTRIES, ids=lambda each: each["name"])
def test_decoding_produces_the_stored_values(stored: dict[str, Any]) -> None:
    decoded = codec.decode(read(stored["name"], stored["frames"]), LOOSE)
    head = decoded.envelope
    names = ("minor", "type", "flags", "request_id", "incarnation", "remaining_ms")
    assert [plain(getattr(head, name)) for name in names] == [stored[name] for name in names]
    assert type(decoded.body).__name__ == stored["message"]
    assert plain(decoded.body) == stored["body"]
    assert [tensor(array) for array in decoded.tensors] == stored["tensors"]


def test_an_index_names_every_file_and_the_vectors_cover_every_dtype() -> None:
    listed = [each["file"] for each in [*ENTRIES, *BLOCKS.values()]]
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted([*listed, INDEX.name, FILES.name, REFUSED.name])
    seen = {each["dtype"] for stored in ENTRIES for each in stored["tensors"]}
    assert seen == {row.name for row in dtypes.TABLE}
    assert any(len(stored["frames"]) > 4 and stored["frame_bytes_limit"] == 16 for stored in ENTRIES)


@pytest.mark.parametrize("index", [INDEX, FILES, REFUSED], ids=lambda path: path.name)
def test_numbers_in_an_index_are_small_enough_to_be_exact_in_every_language(index: Path) -> None:
    def check(digits: str) -> int:
        assert abs(int(digits)) <= EXACT
        return int(digits)

    json.loads(index.read_text(), parse_int=check)


@pytest.mark.parametrize("block", block_files.block_files(), ids=lambda block: block.name)
def test_writing_a_block_file_produces_the_stored_bytes(block: BlockFile) -> None:
    data = block.data()
    assert data == (FOLDER / f"{block.name}.blk").read_bytes()
    assert block_files.entry(block, data) == BLOCKS[block.name]


@pytest.mark.parametrize("name", BLOCKS)
def test_reading_a_stored_block_file_produces_its_values(name: str) -> None:
    data, stored = (FOLDER / f"{name}.blk").read_bytes(), BLOCKS[name]
    table = blockfile.parse(data, len(data))
    assert table.task_ids == [task["task_id"] for task in stored["tasks"]]
    assert [plain(fence) for fence in table.fences] == [task["fence"] for task in stored["tasks"]]
    for index, task in enumerate(stored["tasks"]):
        checksums = [shard.checksum for shard in table.shards(index)]
        assert plain(block_files.hash_of(checksums)) == task["content_hash"]
        for shard, expected in zip(table.shards(index), task["shards"], strict=True):
            part = data[shard.offset : shard.offset + shard.nbytes]
            assert plain(tensors.checksum(part)) == expected["checksum"]
            array = np.frombuffer(part, shard.dtype.numpy).reshape(shard.shape)
            found = {"key": shard.key, **tensor(array), "offset": shard.offset, "nbytes": shard.nbytes}
            assert found | {"checksum": plain(shard.checksum)} == expected


@pytest.mark.parametrize("refusal", refusals.refusals(), ids=lambda refusal: refusal.name)
def test_stored_refusals_are_the_generated_messages(refusal: Refusal) -> None:
    assert {each["name"]: each for each in REFUSALS}[refusal.name] == refusals.entry(refusal)
    assert len(REFUSALS) == len(refusals.refusals())


@pytest.mark.parametrize("stored", REFUSALS, ids=lambda each: each["name"])
def test_mailbox_replies_to_and_counts_a_refused_message_as_the_vector_states(stored: dict[str, Any]) -> None:
    asyncio.run(_send_refused(stored))


async def _send_refused(stored: dict[str, Any]) -> None:
    """Send the message once and check its answer, then send it until the peer is quarantined."""
    frames = [bytes.fromhex(frame) for frame in stored["frames"]]
    mailbox = Mailbox("golden/0", 11)
    mailbox.handle(Ping, lambda _, __: Pong(service="golden", instance=0, incarnation=11, state="READY"))
    mailbox.handle(PutSeal, lambda _, __: PutSealed(nbytes=0))
    mailbox.handle(Complete, lambda _, __: CompleteAck())
    with tempfile.TemporaryDirectory(prefix="rlb-") as folder, zmq.Context() as context:
        endpoint = mailbox.bind(context, f"ipc://{folder}/golden-0")
        with zmq.asyncio.Context() as peer, peer.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(endpoint)

            async def answer() -> codec.Decoded:
                return codec.decode(await asyncio.wait_for(socket.recv_multipart(), DEADLINE_S))

            await socket.send_multipart(frames)
            await socket.send_multipart(codec.encode(Ping(), request_id=1, incarnation=2, remaining_s=DEADLINE_S))
            if stored["answered"] is not None:
                refused = await answer()
                assert isinstance(refused.body, Error)
                assert (refused.body.code, refused.envelope.request_id) == (stored["answered"], stored["request_id"])
            assert isinstance((await answer()).body, Pong)
            assert {name for name, count in mailbox.counts().items() if count} == {stored["counted"]}
            for _ in range(STRIKES - 1):
                await socket.send_multipart(frames)
            await _until_counted(mailbox, STRIKES)
            assert mailbox.counts()["quarantines"] == int(stored["strike"])
        await mailbox.close()


async def _until_counted(mailbox: Mailbox, messages: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while mailbox.counts()["malformed"] < messages:
            await asyncio.sleep(0)
