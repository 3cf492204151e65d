"""Tests weight transfers with CUDA: NCCL's communicator respects its deadline, and another process on the same GPU can
read memory that a trainer exports. Only the last test needs more than one GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import torch

from proto.messages import DeviceMemory
from services.policy_trainer.worker.weights.nccl import NcclGroup, new_unique_id
from shared.ranks.meeting import LOOPBACK
from shared.weights.gloo import TransferLost
from shared.weights.memory import exported, give_back, pack_into, room, withdraw
from tests.integration.store_process import REPOSITORY

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
OPENS = """
import sys
import msgspec, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from proto.messages import DeviceMemory
from shared.weights.memory import opening

torch.cuda.init()
memory = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=DeviceMemory)
assert memory.gpu == str(torch.cuda.get_device_properties(0).uuid)
sys.stdout.buffer.write(rebuild_cuda_tensor(*opening(memory)).cpu().numpy().tobytes())
"""
OPENS_AND_HOLDS = """
import sys
import msgspec, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from proto.messages import DeviceMemory
from shared.weights.memory import opening

torch.cuda.init()
opened = rebuild_cuda_tensor(*opening(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=DeviceMemory)))
print("opened", flush=True)
sys.stdin.read()
"""
RECEIVES = """
import sys
import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

group = PyNcclCommunicator.from_unique_id_bytes(sys.stdin.buffer.read(128), rank=1, world_size=2, device="cuda:1")
for _ in range(2):
    there = torch.empty(1000, dtype=torch.bfloat16, device="cuda:1")
    group.broadcast(there, src=0)
    torch.cuda.synchronize(1)
    sys.stdout.write(f"{there.float().sum().item()}\\n")
"""


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Free the memory of earlier tests, which would otherwise be freed while a test compares what is allocated."""
    gc.collect()


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(10.0), "b": torch.arange(3).to(torch.bfloat16), "none": torch.zeros(0, 2)}


def packed() -> torch.Tensor:
    copy = room(sum(tensor.nbytes for tensor in tensors().values()), DEVICE)
    pack_into(copy, tensors().values())
    return copy


def test_another_process_reads_exported_memory_which_is_then_freed() -> None:
    before = torch.cuda.memory_allocated()
    copy = packed()
    shown = msgspec.msgpack.encode(exported(copy))
    assert msgspec.msgpack.decode(shown, type=DeviceMemory).nbytes == copy.numel() == 46
    done = subprocess.run(
        [sys.executable, "-c", OPENS], input=shown, capture_output=True, cwd=REPOSITORY, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert np.array_equal(np.frombuffer(done.stdout, np.uint8), copy.cpu().numpy())
    del copy
    give_back()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("opened", [False, True], ids=["never opened", "reader killed"])
def test_memory_that_its_reader_never_closes_is_freed_when_it_is_withdrawn(opened: bool) -> None:
    before = torch.cuda.memory_allocated()
    copy = packed()
    memory = exported(copy)
    if opened:
        command = [sys.executable, "-c", OPENS_AND_HOLDS, msgspec.msgpack.encode(memory).hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"opened\n"
            reader.kill()
    del copy
    give_back()
    assert torch.cuda.memory_allocated() > before  # torch is still waiting for the reader
    withdraw(memory)
    give_back()
    assert torch.cuda.memory_allocated() == before


def test_a_communicator_that_no_peer_joins_is_abandoned_at_the_deadline() -> None:
    group = NcclGroup(new_unique_id(LOOPBACK), 2, device=DEVICE, deadline_s=3.0)
    began = time.monotonic()
    with pytest.raises(TransferLost, match="join: not done within 3 s"):
        group.broadcast([list(tensors().values())])
    assert time.monotonic() - began < 30
    with pytest.raises(TransferLost):  # A used id is never valid again.
        group.broadcast([list(tensors().values())])


def test_a_communicator_of_one_rank_sends_and_is_closed() -> None:
    group = NcclGroup(new_unique_id(LOOPBACK), 1, device=DEVICE, deadline_s=30.0)
    for _ in range(2):
        group.broadcast([list(tensors().values())])
    group.abort()
    group.abort()


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None, reason="needs two GPUs and vllm"
)
def test_vllm_receives_the_weights_that_are_sent() -> None:
    unique_id = new_unique_id(LOOPBACK)
    command = [sys.executable, "-c", RECEIVES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        other.stdin.write(unique_id)
        other.stdin.close()
        group = NcclGroup(unique_id, 2, device=DEVICE, deadline_s=60.0)
        for value in (1.0, 2.0):
            group.broadcast([[torch.full((1000,), value, dtype=torch.bfloat16)]])
        assert other.stdout is not None
        assert other.stdout.read().decode().split() == ["1000.0", "2000.0"]
        group.abort()
