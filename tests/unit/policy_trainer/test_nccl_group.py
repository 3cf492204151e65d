"""Only the thread that polls a communicator aborts it. The tests use a stand-in for NCCL's library.

tests/integration/policy_trainer/test_transfer_gpu.py uses the real library.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from proto.messages import AskTransfer, TransferOffer
from services.policy_trainer.worker.weights import channels, nccl, sender
from services.policy_trainer.worker.weights.channels import OutgoingWeights
from services.policy_trainer.worker.weights.nccl import NcclGroup
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.weights.gloo import TransferLost
from tests.unit.policy_trainer.test_weights_sender import FIRST, Trainer

IN_PROGRESS = 7


class Nccl:
    """A stand-in for NCCL, with a communicator that no peer joins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.polled = threading.Event()
        monkeypatch.setattr(nccl, "_library", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=0))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, threading.get_ident()))
            if name == "ncclCommGetAsyncError":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_int))[0] = IN_PROGRESS
                self.polled.set()
            return IN_PROGRESS if name == "ncclCommInitRankConfig" else 0

        return call


def test_a_communicator_that_is_given_up_is_aborted_by_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library, given_up, ended = Nccl(monkeypatch), threading.Event(), list[str]()
    group = NcclGroup(bytes(128), 2, device="cpu", deadline_s=60.0, given_up=given_up)

    def send() -> None:
        with pytest.raises(TransferLost) as raised:
            group.broadcast([[torch.zeros(1)]])
        ended.append(str(raised.value))

    thread = threading.Thread(target=send)
    thread.start()
    assert library.polled.wait(30)
    given_up.set()
    thread.join(30)
    assert ended == ["join: given up"]
    assert library.calls[-1] == ("ncclCommAbort", thread.ident)
    assert [name for name, _ in library.calls].count("ncclCommAbort") == 1


class Noted:
    """A channel that records the thread of each use, and sends until `give_up` is called."""

    part_bytes = None
    joined = False

    def __init__(self) -> None:
        self.used: list[tuple[str, int]] = []
        self.given_up, self.sending, self.closed = threading.Event(), threading.Event(), threading.Event()

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        self.used.append(("announce", threading.get_ident()))
        return offer

    def send(self, weights: OutgoingWeights) -> None:
        self.used.append(("send", threading.get_ident()))
        self.sending.set()
        assert self.given_up.wait(30)

    def ended(self) -> None:
        self.used.append(("ended", threading.get_ident()))

    def give_up(self) -> None:
        self.given_up.set()

    def close(self) -> None:
        self.used.append(("close", threading.get_ident()))
        self.closed.set()


def test_the_thread_that_sends_closes_the_channel_and_the_event_loop_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channel = Noted()
    monkeypatch.setattr(channels, "open_channel", lambda *_, **__: channel)

    async def scenario() -> float:
        trainer = Trainer(tmp_path)
        trainer.may_end.set()
        trainer.sender.published(FIRST, {})
        request = AskTransfer(
            instance=0, incarnation=1, communicator=0, ranks=1, host_id=trainer._host_id, lineage=1, step=1, drill=True
        )
        await trainer.sender.ask(request, cast(Call, None))
        assert await asyncio.to_thread(channel.sending.wait, 30)
        began = time.monotonic()
        trainer.sender.close()
        seconds = time.monotonic() - began
        assert await asyncio.to_thread(channel.closed.wait, 30)
        return seconds

    assert asyncio.run(scenario()) < 5
    assert [what for what, _ in channel.used] == ["announce", "send", "close"]
    [own] = {thread for _, thread in channel.used}
    assert own != threading.get_ident()


def test_an_engine_that_does_not_join_takes_the_shards_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise, each of its lives would hang in a join until it exits."""
    monkeypatch.setattr(channels, "open_channel", lambda *_, **__: Noted())

    async def scenario() -> None:
        trainer = Trainer(tmp_path)
        trainer.may_end.set()
        trainer.sender.published(FIRST, {})
        await trainer.asked(0, within_s=5)
        await asyncio.sleep(0.3)
        with pytest.raises(
            RpcError, match=r"gloo: engine 0 did not join within 0\.2 s; it takes the shards for another"
        ):
            await trainer.asked(0, within_s=5)
        await trainer.asked(1, within_s=5)
        trainer.sender._shards_until[0] -= sender.SHARDS_S
        await trainer.asked(0, within_s=5)
        trainer.sender.close()

    asyncio.run(scenario())
