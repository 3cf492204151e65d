"""An engine's end of a weight transfer: asks the trainer, joins its communicator, receives into memory of its own. Must
never hand out a part of a version, nor wait past the deadline.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proto.errors import WireError
from proto.messages import Ack, AskTransfer, EndTransfer, TransferOffer, WeightsRef
from proto.tensors import Array
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir

if TYPE_CHECKING:
    from shared.transfer.gloo import GlooGroup

END_S = 5.0


class TransferFailed(Exception):
    """No version came. The engine holds what it held; the communicator is no more. One line."""


@dataclass
class _Line:
    """A communicator and the thread that it is used on. `group` belongs to that thread."""

    communicator: int
    thread: ThreadPoolExecutor
    group: GlooGroup | None = None


class Transfers:
    """The one communicator of an engine. Belongs to the service's loop; transfers never overlap."""

    def __init__(self, run: RunDir, trainer: Client, *, instance: int, incarnation: int, deadline_s: float) -> None:
        """`trainer`: its rank 0; `incarnation`: of this life of the engine."""
        self._run = run
        self._trainer = trainer
        self._instance = instance
        self._incarnation = incarnation
        self._deadline_s = deadline_s
        self._busy = asyncio.Lock()
        self._line: _Line | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def communicator(self) -> int:
        """The one that is held; 0 for none."""
        return self._line.communicator if self._line is not None else 0

    async def receive(self, ref: WeightsRef, *, drill: bool) -> dict[str, Array]:
        """The weights of `ref`, or of its start-up drill, by parameter name. Raises TransferFailed."""
        async with self._busy:
            try:
                offer = await self._trainer.call(self._ask(ref, drill), TransferOffer, deadline_s=self._deadline_s)
            except (RpcError, WireError) as error:
                raise TransferFailed(str(error)) from None
            line = self._line
            if line is None or line.communicator != offer.communicator:
                self.close()
                line = self._line = _Line(offer.communicator, ThreadPoolExecutor(1, "transfer"))
            try:
                work = asyncio.get_running_loop().run_in_executor(line.thread, self._take, line, offer)
                received = await asyncio.wait_for(work, offer.deadline_s)
            except BaseException as error:
                self.close()
                if isinstance(error, asyncio.CancelledError):
                    raise
                why = str(error) or f"{type(error).__name__} after {offer.deadline_s:g} s"
                self._telling = asyncio.create_task(self._end(offer, why))  # a dead trainer is not waited for
                raise TransferFailed(why) from None
            await self._end(offer, "")
            return received

    def close(self) -> None:
        """Give the communicator up; a thread that still receives ends at its deadline, and nobody sees what came."""
        if self._line is not None:
            self._line.thread.shutdown(wait=False, cancel_futures=True)
            self._line = None

    def _ask(self, ref: WeightsRef, drill: bool) -> AskTransfer:
        return AskTransfer(
            instance=self._instance,
            incarnation=self._incarnation,
            communicator=self.communicator,
            ranks=1,
            host_id=self._run.host_id,
            lineage=ref.lineage,
            step=ref.step,
            drill=drill,
        )

    async def _end(self, offer: TransferOffer, failure: str) -> None:
        """A trainer that does not hear of it ends the communicator at the deadline; so does this end."""
        request = EndTransfer(
            instance=self._instance,
            incarnation=self._incarnation,
            communicator=offer.communicator,
            number=offer.number,
            failure=failure[:500],
        )
        try:
            await self._trainer.call(request, Ack, deadline_s=END_S)
        except (RpcError, WireError):
            if self.communicator == offer.communicator:
                self.close()

    # ---- on the thread

    def _take(self, line: _Line, offer: TransferOffer) -> dict[str, Array]:
        from shared.tensors_torch import to_numpy
        from shared.transfer.gloo import GlooGroup
        from shared.transfer.table import room_for

        if line.group is None:
            meeting = self._run.sockets / Path(offer.meeting).name
            line.group = GlooGroup(meeting, 1, 2, deadline_s=offer.deadline_s)
        tensors = room_for(offer.parameters)
        line.group.broadcast(tensors.values())
        return {name: to_numpy(tensor) for name, tensor in tensors.items()}
