"""Sends policy versions to engines over collectives, from the rank that puts the versions into the store. Each engine
has its own communicator and thread, so neither training nor other engines wait for it.

The version from which a GPU is training is sent from that GPU. All other versions are read from the store. The bytes
equal those that engines would read from the store, and every version that the store still has can be sent, however far
training has advanced.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from proto import messages
from proto.ids import new_incarnation
from proto.messages import ErrorCode, WeightsRef
from services.policy_trainer.worker.weights.transfers import (
    AbortTransfer,
    GrantTransfer,
    TransferRefused,
    TransferState,
)
from shared.batch import weights_meta
from shared.dataplane.client import DataClient
from shared.ranks.meeting import LOOPBACK, Meeting, announced_interface, opened
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir
from shared.topology.services import WeightsRoute

if TYPE_CHECKING:
    from torch import Tensor

    from services.policy_trainer.worker.weights.channels import Channel, LiveWeights, OutgoingWeights

KEPT = 8
"""Number of published versions to remember. The store has deleted older ones or will delete them."""
SHARDS_S = 600.0
"""Seconds during which an engine that did not join a communicator takes the shards. NCCL does not let go of its process
in a join, so it exits and is restarted, which must not happen for every version."""
Emit = Callable[[str, dict[str, float | str]], None]


@dataclass
class _ChannelThread:
    """A communicator, and the only thread that waits on it."""

    channel: Channel
    thread: ThreadPoolExecutor
    unfinished: tuple[messages.AskTransfer, OutgoingWeights] | None = None
    """The last request and its version, if the version has parts for which the engine has yet to ask."""

    def close(self) -> None:
        """Have the thread destroy the communicator as soon as the thread no longer uses it. This method does not
        wait."""
        self.channel.give_up()
        self.thread.submit(self.channel.close)
        self.thread.shutdown(wait=False)


class WeightsSender:
    """Answers AskTransfer and EndTransfer. Use it only on the event loop, which it does not block."""

    def __init__(
        self,
        run: RunDir,
        data: DataClient,
        *,
        route: WeightsRoute,
        device: str,
        deadline_s: float,
        perturbed: Callable[[WeightsRef], dict[str, Tensor]],
        emit: Emit,
        listen: Callable[[], str] = str,
    ) -> None:
        """`device` is the device on which this rank computes. `perturbed(ref)` computes the weights of the start-up
        drill. `emit(topic, values)` sends telemetry. `listen()` returns the address at which this process answers other
        hosts, or an empty string."""
        self._run = run
        self._data = data
        self._route: WeightsRoute = route
        self._device = device
        self._deadline_s = deadline_s
        self._perturbed = perturbed
        self._emit = emit
        self._listen = listen
        self._transfers = TransferState(new_incarnation, deadline_s)
        self._lines: dict[int, _ChannelThread] = {}
        self._shards_until: dict[int, float] = {}
        """Times on the loop's clock from which engines that did not join are sent weights again."""
        self._published: OrderedDict[tuple[int, int], WeightsRef] = OrderedDict()
        self._live: LiveWeights | None = None
        self._drill: asyncio.Task[dict[str, Tensor]] | None = None
        self._drill_taken = False
        """Whether the drill's weights have been handed out. An engine that did not get them in time asks again."""
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("transfer")

    def published(self, ref: WeightsRef, weights: Mapping[str, Tensor]) -> None:
        """Remember a version that engines will request. Its `weights` are live until `changing` is called."""
        from services.policy_trainer.worker.weights.channels import LiveWeights

        self._live = self._live or LiveWeights()
        self._live.show((ref.lineage, ref.step), weights)
        self._published[ref.lineage, ref.step] = ref
        while len(self._published) > KEPT:
            self._published.popitem(last=False)
        if self._drill_taken:
            self._drill = None  # it is computed again for engines that start later

    def changing(self) -> None:
        """Stop reading the live weights. This waits for copies of chunks on the GPU, which take milliseconds."""
        if self._live is not None:
            self._live.withdraw()

    async def ask(self, request: messages.AskTransfer, _: Call) -> messages.TransferOffer:
        """Begin to send the requested version and return the offer. Raises RpcError: missing, conflict."""
        from services.policy_trainer.worker.weights.channels import open_channel

        here = request.host_id == self._run.host_id
        if not here and (self._route == "ipc" or not self._listen()):
            text = f"route {self._route} works only within one host; fetch the shards instead"
            raise RpcError(ErrorCode.MISSING, text)
        left_s = self._shards_until.get(request.instance, 0.0) - asyncio.get_running_loop().time()
        if left_s > 0:
            text = f"engine {request.instance} did not join within {self._deadline_s:g} s"
            text += f"; it takes the shards for another {left_s:.0f} s"
            raise RpcError(ErrorCode.MISSING, f"route {self._route}: {text}")
        whole = self._unfinished(request) or await self._outgoing(request)
        try:
            aborts, grant = self._transfers.ask(request, asyncio.get_running_loop().time())
        except TransferRefused as error:
            raise RpcError(ErrorCode.CONFLICT, str(error)) from None
        self._carry_out(aborts)
        if grant.new:
            meeting = self._meeting(grant.communicator, here=here)
            channel = open_channel(
                self._route, meeting, 1 + request.ranks, device=self._device, deadline_s=self._deadline_s
            )
            self._lines[grant.communicator] = _ChannelThread(channel, ThreadPoolExecutor(1, f"transfer-{grant.engine}"))
        line, loop = self._lines[grant.communicator], asyncio.get_running_loop()
        try:
            offer, weights = _part(whole, line.channel.part_bytes, request, grant, self._deadline_s)
            line.unfinished = (request, whole) if offer.left else None
            offer = await loop.run_in_executor(line.thread, line.channel.announce, offer, weights)
            sending = loop.run_in_executor(line.thread, line.channel.send, weights)
        except Exception as error:
            why = _one_line(error)
            self._carry_out(self._transfers.broke(grant.communicator, why))
            raise RpcError(ErrorCode.MISSING, f"route {self._route}: {why}") from None
        sending.add_done_callback(functools.partial(self._sent, grant.communicator))
        return offer

    async def end(self, request: messages.EndTransfer, _: Call) -> messages.Ack:
        """Record that the engine has received everything, or has failed."""
        line = self._lines.get(request.communicator)
        more = line is not None and line.unfinished is not None
        self._carry_out(self._transfers.end(request, asyncio.get_running_loop().time(), more=more))
        line = self._lines.get(request.communicator)
        if line is not None:
            line.thread.submit(line.channel.ended)
        return messages.Ack()

    def close(self) -> None:
        """Close every communicator. Threads that are still sending end with the process or at their deadline."""
        if self._timer is not None:
            self._timer.cancel()
        for communicator in list(self._lines):
            self._drop(communicator)

    def _meeting(self, communicator: int, *, here: bool) -> Meeting:
        """Return the meeting for this rank and the engine, which is on this host if `here` is true."""
        if here:
            return Meeting(LOOPBACK, file=self._run.sockets / f"meet-{communicator:x}")
        listen = self._listen()
        return opened(listen) if self._route == "gloo" else Meeting(announced_interface(listen))

    def _unfinished(self, request: messages.AskTransfer) -> OutgoingWeights | None:
        """Return the weights whose next part an engine asks for. They stay the same if another version is published."""
        line = self._lines.get(request.communicator)
        if line is None or line.unfinished is None or not request.first:
            return None
        begun, weights = line.unfinished
        same = (begun.lineage, begun.step, begun.drill) == (request.lineage, request.step, request.drill)
        return weights if same else None

    async def _outgoing(self, request: messages.AskTransfer) -> OutgoingWeights:
        from services.policy_trainer.worker.weights.channels import OutgoingWeights
        from shared.weights.weight_set import described

        ref = self._published.get((request.lineage, request.step))
        if ref is None:
            raise RpcError(
                ErrorCode.MISSING,
                f"version {request.step} of lineage {request.lineage} was not published by this life of the trainer",
            )
        if request.drill:
            if self._drill is None or (self._drill.done() and self._drill.exception() is not None):
                self._drill = asyncio.create_task(asyncio.to_thread(self._perturbed, ref))
                self._drill_taken = False
            drill = await asyncio.shield(self._drill)  # the caller may give up in the meantime
            self._drill_taken = True
            return OutgoingWeights(described(drill), lambda: drill)
        version = (ref.lineage, ref.step)
        parameters = self._live.parameters(version) if self._live is not None else None
        if self._live is not None and parameters is not None:
            loop = asyncio.get_running_loop()
            stored = functools.cache(lambda: self._on_loop(self._stored(ref), loop))
            return OutgoingWeights(parameters, stored, self._live, version)
        weights = await self._stored(ref)
        return OutgoingWeights(described(weights), lambda: weights)

    def _on_loop(
        self, reading: Coroutine[Any, Any, dict[str, Tensor]], loop: asyncio.AbstractEventLoop
    ) -> dict[str, Tensor]:
        """Return the result of `reading`, which runs on `loop`. Call this from the thread of a transfer."""
        return asyncio.run_coroutine_threadsafe(reading, loop).result(self._deadline_s)

    async def _stored(self, ref: WeightsRef) -> dict[str, Tensor]:
        from shared.tensors_torch import to_torch

        (weights,) = await self._data.fetch(weights_meta(ref), (), deadline_s=self._deadline_s)
        return {name: to_torch(values) for name, values in weights.items()}

    # ---- decisions

    def _carry_out(self, aborts: Sequence[AbortTransfer]) -> None:
        """Close the communicators of aborted transfers, and wait for the next deadline."""
        for abort in aborts:
            self._log.warning("transfer aborted", engine=abort.engine, route=self._route, why=abort.why)
            self._emit("weights/aborted", {"engine": abort.engine, "route": self._route, "why": abort.why[:200]})
            self._drop(abort.communicator)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._transfers.next_deadline()
        loop = asyncio.get_running_loop()
        self._timer = None if deadline is None else loop.call_at(deadline, self._give_up_late)

    def _give_up_late(self) -> None:
        self._lost(self._transfers.expired(asyncio.get_running_loop().time()))

    def _lost(self, aborts: Sequence[AbortTransfer]) -> None:
        """Abort transfers that did not succeed here, whose engines may still wait in a join."""
        for abort in aborts:
            if not self._lines[abort.communicator].channel.joined:
                self._shards_until[abort.engine] = asyncio.get_running_loop().time() + SHARDS_S
        self._carry_out(aborts)

    def _drop(self, communicator: int) -> None:
        self._lines.pop(communicator).close()

    def _sent(self, communicator: int, sending: asyncio.Future[None]) -> None:
        """Handle a failed send. A successful send means nothing until the engine confirms it."""
        if sending.cancelled():
            return
        error = sending.exception()
        if error is not None:
            self._lost(self._transfers.broke(communicator, _one_line(error)))


def _part(
    weights: OutgoingWeights,
    limit_bytes: int | None,
    request: messages.AskTransfer,
    grant: GrantTransfer,
    deadline_s: float,
) -> tuple[messages.TransferOffer, OutgoingWeights]:
    """Return the offer of the part that begins with tensor `request.first`, and the weights in that part."""
    from shared.weights.weight_set import in_parts

    table = weights.parameters
    part = next((part for part in in_parts(table, limit_bytes) if part.start == request.first), None)
    if part is None:
        raise ValueError(f"no transfer of the {len(table)} tensors begins with tensor {request.first}")
    offer = messages.TransferOffer(
        communicator=grant.communicator,
        number=grant.number,
        deadline_s=deadline_s,
        parameters=table,
        first=part.start,
        left=len(table) - part.stop,
    )
    return offer, replace(weights, parameters=table[part])


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def perturbed_weights(model_dir: Path, dtype: str, ref: WeightsRef) -> dict[str, Tensor]:
    """Return the weights from a model directory, perturbed as in the start-up drill of `ref`, by parameter name."""
    from shared.model.load import load_model, named_weights
    from shared.tensors_torch import to_numpy, to_torch
    from shared.weights.drill import noise_factors, perturb

    named = named_weights(load_model(model_dir, dtype))
    factors = noise_factors(named, ref.drill_factors)
    return {
        name: to_torch(perturb(name, to_numpy(tensor), ref.drill_seed, factors[name])) for name, tensor in named.items()
    }
