"""An engine's side of weight transfers. It requests transfers, keeps the communicator, and reports how transfers ended.

A communicator that may contain half a version is always discarded. A `Receiver` decides where the bytes go: into this
process's memory (`HostMemory`) or into an engine's own memory (vLLM).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from msgspec import structs

from proto.errors import WireError
from proto.messages import Ack, AskTransfer, EndTransfer, TransferOffer, WeightsRef
from proto.tensors import Array
from shared.ranks.meeting import LOOPBACK, Meeting, announced_interface
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir

if TYPE_CHECKING:
    from shared.weights.gloo import GlooGroup

END_S = 5.0
R = TypeVar("R", covariant=True)


class TransferFailed(Exception):
    """No version arrived. The engine keeps its current version, and the communicator is gone. The message is one
    line."""


@runtime_checkable
class Receiver(Protocol[R]):
    """Joins communicators and receives weights, for one engine."""

    @property
    def ranks(self) -> int:
        """Number of processes that join."""

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> R:
        """Receive what `offer` carries. Join its communicator first (gloo: at `meeting`) if it differs from the last
        one.

        The call ends at the offer's deadline. After any exception, the receiver has left the communicator. An engine
        that no longer has a complete version raises RpcError.
        """

    def broken_off(self, why: str) -> Exception:
        """Return the error for a version of which only the first parts have arrived."""

    def leave(self) -> None:
        """Leave the communicator."""


class EngineTransfers:
    """The communicator of one engine. It is used only on the service's loop; transfers never overlap."""

    def __init__(
        self,
        run: RunDir,
        trainer: Client,
        *,
        instance: int,
        incarnation: int,
        deadline_s: float,
        listen: Callable[[], str] = str,
    ) -> None:
        """`trainer` is a client of the trainer's rank 0; `incarnation` identifies this life of the engine; `listen()`
        returns the address at which this process answers other hosts, or an empty string."""
        self._run = run
        self._listen = listen
        self._trainer = trainer
        self._instance = instance
        self._incarnation = incarnation
        self._deadline_s = deadline_s
        self._busy = asyncio.Lock()
        self._offer: TransferOffer | None = None
        """The last offer, until it is taken or declined."""
        self._wanted: AskTransfer
        """The last request."""
        self._asked = 0
        self._telling: set[asyncio.Task[bool]] = set()
        self.communicator = 0
        """Id of the current communicator, or 0 if there is none."""

    async def bring(self, ref: WeightsRef, receiver: Receiver[R], *, drill: bool) -> R:
        """Bring the weights of `ref`, or of its start-up drill, to `receiver`.

        Raises TransferFailed, and any RpcError from the receiver.
        """
        async with self._busy:
            return await self._take(await self._offered(self._ask(ref, receiver.ranks, drill)), receiver)

    async def ask(self, ref: WeightsRef, receiver: Receiver[R]) -> TransferOffer:
        """Do the first half of `bring`, so that the caller can then wait for its turn. Raises TransferFailed.

        Take or decline the offer within the deadline. Another transfer that begins in the meantime invalidates the
        offer.
        """
        async with self._busy:  # the trainer would abandon a running transfer
            pass
        return await self._offered(self._ask(ref, receiver.ranks, drill=False))

    async def take(self, offer: TransferOffer, receiver: Receiver[R]) -> R:
        """Do the second half of `bring` and raise the same errors."""
        async with self._busy:
            return await self._take(offer, receiver)

    async def _take(self, offer: TransferOffer, receiver: Receiver[R]) -> R:
        """Receive `offer` and the parts of the version that it does not carry."""
        if offer is not self._offer:
            raise TransferFailed("another transfer began meanwhile")
        received = await self._receive(offer, receiver)
        while offer.left:
            try:
                offer = await self._next_part(offer, receiver)
                received = await self._receive(offer, receiver)
            except BaseException as error:
                cancelled = isinstance(error, asyncio.CancelledError)
                why = "cancelled" if cancelled else str(error)
                if self.communicator:
                    self._leave(offer, receiver, "" if cancelled else why)
                broken_off = receiver.broken_off(why)
                if isinstance(error, TransferFailed):
                    raise broken_off from None
                raise
        return received

    async def _next_part(self, last: TransferOffer, receiver: Receiver[R]) -> TransferOffer:
        """Ask for the part after `last`. Raises TransferFailed."""
        wanted = structs.replace(self._wanted, communicator=self.communicator, first=len(last.parameters) - last.left)
        offer = await self._offered(wanted)
        if offer.communicator != last.communicator or offer.parameters != last.parameters:
            self._offer, why = None, "the trainer no longer sends the same version"
            self._leave(offer, receiver, why)
            raise TransferFailed(why)
        return offer

    async def _receive(self, offer: TransferOffer, receiver: Receiver[R]) -> R:
        self._offer = None
        try:
            received = await receiver.receive(offer, self._meeting(offer))
        except BaseException as error:
            why = str(error) or type(error).__name__
            self._leave(offer, receiver, "" if isinstance(error, asyncio.CancelledError) else why)
            if isinstance(error, asyncio.CancelledError | RpcError):
                raise
            raise TransferFailed(why) from None
        if not await self._end(offer, "") and not offer.left:  # a request for the next part says the same
            self._leave(offer, receiver, "")
        return received

    def _meeting(self, offer: TransferOffer) -> Meeting:
        """Return the rendezvous address at which this engine meets the trainer.

        Raises TransferFailed if the trainer is on another host and this process does not listen for other hosts.
        """
        if not offer.store:
            return Meeting(LOOPBACK, file=self._run.sockets / Path(offer.meeting).name)
        try:
            return Meeting(announced_interface(self._listen()), store=offer.store)
        except RpcError as error:
            raise TransferFailed(str(error)) from None

    def decline(self, offer: TransferOffer, receiver: Receiver[R]) -> None:
        """Decline an offer that will not be taken."""
        if offer is self._offer:
            self._offer = None
            self._leave(offer, receiver, "no longer needed")

    async def _offered(self, wanted: AskTransfer) -> TransferOffer:
        self._offer, self._wanted = None, wanted
        self._asked += 1
        number = self._asked
        try:
            offer = await self._trainer.call(wanted, TransferOffer, deadline_s=self._deadline_s)
        except (RpcError, WireError) as error:
            raise TransferFailed(str(error)) from None
        if number != self._asked:
            raise TransferFailed("another transfer was requested in the meantime")
        self.communicator = offer.communicator
        self._offer = offer
        return offer

    def _leave(self, offer: TransferOffer, receiver: Receiver[R], why: str) -> None:
        self.communicator = 0
        receiver.leave()
        if why:
            telling = asyncio.create_task(self._end(offer, why))  # a task, so that nothing waits for a dead trainer
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    def _ask(self, ref: WeightsRef, ranks: int, drill: bool) -> AskTransfer:
        return AskTransfer(
            instance=self._instance,
            incarnation=self._incarnation,
            communicator=self.communicator,
            ranks=ranks,
            host_id=self._run.host_id,
            lineage=ref.lineage,
            step=ref.step,
            drill=drill,
        )

    async def _end(self, offer: TransferOffer, failure: str) -> bool:
        """Report the end of a transfer and return whether the trainer received the report. If it did not, the trainer
        acts at its deadline."""
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
            return False
        return True


class HostMemory:
    """A `Receiver` that receives into new memory in this process, on its own thread, while the engine keeps working."""

    ranks = 1

    def __init__(self) -> None:
        self._line: _ReceivingLine | None = None

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> dict[str, Array]:
        """Return the arrays by parameter name."""
        if self._line is None or self._line.communicator != offer.communicator:
            self.leave()
            self._line = _ReceivingLine(offer.communicator)
        line = self._line
        return await asyncio.get_running_loop().run_in_executor(line.thread, line.take, offer, meeting)

    def broken_off(self, why: str) -> Exception:
        return TransferFailed(why)

    def leave(self) -> None:
        """Leave the communicator. A thread that is still receiving ends at its deadline, and its result is dropped."""
        if self._line is not None:
            self._line.thread.shutdown(wait=False, cancel_futures=True)
            self._line = None


class _ReceivingLine:
    """A communicator and the thread that uses it."""

    def __init__(self, communicator: int) -> None:
        self.communicator = communicator
        self.thread = ThreadPoolExecutor(1, "transfer")
        self._group: GlooGroup | None = None

    def take(self, offer: TransferOffer, meeting: Meeting) -> dict[str, Array]:
        from shared.tensors_torch import to_numpy
        from shared.weights.gloo import GlooGroup
        from shared.weights.weight_set import room_for

        if self._group is None:
            self._group = GlooGroup(meeting, 1, 2, deadline_s=offer.deadline_s)
        tensors = room_for(offer.parameters)
        self._group.broadcast(tensors.values())
        return {name: to_numpy(tensor) for name, tensor in tensors.items()}
