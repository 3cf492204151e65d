"""The asking side of the bus: one DEALER a peer. It must never wait without a deadline.

A request is sent again under the same id until it is answered or its deadline passes, so that it survives the restart
of the peer; the peer answers each id once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import zmq

from proto import codec
from proto.envelope import FLAG_ONE_WAY
from proto.errors import WireError
from proto.limits import CONTROL, Limits
from proto.messages import Error
from proto.registry import Message, Request
from proto.tensors import Array
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.transport import Pump, open_socket

R = TypeVar("R", bound=Message)
FIRST_RESEND_S = 0.25
LAST_RESEND_S = 2.0


@dataclass
class _Pending:
    request: Request
    arrays: Sequence[Array]
    deadline: float
    future: asyncio.Future[codec.Decoded]
    resend_s: float = FIRST_RESEND_S
    timer: asyncio.TimerHandle | None = field(default=None)


class Client:
    """Sends requests to one peer. Belongs to the event loop it was made on; safe to share among its tasks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        peer: str,
        incarnation: int,
        limits: Limits = CONTROL,
    ) -> None:
        """`peer`: the name for error messages; `incarnation`: of the calling process (retries are known by it)."""
        self.peer = peer
        self.endpoint = endpoint
        self._incarnation = incarnation
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._log = structlog.get_logger("rpc").bind(peer=peer)
        socket = open_socket(context, zmq.DEALER, limits)
        socket.connect(endpoint)
        self._pump = Pump(socket, self._on_message)

    async def call(self, request: Request, reply: type[R], *, deadline_s: float, arrays: Sequence[Array] = ()) -> R:
        """Send `request`, return its reply.

        Raises RpcError when the peer answers Error (see its `code`), DeadlineExceeded when no answer came within
        `deadline_s` seconds, WireError when the request itself is over the limits.
        """
        body = (await self.exchange(request, deadline_s=deadline_s, arrays=arrays)).body
        if not isinstance(body, reply):
            raise WireError(f"{self.peer} answered {type(request).__name__} with a {type(body).__name__}")
        return body

    async def exchange(self, request: Request, *, deadline_s: float, arrays: Sequence[Array] = ()) -> codec.Decoded:
        """Like `call`, and returns the reply's tensors too."""
        if deadline_s <= 0:
            raise DeadlineExceeded(f"{type(request).__name__} to {self.peer}: no time left before it was sent")
        request_id = next(self._ids)
        pending = _Pending(request, arrays, self._loop.time() + deadline_s, self._loop.create_future())
        self._pending[request_id] = pending
        try:
            self._send(request_id, pending)
            async with asyncio.timeout(deadline_s):
                return await pending.future
        except TimeoutError:
            raise DeadlineExceeded(
                f"{type(request).__name__} to {self.peer}: no answer in {deadline_s:g} s; is it running? (ctl status)"
            ) from None
        finally:
            del self._pending[request_id]
            if pending.timer is not None:
                pending.timer.cancel()

    def tell(self, message: Message) -> bool:
        """Send a one-way message. False: it was dropped because the peer's queue is full."""
        return self._pump.send(
            codec.encode(message, request_id=0, incarnation=self._incarnation, flags=FLAG_ONE_WAY, limits=self._limits)
        )

    def close(self) -> None:
        """Fail what is pending and close the socket."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(DeadlineExceeded(f"client of {self.peer} was closed"))
        self._pump.close()

    def _send(self, request_id: int, pending: _Pending) -> None:
        self._pump.send(
            codec.encode(
                pending.request,
                request_id=request_id,
                incarnation=self._incarnation,
                remaining_s=max(pending.deadline - self._loop.time(), 0.001),
                arrays=pending.arrays,
                limits=self._limits,
            )
        )
        pending.timer = self._loop.call_later(pending.resend_s, self._resend, request_id)

    def _resend(self, request_id: int) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.future.done():
            pending.resend_s = min(pending.resend_s * 2, LAST_RESEND_S)
            self._send(request_id, pending)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            decoded = codec.decode(frames, self._limits)
        except WireError as error:
            self._log.warning("bad reply dropped", error=str(error))
            return
        pending = self._pending.get(decoded.envelope.request_id)
        if pending is None or pending.future.done():
            return  # the answer to a retry of something answered or given up
        body = decoded.body
        if isinstance(body, Error):
            pending.future.set_exception(
                RpcError(body.code, body.message, retry_after_s=body.retry_after_s, names=list(body.names))
            )
        else:
            pending.future.set_result(decoded)
