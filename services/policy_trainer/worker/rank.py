"""Holds what the calls of one rank share: the standings of its models, its threads, its devices, and the meetings with
the other ranks.

A call can fail on a single rank only before the ranks have met. After that it fails on all of them, or the group ends.
The module does not import torch, so that a rank answers while it starts.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog

from proto import messages
from proto.messages import ErrorCode, WorkerRequest
from proto.registry import Message
from services.policy_trainer.worker.batch_reader import BatchReader
from services.policy_trainer.worker.devices import NEEDS, Devices
from services.policy_trainer.worker.standing import Standing, Standings
from services.policy_trainer.worker.weights.sender import WeightsSender
from shared.actor.own_store import own_store
from shared.actor.service import Service
from shared.colocation.devices import Part
from shared.dataplane.client import DataClient
from shared.ranks.group import Group
from shared.ranks.layout import RankPlace
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Deferred
from shared.rundir import RunDir
from shared.topology.models import TrainedModel

T = TypeVar("T")
Runner = Callable[[Any, Call], Awaitable[Message | Deferred]]
"""Runs one kind of call and returns its answer, or DEFERRED if it is answered later. Raises RpcError, GroupEnded."""


class Rank:
    """One rank of a model, before and after the model is loaded. Use it only on the event loop."""

    def __init__(
        self,
        run: RunDir,
        model: TrainedModel,
        place: RankPlace,
        group: Group,
        data: DataClient,
        compute: ThreadPoolExecutor,
        service: Service,
        sender: WeightsSender | None,
    ) -> None:
        """`compute` is the one thread that owns the model, the device and the collectives. `service` takes turns on
        devices. `sender` sends published versions to engines that ask for them; None: engines only read stores."""
        self.run, self.model, self.place, self.data, self.sender = run, model, place, data, sender
        self.publishes = model.publishes is not None and place.rank == 0
        self.standings = Standings(
            model.snapshots_in(run.shm) if model.snapshots else None, model.clients_in(run.shm), place
        )
        self.progress = 0
        """The number of micro-batches plus the number of calls that the compute thread has finished."""
        self.devices = Devices(
            model.name,
            lambda work: self.together("move", work),
            self.weights_settled,
            shows_parameters=model.publishes is not None and model.publishes.route == "ipc",
        )
        self.reader = BatchReader(data, patience_s=model.settings.collective_s / 2, on_wait=self._waited)
        self.resources = AsyncExitStack()
        """Closes everything that the rank has opened."""
        self.resources.callback(data.close)
        self.resources.callback(shutil.rmtree, model.offloaded(run.path, place.rank), ignore_errors=True)
        self.resources.callback(self.reader.forget_prefetched)
        self._group, self._compute, self._service = group, compute, service
        self._store = ""
        self._publication: asyncio.Future[None] | None = None
        self._log = structlog.get_logger("worker")

    def _waited(self, why: str, seconds: float) -> None:
        """Report that shards could not be read."""
        self._service.telemetry.emit("waiting", {"for": "shards", "why": why[:200]})
        self._service.telemetry.span("shards", seconds, of="batch-store")

    @property
    def standing(self) -> Standing:
        """The position of the model whose state is on the device."""
        return self.standings.current

    async def own_store(self) -> str:
        """Return the name of the store on this rank's host, into which its shards are put."""
        self._store = self._store or await own_store(self._service)
        return self._store

    # ---- threads and ranks

    def advance(self) -> None:
        """Count one unit of work of the compute thread."""
        self.progress += 1

    async def on_compute_thread(self, work: Callable[[], T]) -> T:
        def counted() -> T:
            result = work()
            self.advance()
            return result

        return await asyncio.get_running_loop().run_in_executor(self._compute, counted)

    async def together(self, name: str, work: Callable[[], T]) -> T:
        """Run the collective `work` on every rank. If `work` raises RpcError, it does so on all ranks (`Backend`)."""
        return await self._group.together(name, self.on_compute_thread(work))

    async def ready(self, request: WorkerRequest, preparation: Awaitable[T]) -> T:
        """Return the result of `preparation` once all ranks are prepared and the parts for the call are on the device.

        Raises RpcError on all ranks if the preparation of any rank failed.
        """
        name = f"{type(request).__name__} {request.driver:x}/{request.order}"
        try:
            prepared = await preparation
        except RpcError as error:
            await self._group.meet(name, str(error))
            raise
        await self._group.meet(name)
        await self.devices.backload(self._needs(request))
        return prepared

    async def meet(self, round_name: str, failure: str) -> None:
        """Wait for all ranks. Raises RpcError on all of them if one has a `failure`."""
        await self._group.meet(round_name, failure)

    def _needs(self, request: WorkerRequest) -> frozenset[Part]:
        if isinstance(request, messages.InitModel) and self.standing.pristine:
            # Only deterministic mode reads the weights.
            return NEEDS[messages.Forward] if self.model.deterministic else frozenset()
        return NEEDS[type(request)]

    # ---- state

    def begin_publication(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which reads the weights, in the background. It is the only one until `weights_settled`."""
        self._publication = asyncio.ensure_future(work)

    async def weights_settled(self) -> None:
        """Wait until neither a publication nor an engine is reading the weights, so that they can be changed."""
        if self._publication is not None:
            await self._publication
            self._publication = None
        if self.sender is not None:
            self.sender.changing()

    async def require_step(self, step: int, what: str) -> None:
        """Raise RpcError(conflict) unless the rank stands at `step` with the weights of that step."""
        at = self.standing
        if at.step != step or at.dirty:
            changed = ", but has changed its weights since" if at.dirty else ""
            raise RpcError(ErrorCode.CONFLICT, f"cannot {what} step {step}: the worker is at step {at.step}{changed}")

    async def require_next(self, step: int, what: str) -> None:
        """Raise RpcError(conflict) unless `step` is the one that follows the last finished step."""
        at = self.standing.step
        if step != at + 1:
            raise RpcError(ErrorCode.CONFLICT, f"cannot {what} step {step}: the worker is at step {at}")

    async def drop_gradients(self) -> None:
        """Drop the accumulated gradients and the list of their tasks."""
        self.standing.accumulated = []
        await self.devices.drop_gradients()

    def refuse(self, request: Message, call: Call, error: Exception) -> None:
        """Answer `call` with `error`. Unexpected exceptions are also logged with their traceback."""
        if isinstance(error, RpcError):
            call.fail(error)
            return
        self._log.error("call failed", request=type(request).__name__, exc_info=error)
        text = f"{self._service.name}: {type(request).__name__} failed: {type(error).__name__}: {error}"
        call.fail(RpcError(ErrorCode.INTERNAL, text[:1000]))
