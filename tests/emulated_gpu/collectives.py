"""Stands in for torch's process group of NCCL: gloo on the same bytes. A collective is complete when its call returns,
so a missing wait for a collective is not noticed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d_options
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future

from tests.emulated_gpu.kernels import host, in_order


def down(value: Any) -> Any:
    """Return tensors, or lists of them, with those of devices as CPU tensors over the same bytes."""
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value
        in_order(value.device)
        return host(value)
    return [down(item) for item in value]


def done(result: Any) -> Any:
    """Return a work that is complete."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class EmulatedNccl(dist.ProcessGroup):
    class Options:
        _timeout = timedelta(minutes=10)
        split_from = None
        is_high_priority_stream = False
        group_name = ""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._rank, self._size = rank, size
        self._name = getattr(options, "group_name", "")

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    # ---- reductions

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """Return the reduction over all ranks, on the host. Like NCCL, and unlike gloo, it averages."""
        whole: Tensor = down(tensor).clone(memory_format=torch.contiguous_format)
        options = c10d_options.AllreduceOptions()
        averaged = operation == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if averaged else operation
        self._gloo.allreduce([whole], options).wait()
        return whole.div_(self._size) if averaged else whole

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        for tensor in tensors:
            down(tensor).copy_(self._reduced(tensor, operation))
        return done(tensors)

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        part = self._reduced(given, operation).flatten().chunk(self._size)[self._rank]
        down(output).copy_(part.view(output.shape))
        return done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, options)
        return done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- movements

    def allgather(self, outputs: Sequence[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        self._gloo.allgather(down(outputs), down(inputs), c10d_options.AllgatherOptions()).wait()
        return done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        return self.allgather([list(output.flatten().chunk(self._size))], [given.flatten()])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        self._gloo.broadcast(down(tensors), options or c10d_options.BroadcastOptions()).wait()
        return done(tensors)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._gloo.scatter(down(outputs), down(inputs), options or c10d_options.ScatterOptions()).wait()
        return done(outputs)

    def all_to_all_single(self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, options: Any = None) -> Any:
        options = options or c10d_options.AllToAllOptions()
        self._gloo.alltoall_base(down(output), down(given), out_sizes, in_sizes, options).wait()
        return done(output)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        self._gloo.send(down(tensors), to, tag).wait()
        return done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        self._gloo.recv(down(tensors), source, tag).wait()
        return done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier(c10d_options.BarrierOptions()).wait()
        return done(None)

    # ---- the end

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()


def install() -> None:
    """Let torch open this group where it would open NCCL's."""
    group: Callable[..., Any] = EmulatedNccl
    distributed_c10d.ProcessGroupNCCL = group
