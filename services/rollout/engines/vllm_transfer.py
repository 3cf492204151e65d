"""vLLM's weight-transfer API in a worker: the steps of one transfer, and `gloo`, an engine of that API for CPUs.

Only vLLM workers import this module. With gloo, weights are replaced only once all of them have arrived.

vLLM finds `TransferredWeights` by its name (`worker_extension_cls`). Importing this module registers `gloo` alongside
vLLM's own `nccl` and `ipc`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from proto.messages import TransferParameter
from services.rollout.engines.vllm_worker import PolicyWeights, repack
from shared.actor.service import PEER_LOST_STATUS
from shared.ranks.meeting import Meeting
from shared.weights.gloo import GlooGroup
from shared.weights.weight_set import room_for

GLOO = "gloo"
ABORT_S = 10.0
"""Maximum seconds that an abort may take. vLLM itself allows NCCL 5 s."""


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's sources are not read by mypy
    """The rendezvous for `world_size` ranks: the trainer as rank 0, and this engine's ranks from `rank_offset` on."""

    interface: str
    file: str
    store: str
    rank_offset: int
    world_size: int
    deadline_s: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors that are broadcast, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives broadcast weights in host memory, and loads them through vLLM's reload once all of them have arrived."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    _group: GlooGroup | None = None
    _arrived: dict[str, Tensor]

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the group. Raises TransferLost."""
        self._group = None
        rank = self.parallel_config.rank + init_info.rank_offset
        file = Path(init_info.file) if init_info.file else None
        meeting = Meeting(init_info.interface, file=file, store=init_info.store)
        self._group = GlooGroup(meeting, rank, init_info.world_size, deadline_s=init_info.deadline_s)

    def start_weight_update(self) -> None:
        self._arrived = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights as vLLM's method does, but without waiting for an accelerator, because there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Receive the tensors of one part. Raises TransferLost, which leaves the model unchanged."""
        if self._group is None:
            raise RuntimeError("gloo weight transfer: no group was joined")
        rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = room_for([TransferParameter(*row) for row in rows])
        self._group.broadcast(tensors.values())
        self._arrived |= tensors

    def finish_weight_update(self) -> None:
        tensors, self._arrived = self._arrived, {}
        if not tensors:
            raise RuntimeError("gloo weight transfer: nothing was received")
        reload_weights(
            self.vllm_config,
            self.model,
            weights_iterator=iter(tensors.items()),
            weights_path=None,
            is_checkpoint_format=True,
        )
        repack(self.model)

    def shutdown(self) -> None:
        self._group = None


WeightTransferEngineFactory.register_engine(GLOO, GlooTransferEngine)


class TransferredWeights(PolicyWeights):
    """The `PolicyWeights` of a worker to which weights are sent.

    The methods return a description of the failure, or "" on success. If a rank raised instead, vLLM 0.32 would leave
    the other ranks' answers in their queues and mistake them for answers to its next call.
    """

    weight_transfer_engine: Any
    init_weight_transfer_engine: Any
    shutdown_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def join_transfer(self, init_info: dict[str, Any], within_s: float) -> str:
        """Leave the previous communicator and join this one."""

        def join() -> None:
            self.shutdown_weight_transfer_engine()
            self.init_weight_transfer_engine(init_info)

        return self._bounded(join, within_s)

    def receive_transfer(self, update_info: dict[str, Any], within_s: float, begins: bool) -> str:
        """Receive a part of a version, the first if it `begins` one. With gloo, the model stays unchanged until
        `finish_transfer`."""

        def receive() -> None:
            trace = None if begins else self._policy_trace
            with self._policy_traced(trace or self._new_trace()):
                if begins:
                    self.start_weight_update()
                self.update_weights(update_info)

        return self._bounded(receive, within_s)

    def finish_transfer(self) -> str:
        """Load the received weights, which makes the model whole again."""

        def finish() -> None:
            with self._policy_traced(self._policy_trace or self._new_trace()):
                self.finish_weight_update()

        return _failure(finish)

    def _bounded(self, work: Callable[[], None], within_s: float) -> str:
        """Run `work`. After `within_s` seconds (0: `work` has its own deadline), abort its communicator, which ends
        `work`.

        vLLM's calls on an aborted communicator do nothing, without an error, so `work` may return as if it had
        succeeded; this is reported as a failure. If an abort is impossible because NCCL has not created the
        communicator yet, the process exits and is restarted.
        """
        if not within_s:
            return _failure(work)
        late = threading.Event()

        def abort() -> None:
            late.set()
            self.shutdown_weight_transfer_engine_now()

        aborting = threading.Timer(within_s, abort)
        exiting = threading.Timer(within_s + ABORT_S, _exit, (within_s,))
        for timer in (aborting, exiting):
            timer.daemon = True
            timer.start()
        try:
            failure = _failure(work)
            aborting.cancel()
            aborting.join()  # an abort that has begun ends this transfer, not the next one
        finally:
            aborting.cancel()
            exiting.cancel()
        return f"aborted after {within_s:g} s" if late.is_set() else failure

    def shutdown_weight_transfer_engine_now(self) -> None:
        """Shut the transfer engine down, even in the middle of an update, when vLLM's own method refuses to do so."""
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.shutdown()


def _exit(within_s: float) -> None:
    """End the process, because a call of NCCL does not return."""
    print(
        f"weight transfer: no trainer joined within {within_s:g} s, or the communicator could not be aborted within "
        f"another {ABORT_S:g} s; the process exits and is restarted",
        file=sys.stderr,
        flush=True,
    )
    os._exit(PEER_LOST_STATUS)


def _failure(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:
        return (" ".join(str(error).split()) or type(error).__name__)[:300]
    return ""
