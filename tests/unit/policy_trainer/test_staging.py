"""Tests how a version is brought into host memory and put, while the worker continues to answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from proto.messages import ErrorCode, Publish
from proto.tensors import Array
from services.policy_trainer.worker.weights.publish import Staging, put_and_digested, put_weights
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_torch
from shared.weights.weight_set import WeightSet

LIMIT_S = 20.0


def weights(device: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "wide": torch.randn(300, 70, generator=made).to(device, torch.bfloat16),
        "one": torch.randn((), generator=made).to(device),
    }


def test_weights_in_host_memory_are_not_copied() -> None:
    given = weights("cpu")
    arrays = Staging().arrays(given)
    assert all(arrays[name].ctypes.data == given[name].data_ptr() for name in given)


def test_the_event_loop_continues_while_weights_are_copied() -> None:
    answered = threading.Event()

    class Slow:
        def arrays(self, weights: dict[str, Tensor]) -> dict[str, Array]:
            assert answered.wait(LIMIT_S)
            return {}

    class Store:
        async def put(self, *_: Any, **__: Any) -> list[str]:
            return ["receipt"]

    async def scene() -> None:
        request = Publish(driver=1, order=1, lineage=1, step=1, store="batch-store/0", fence=1)
        put = asyncio.ensure_future(put_weights(cast(Any, Store()), weights("cpu"), request, cast(Any, Slow())))
        await asyncio.sleep(0)
        answered.set()  # called on the event loop, where the worker's mailbox also sends its answers
        assert await put == "receipt"

    asyncio.run(scene())


@pytest.mark.gpu
def test_weights_are_copied_from_a_gpu_bit_for_bit_into_memory_that_is_reused() -> None:
    staging = Staging()
    first = staging.arrays(weights("cuda"))
    second = staging.arrays({name: tensor + 1 for name, tensor in weights("cuda").items()})
    assert [each.ctypes.data for each in first.values()] == [each.ctypes.data for each in second.values()]
    for name, tensor in weights("cuda").items():
        assert torch.equal(to_torch(second[name]), (tensor + 1).cpu())


@pytest.mark.gpu
def test_copies_do_not_wait_for_work_that_another_stream_has_been_given() -> None:
    given, staging = weights("cuda"), Staging()
    staging.arrays(given)
    training: Any = torch.cuda.Stream()
    with torch.cuda.stream(training):
        torch.cuda._sleep(4_000_000_000)
    staging.arrays(given)
    assert not training.query()


def test_a_failed_put_is_reported_only_once_the_digests_no_longer_read_the_weights() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        put, digests = loop.create_future(), loop.create_future()
        both = asyncio.ensure_future(put_and_digested(put, digests))
        put.set_exception(RpcError(ErrorCode.BUSY, "no room"))
        await asyncio.sleep(0.01)
        assert not both.done()
        digests.set_result(WeightSet(()))
        with pytest.raises(RpcError, match="no room"):
            await both

    asyncio.run(scenario())
