"""The client side of the bus: one DEALER per peer. No call waits without a deadline.

A request is sent again under the same id until it is answered or its deadline passes, so it survives a restart of the
peer. By this id, the peer recognizes retries: within one life, it handles each request only once.

In a run on several hosts, `Directory` keeps clients connected to the current endpoints of their peers. Its look-ups
never block a request: a client without a connection keeps its requests until it is connected or their deadline passes.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import zmq

from proto import codec, envelope
from proto.envelope import FLAG_ONE_WAY, FLAG_REPLY
from proto.errors import WireError
from proto.messages import Error, ErrorCode, WaitKind, WaitRow
from proto.registry import Message, Request
from proto.tensors import Buffer
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.transport import Pump, open_socket
from shared.security.curve import clear, is_tcp, unlock
from shared.security.keys import Keyring

R = TypeVar("R", bound=Message)
FIRST_RESEND_S = 0.25
LAST_RESEND_S = 2.0
RESEND_BYTES_PER_S = 16 << 20
"""Assumed transfer rate. It determines how long the first retry of a large request is delayed."""
LOCAL_RECONNECT_MS = 100
"""Maximum time, in milliseconds, between attempts to connect to a peer on this host. An attempt costs next to
nothing."""
UNSENT_MESSAGES = 64
"""Maximum number of one-way messages that are kept until the peer connects."""
STILL_REFUSED_S = 3.0
"""Seconds after which a refused request that was not repeated no longer counts as a wait."""
RETRY_S = 0.5
"""Seconds between two look-ups of a peer that is not registered yet."""
PAUSE_S = 1.0
"""Seconds between two look-ups of a connected peer that is silent: it may be busy, or it may have moved."""
Find = Callable[[str, int], Awaitable[str]]
"""Function that returns the endpoint of (service, instance) as seen from this host, or raises RpcError if it is
unknown."""


@dataclass(slots=True)
class _Refusals:
    """The peer's consecutive refusals of requests of one kind for lack of room."""

    began: float
    last: float
    text: str


@dataclass(slots=True)
class _Pending:
    frames: list[Buffer]
    deadline: float
    future: asyncio.Future[codec.Decoded]
    resend_s: float
    kind: str
    began: float
    sent: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)


class Client:
    """Sends requests to one peer. It belongs to the event loop on which it was created; tasks of that loop may share
    it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        peer: str,
        incarnation: int,
        keys: Keyring | None = None,
    ) -> None:
        """`peer` is the name used in error messages. `incarnation` identifies the calling process; peers recognize a
        retry by it and the request id.

        With an empty `endpoint`, nothing is sent before `connect` is called. Peers on other hosts (tcp) need `keys`.
        Raises RpcError(bad_request) for a tcp endpoint without keys.
        """
        self.peer = peer
        self.endpoint = ""
        self.on_silent: Callable[[], None] | None = None
        """Callback for when the peer does not answer, or None. The peer may have moved (see `connect`)."""
        self._keys = keys
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        # Ids start at random: clients of a process share its incarnation, and peers identify retries by both.
        self._ids = itertools.count(secrets.randbits(62))
        self._pending: dict[int, _Pending] = {}
        self._unsent: deque[list[Buffer]] = deque()
        self._closed = False
        self._refusals: dict[str, _Refusals] = {}
        self._log = structlog.get_logger("rpc", peer=peer)
        self._socket = open_socket(context, zmq.DEALER)
        try:
            if endpoint:
                self._dial(endpoint)
        except RpcError:
            self._socket.close()
            raise
        self._pump = Pump(
            self._socket, self._on_message, on_writable=self._on_writable, on_lost=self._forget_what_was_sent
        )

    def connect(self, endpoint: str) -> None:
        """Connect to `endpoint` instead and send unanswered requests again. Does nothing if it is the same endpoint."""
        if self._closed or endpoint == self.endpoint:
            return
        if self.endpoint:
            before, self.endpoint = self.endpoint, ""  # even if connecting to the new one fails
            self._socket.disconnect(before)
        self._dial(endpoint)
        self._forget_what_was_sent()
        self._pump.wait_writable()

    def _dial(self, endpoint: str) -> None:
        if not is_tcp(endpoint):
            clear(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, LOCAL_RECONNECT_MS)
        elif self._keys is None:
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self.peer} at {endpoint}: tcp needs the run's keys; this process has none"
            )
        else:
            unlock(self._socket, self._keys)
        self._socket.connect(endpoint)
        self.endpoint = endpoint

    async def call(self, request: Request, reply: type[R], *, deadline_s: float) -> R:
        """Send `request` and return its reply.

        Raises RpcError when the peer answers with Error (see its `code`), DeadlineExceeded when no answer arrives
        within `deadline_s` seconds, and WireError when the request itself exceeds the limits.
        """
        body = (await self.exchange(request, deadline_s=deadline_s)).body
        if not isinstance(body, reply):
            raise WireError(f"{self.peer} answered {type(request).__name__} with a {type(body).__name__}")
        return body

    async def exchange(self, request: Request, *, deadline_s: float) -> codec.Decoded:
        """Send `request` as `call` does, but return the reply with its envelope."""
        if deadline_s <= 0:
            raise DeadlineExceeded(f"{type(request).__name__} to {self.peer}: no time left before it was sent")
        if self._closed:
            raise DeadlineExceeded(f"{type(request).__name__} to {self.peer}: this client was closed")
        request_id = next(self._ids)
        frames = codec.encode(request, request_id=request_id, incarnation=self._incarnation, remaining_s=deadline_s)
        began = self._loop.time()
        pending = _Pending(
            frames,
            began + deadline_s,
            self._loop.create_future(),
            FIRST_RESEND_S + sum(map(len, frames)) / RESEND_BYTES_PER_S,
            type(request).__name__,
            began,
        )
        self._pending[request_id] = pending
        try:
            pending.sent = self._pump.send(frames)
            pending.timer = self._loop.call_later(min(pending.resend_s, deadline_s), self._on_timer, request_id)
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
        """Send a one-way message. Return False if it was dropped because the peer is unavailable or its queue is full.

        The first `UNSENT_MESSAGES` messages to a peer that is not yet connected are kept until it is.
        """
        if self._closed:
            return False
        frames = codec.encode(message, request_id=0, incarnation=self._incarnation, flags=FLAG_ONE_WAY)
        if not self._unsent and self._pump.send(frames):
            return True
        if self.on_silent is not None:
            self.on_silent()
        if len(self._unsent) >= UNSENT_MESSAGES:
            return False
        self._unsent.append(frames)
        return True

    def waits(self) -> Iterator[WaitRow]:
        """Yield the requests that the peer has not answered, and those that it keeps refusing for lack of room."""
        now = self._loop.time()
        for call in self._pending.values():
            yield WaitRow(WaitKind.CALL, call.kind, now - call.began, call.deadline - call.began, self.peer)
        for kind, refused in self._refusals.items():
            if now - refused.last < STILL_REFUSED_S:
                yield WaitRow(WaitKind.REFUSED, f"{kind}: {refused.text}", now - refused.began, 0.0, self.peer)

    def _note_refusal(self, kind: str, error: Error | None) -> None:
        if error is None or error.code not in (ErrorCode.BUSY, ErrorCode.DRAINING):
            self._refusals.pop(kind, None)
            return
        now = self._loop.time()
        earlier = self._refusals.get(kind)
        lapsed = earlier is None or now - earlier.last > STILL_REFUSED_S
        self._refusals[kind] = _Refusals(now if earlier is None or lapsed else earlier.began, now, error.message)

    def close(self) -> None:
        """Fail all pending requests and close the socket."""
        self._closed = True
        self._unsent.clear()
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(DeadlineExceeded(f"client of {self.peer} was closed"))
        self._pump.close()

    def _on_timer(self, request_id: int) -> None:
        """Give up at the deadline. Before the deadline, send the request again: the peer may have restarted."""
        pending = self._pending.get(request_id)
        if pending is None or pending.future.done():
            return
        left_s = pending.deadline - self._loop.time()
        if left_s <= 0:
            pending.future.set_exception(TimeoutError())
            return
        if self.on_silent is not None:
            self.on_silent()
        self._send_again(pending, left_s)
        pending.resend_s = min(pending.resend_s * 2, max(LAST_RESEND_S, pending.resend_s))
        pending.timer = self._loop.call_later(min(pending.resend_s, left_s), self._on_timer, request_id)

    def _send_again(self, pending: _Pending, left_s: float) -> None:
        pending.frames[0] = envelope.with_remaining(pending.frames[0], left_s)
        pending.sent = self._pump.send(pending.frames)

    def _forget_what_was_sent(self) -> None:
        """Mark every unanswered request to be sent again once there is a connection: the peer may have restarted."""
        for pending in self._pending.values():
            pending.sent = False

    def _on_writable(self) -> None:
        """Send the messages that could not be sent while the peer was unavailable."""
        while self._unsent and self._pump.send(self._unsent[0]):
            self._unsent.popleft()
        for pending in list(self._pending.values()):
            left_s = pending.deadline - self._loop.time()
            if not pending.sent and left_s > 0 and not pending.future.done():
                self._send_again(pending, left_s)
                if not pending.sent:
                    return

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            decoded = codec.decode(frames)
        except WireError as error:
            self._log.warning("bad reply dropped", error=str(error))
            return
        if not decoded.envelope.flags & FLAG_REPLY:
            self._log.warning("request to a client dropped", request=type(decoded.body).__name__)
            return
        pending = self._pending.get(decoded.envelope.request_id)
        if pending is None or pending.future.done():
            return  # the answer to a retry of a request that has been answered or abandoned
        body = decoded.body
        if isinstance(body, Error) or self._refusals:
            self._note_refusal(pending.kind, body if isinstance(body, Error) else None)
        if isinstance(body, Error):
            pending.future.set_exception(
                RpcError(body.code, body.message, retry_after_s=body.retry_after_s, names=list(body.names))
            )
        else:
            pending.future.set_result(decoded)


class Directory:
    """Look-ups for the clients of one process. It belongs to one event loop."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._searches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._log = structlog.get_logger("directory")

    def follow(self, service: str, instance: int, client: Client) -> None:
        """Connect `client` to that service as soon as its endpoint is known, and again whenever the service moves."""
        key = (service, instance)

        def look() -> None:
            search = self._searches.get(key)
            if search is None or search.done():
                self._searches[key] = asyncio.create_task(self._search(key, client))

        client.on_silent = look
        look()

    async def close(self) -> None:
        """Cancel all look-ups."""
        for search in self._searches.values():
            search.cancel()
        await asyncio.gather(*self._searches.values(), return_exceptions=True)

    async def _search(self, key: tuple[str, int], client: Client) -> None:
        while True:
            try:
                client.connect(await self._find(*key))
            except RpcError as error:
                self._log.info("peer not found", peer=client.peer, error=str(error))
            if client.endpoint:
                await asyncio.sleep(PAUSE_S)
                return
            await asyncio.sleep(RETRY_S)
