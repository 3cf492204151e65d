"""Plants missing waits in the product, one at a time. Each must give wrong values in at least one of 20 orders of late
work; without it, the values must be right in all of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from services.policy_trainer.worker.weights import channels, nccl, publish
from shared.colocation import shelf
from shared.ranks.meeting import LOOPBACK
from shared.tensors_torch import to_torch
from shared.weights import memory
from shared.weights.weight_set import described
from tests.emulated_gpu.kernels import host

SEEDS = range(20)
DEVICE = "cuda:0"
SIZE = 1 << 18
VERSION = (0, 1)
FLOAT32, SUM = 7, 0
DEADLINE_S = 30.0
_runtime = ctypes.CDLL(None)


def numbers(factor: float = 1.0) -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32) * factor


# ---- what must be right


def staged() -> bool:
    """Weights in host memory, after work of the training that is still pending."""
    weight = torch.zeros(SIZE, device=DEVICE)
    weight.copy_(numbers().pin_memory(), non_blocking=True)
    staging = publish.Staging()
    return torch.equal(to_torch(staging.arrays({"weight": weight})["weight"]), numbers())


def packed() -> bool:
    """Memory that another process reads as soon as the call returns."""
    there = [numbers(factor).to(DEVICE) for factor in (1, 2)]
    room = memory.room(sum(tensor.nbytes for tensor in there), DEVICE)
    memory.pack_into(room, there)
    return torch.equal(host(room).view(torch.float32), torch.cat([numbers(1), numbers(2)]))


def back_from_the_shelf() -> bool:
    """Weights that a transfer copies on another stream as soon as they are back."""
    weight = numbers().to(DEVICE)
    kept = shelf.Shelf(Path("unused"))
    kept.put([weight])
    torch.full((SIZE,), torch.nan, device=DEVICE)  # the memory is used by something else meanwhile
    kept.take()
    live = channels.LiveWeights()
    live.show(VERSION, {"weight": weight})
    (copy,) = live.copies(VERSION, ["weight"], DEVICE) or [torch.empty(0)]
    return torch.equal(copy.cpu(), numbers())


def sent() -> bool:
    """Chunks of live weights that another rank receives over NCCL."""
    weights = {f"{number}": numbers(number).to(DEVICE) for number in range(4)}
    live = channels.LiveWeights()
    live.show(VERSION, weights)
    outgoing = channels.OutgoingWeights(described(weights), dict, live, VERSION)
    unique_id = nccl.new_unique_id(LOOPBACK)
    received: list[Tensor] = []
    receiver = threading.Thread(target=receive, args=(unique_id, len(weights), received))
    receiver.start()
    group = nccl.NcclGroup(unique_id, 2, device=DEVICE, deadline_s=DEADLINE_S)
    with mock.patch.object(channels, "CHUNK_BYTES", numbers().nbytes):
        group.broadcast(outgoing.chunks(DEVICE))
    torch.cuda.synchronize()
    receiver.join()
    group.abort()
    return all(torch.equal(tensor, numbers(number)) for number, tensor in enumerate(received))


def receive(unique_id: bytes, count: int, received: list[Tensor]) -> None:
    """Be rank 1, with the calls of vLLM's PyNcclCommunicator."""
    library, communicator = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()
    library.ncclCommInitRank(ctypes.byref(communicator), 2, nccl._UniqueId.from_buffer_copy(unique_id), 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        queue = ctypes.c_void_p(stream.cuda_stream)
        for number in range(count + 1):
            there = torch.zeros(SIZE if number else 1, device=DEVICE)
            address, size = ctypes.c_void_p(there.data_ptr()), ctypes.c_size_t(there.numel())
            if number:
                library.ncclBroadcast(address, address, size, FLOAT32, 0, communicator, queue)
            else:
                library.ncclAllReduce(address, address, size, FLOAT32, SUM, communicator, queue)
            stream.synchronize()
            received += [there.cpu()] if number else []


# ---- what is planted


@dataclass(frozen=True)
class MissingWait:
    name: str
    modules: tuple[ModuleType, ...]
    """The module that is changed, and those that import from it."""
    old: str
    new: str
    is_right: Callable[[], bool]


MISSING_WAITS = (
    MissingWait(
        "weights are read on the host before their copies are complete",
        (channels, publish),
        "            stream.synchronize()\n",
        "            pass\n",
        staged,
    ),
    MissingWait(
        "weights are copied before the training has finished them",
        (channels, publish),
        "cuda.current_stream(device).wait_stream(cuda.default_stream(device))",
        "pass",
        staged,
    ),
    MissingWait(
        "memory is offered to another process before it is filled",
        (memory,),
        "torch.cuda.current_stream(memory.device).synchronize()",
        "pass",
        packed,
    ),
    MissingWait(
        "weights are used by other streams before they are back from the shelf",
        (shelf,),
        "_device_bytes(storage).copy_(piece, non_blocking=True)\n            torch.cuda.synchronize()\n",
        "_device_bytes(storage).copy_(piece, non_blocking=True)\n",
        back_from_the_shelf,
    ),
    MissingWait(
        "a chunk is freed before NCCL has sent it",
        (nccl,),
        "                        self._wait_for_stream(deadline)\n                        del sent",
        "                        del sent",
        sent,
    ),
)


@contextmanager
def planted(wait: MissingWait) -> Iterator[None]:
    """Run the changed source of a module in its own namespace, and afterwards the original again."""
    sources = [Path(str(module.__file__)).read_text() for module in wait.modules]
    assert sources[0].count(wait.old) == 1, f"{wait.name}: the line to remove has changed"
    changed = [sources[0].replace(wait.old, wait.new), *sources[1:]]
    before = [dict(vars(module)) for module in wait.modules]
    try:
        for module, source in zip(wait.modules, changed, strict=True):
            exec(compile(source, str(module.__file__), "exec"), vars(module))  # noqa: S102
        yield
    finally:
        for module, names in zip(wait.modules, before, strict=True):
            vars(module).update(names)  # the classes that other tests have imported


def wrong_seeds(wait: MissingWait) -> list[int]:
    """Return the seeds with which the values are wrong."""
    wrong = []
    for seed in SEEDS:
        torch.cuda.synchronize()
        _runtime.emulated_gpu_seed(ctypes.c_long(seed))
        if not wait.is_right():
            wrong.append(seed)
    torch.cuda.synchronize()
    return wrong


@pytest.mark.parametrize("wait", MISSING_WAITS, ids=lambda wait: wait.name)
def test_a_missing_wait_gives_wrong_values(wait: MissingWait) -> None:
    with planted(wait):
        assert wrong_seeds(wait)
    assert wrong_seeds(wait) == []


def test_a_missing_wait_is_not_noticed_if_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_GPU_LATE", "0")
    _runtime.emulated_gpu_seed(ctypes.c_long(0))
    with planted(MISSING_WAITS[0]):
        assert staged()
    monkeypatch.undo()
    _runtime.emulated_gpu_seed(ctypes.c_long(0))  # which reads the variable
