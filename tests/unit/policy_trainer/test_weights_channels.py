"""Tests which memory and weights a channel keeps, and for how long. Where needed, a stand-in replaces the GPU library.

tests/integration/policy_trainer/test_transfer_gpu.py uses the real library.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor

from proto.messages import DeviceMemory, TransferOffer
from services.policy_trainer.worker.weights import channels
from services.policy_trainer.worker.weights.channels import LiveWeights, MemoryChannel, OutgoingWeights
from shared.weights import memory
from shared.weights.weight_set import described, in_parts

OFFER = TransferOffer(communicator=1, number=1, deadline_s=1.0, parameters=[])
NOTHING = OutgoingWeights([], dict)


class CountedMemory:
    """torch's bookkeeping for exported memory: an export is kept until its reader count is 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers: list[int] = []
        monkeypatch.setattr(memory, "exported", self.exported)
        monkeypatch.setattr(memory, "room", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
        monkeypatch.setattr(memory, "withdraw", lambda offered: self.closes(offered.counter_offset))
        monkeypatch.setattr(memory, "give_back", lambda: None)

    def exported(self, copy: Tensor) -> DeviceMemory:
        self.readers.append(1)
        return DeviceMemory(
            gpu="gpu",
            nbytes=copy.numel(),
            handle=b"",
            storage_bytes=copy.numel(),
            storage_offset=0,
            counter=b"",
            counter_offset=len(self.readers) - 1,
            event=b"",
            event_sync=False,
        )

    def closes(self, number: int) -> None:
        self.readers[number] -= 1

    @property
    def kept(self) -> int:
        return sum(count > 0 for count in self.readers)


def test_memory_that_an_engine_never_closed_is_released_when_the_channel_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = CountedMemory(monkeypatch)
    channel = MemoryChannel("cpu")
    channel.announce(OFFER, NOTHING)
    channel.close()
    assert counted.kept == 0


def test_memory_that_an_engine_has_closed_is_not_released_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedMemory(monkeypatch)
    channel = MemoryChannel("cpu")
    for number in range(2):
        channel.announce(OFFER, NOTHING)
        counted.closes(number)
        channel.ended()
    channel.close()
    assert counted.readers == [0, 0]


def weights(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((4,), value), "none": torch.zeros(0), "b": torch.full((2, 2), value), "c": torch.zeros(9)}


def unread() -> dict[str, Tensor]:
    raise AssertionError("the version in the store was read")


def test_live_weights_are_sent_while_they_are_the_requested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHUNK_BYTES", 32)
    live, mine = LiveWeights("cpu"), weights(1.0)
    live.show((1, 5), mine)
    parameters = live.parameters((1, 5))
    assert parameters == described(mine)
    chunks = list(OutgoingWeights(parameters, unread, live, (1, 5)).chunks("cpu"))
    assert [len(chunk) for chunk in chunks] == [3, 1]  # 16 + 0 + 16 bytes, and a tensor above the limit
    for sent, own in zip((each for chunk in chunks for each in chunk), mine.values(), strict=True):
        assert torch.equal(sent, own)
        # A step can change `own` while a chunk is being sent.
        assert not own.numel() or sent.data_ptr() != own.data_ptr()


def test_the_rest_of_a_version_is_read_from_the_store_once_the_live_weights_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "CHUNK_BYTES", 16)
    live, mine = LiveWeights("cpu"), weights(1.0)
    stored = {name: each.clone() for name, each in mine.items()}
    live.show((1, 5), mine)
    sent: list[Tensor] = []
    for chunk in OutgoingWeights(described(mine), lambda: stored, live, (1, 5)).chunks("cpu"):
        sent += chunk
        live.withdraw()
        for each in mine.values():
            each.add_(1.0)
    assert all(torch.equal(each, value) for each, value in zip(sent, stored.values(), strict=True))


def test_live_weights_of_another_version_are_not_sent() -> None:
    live = LiveWeights("cpu")
    live.show((1, 5), weights(1.0))
    assert live.parameters((1, 4)) is None
    assert live.copies((1, 4), ["a"], "cpu") is None


def test_weights_in_host_memory_are_read_from_the_store() -> None:
    live = LiveWeights()
    live.show((1, 5), weights(1.0))
    assert live.parameters((1, 5)) is None


def test_memory_for_an_engine_holds_all_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHUNK_BYTES", 16)
    shown: list[Tensor] = []
    counted = CountedMemory(monkeypatch)
    monkeypatch.setattr(memory, "exported", lambda copy: shown.append(copy) or counted.exported(copy))
    sent = weights(3.0)
    offer = structs.replace(OFFER, parameters=described(sent))
    MemoryChannel("cpu").announce(offer, OutgoingWeights(offer.parameters, lambda: sent))
    assert torch.equal(shown[0].view(torch.float32), torch.cat([each.reshape(-1) for each in sent.values()]))


def test_all_parts_of_a_version_take_turns_in_memory_that_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []
    counted = CountedMemory(monkeypatch)
    monkeypatch.setattr(memory, "exported", lambda copy: shown.append(copy) or counted.exported(copy))
    sent = {name: torch.full((4,), float(at)) for at, name in enumerate("abcde")}
    whole = OutgoingWeights(described(sent), lambda: sent)
    channel = MemoryChannel("cpu")
    channel.part_bytes = 32
    for version in range(2):
        arrived: list[float] = []
        for part in in_parts(whole.parameters, channel.part_bytes):
            left = len(sent) - part.stop
            offer = structs.replace(OFFER, parameters=whole.parameters, first=part.start, left=left)
            offer = channel.announce(offer, replace(whole, parameters=whole.parameters[part]))
            assert offer.memory is not None
            assert offer.memory.nbytes == 32
            count = 4 * (part.stop - part.start)
            arrived += shown[version].view(torch.float32)[:count].tolist()
            if not left:
                counted.closes(version)  # vLLM closes the memory with the last part
            channel.ended()
        assert arrived == [float(at) for at in range(5) for _ in range(4)]
    assert len(shown) == 2
    assert counted.readers == [0, 0]


def test_memory_of_a_version_that_breaks_off_after_its_first_part_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedMemory(monkeypatch)
    channel, sent = MemoryChannel("cpu"), weights(1.0)
    table = described(sent)
    first = OutgoingWeights(table[:1], lambda: sent)
    channel.announce(structs.replace(OFFER, parameters=table, left=len(table) - 1), first)
    channel.ended()
    assert counted.kept == 1
    channel.close()
    assert counted.kept == 0


def test_parts_hold_at_most_the_limit_or_a_single_tensor() -> None:
    table = described({"a": torch.zeros(4), "none": torch.zeros(0), "b": torch.zeros(4), "c": torch.zeros(9)})
    assert in_parts(table, 32) == [slice(0, 3), slice(3, 4)]
    assert in_parts(table, 16) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert in_parts(table) == [slice(0, 4)]
    assert in_parts([]) == in_parts([], 16) == [slice(0, 0)]
