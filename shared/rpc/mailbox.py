"""The answering side of the bus: one ROUTER a process. It must always answer, so no handler may block its thread."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import zmq

from proto import codec, envelope
from proto.envelope import FLAG_ONE_WAY, FLAG_REPLY
from proto.errors import WireError
from proto.limits import CONTROL, Limits
from proto.messages import ErrorCode
from proto.registry import Message
from proto.tensors import Array, Buffer
from shared.rpc.claim import IPC, Claim, socket_path
from shared.rpc.errors import RpcError
from shared.rpc.transport import Pump, open_socket

CACHED_REPLIES = 16384
CACHED_REPLY_BYTES = 32 << 20
MAX_LOGGED_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply with tensors behind its body."""

    body: Message
    arrays: Sequence[Array] = ()


class Deferred:
    """The type of `DEFERRED`: what a handler returns when it will call `call.reply` or `call.fail` later."""


DEFERRED = Deferred()
Answer = Message | Reply | Deferred
_ANSWERS = (Message, Reply, Deferred)
Handler = Callable[[Any, "Call"], Answer | Awaitable[Answer]]
M = TypeVar("M", bound=Message)


class Call:
    """One request being handled."""

    def __init__(self, mailbox: Mailbox, peer: bytes, decoded: codec.Decoded, now: float) -> None:
        self._mailbox = mailbox
        self.peer = peer
        """Routing id to answer to; follows a client that reconnected and retried."""
        self.incarnation = decoded.envelope.incarnation
        self.request_id = decoded.envelope.request_id
        self.arrays = decoded.tensors
        self.deadline = now + decoded.envelope.remaining_ms / 1000
        """Loop time at which the caller gives up."""
        self.one_way = bool(decoded.envelope.flags & FLAG_ONE_WAY)
        self.answered = False
        self.expiry: asyncio.TimerHandle | None = None

    def reply(self, body: Message, arrays: Sequence[Array] = ()) -> None:
        """Answer, once; a second answer is ignored."""
        self._mailbox.answer(self, body, arrays)

    def fail(self, error: RpcError) -> None:
        """Answer with an Error."""
        self._mailbox.answer(self, error.to_message(), ())


class Mailbox:
    """Receives, checks, de-duplicates and dispatches requests; belongs to the event loop it was bound on."""

    def __init__(self, name: str, incarnation: int, limits: Limits = CONTROL) -> None:
        self._name = name
        self._incarnation = incarnation
        self._limits = limits
        self._handlers: dict[type[Message], Handler] = {}
        self._running: dict[tuple[int, int], Call] = {}
        self._replies: OrderedDict[tuple[int, int], list[Buffer]] = OrderedDict()
        self._reply_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("mailbox")
        self._pump: Pump | None = None
        self._claim: Claim | None = None
        self.malformed: Counter[bytes] = Counter()
        """Messages refused, by routing id of the sender."""
        self.lost_replies = 0
        """Replies that a full or vanished peer did not take."""

    def handle(self, request: type[M], handler: Callable[[M, Call], Answer | Awaitable[Answer]]) -> None:
        """Register the handler of one message type: a plain function (answered at once) or a coroutine function."""
        if request in self._handlers:
            raise ValueError(f"{self._name}: {request.__name__} has a handler already")
        self._handlers[request] = handler

    def bind(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_drained: Callable[[], None] | None = None,
    ) -> str:
        """Bind and begin to answer; returns the endpoint with a wildcard port resolved.

        Raises RpcError(bad_request) naming the endpoint when it is in use or cannot be bound.
        """
        path = socket_path(endpoint)
        if path is not None:
            self._claim = self._take(path, endpoint)
        socket = open_socket(context, zmq.ROUTER, self._limits)
        try:
            if path is None or self._claim is None:
                socket.bind(endpoint)
                endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            else:
                scratch = self._claim.scratch(self._incarnation)
                socket.bind(f"{IPC}{scratch}")
                self._claim.publish(scratch)
        except (zmq.ZMQError, OSError) as error:
            socket.close()
            self._release()
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}; is it in use?"
            ) from None
        self._pump = Pump(socket, self._on_message, on_drained)
        return endpoint

    async def close(self) -> None:
        """Cancel handlers that still run, close the socket, remove its file."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._running.values():
            if call.expiry is not None:
                call.expiry.cancel()
        self._running.clear()
        if self._pump is not None:
            self._pump.close()
        self._release()

    def _take(self, path: Path, endpoint: str) -> Claim:
        try:
            claim = Claim.take(path)
        except OSError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}") from None
        if claim is None:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{self._name}: {endpoint} is in use by a live process; stop that one or take another instance number",
            )
        return claim

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def answer(self, call: Call, body: Message, arrays: Sequence[Array]) -> None:
        """Send the answer of `call` and remember it for retries. Called through `Call`."""
        if call.answered:
            return
        frames: list[Buffer] = []
        if not call.one_way:
            try:
                frames = self._encode(call, body, arrays)
            except WireError as error:
                self._log.error("reply cannot travel", reply=type(body).__name__, error=str(error))
                frames = self._encode(call, RpcError(ErrorCode.INTERNAL, f"{self._name}: {error}").to_message(), ())
        call.answered = True
        if call.expiry is not None:
            call.expiry.cancel()
        if call.one_way:
            return
        key = (call.incarnation, call.request_id)
        self._running.pop(key, None)
        self._transmit(call.peer, frames)
        self._remember(key, frames)

    def _encode(self, call: Call, body: Message, arrays: Sequence[Array]) -> list[Buffer]:
        return codec.encode(
            body,
            request_id=call.request_id,
            incarnation=self._incarnation,
            flags=FLAG_REPLY,
            arrays=arrays,
            limits=self._limits,
        )

    def _transmit(self, peer: bytes, frames: list[Buffer]) -> None:
        if self._pump is None or not self._pump.send([peer, *frames]):
            self.lost_replies += 1

    def _remember(self, key: tuple[int, int], frames: list[Buffer]) -> None:
        # copies: a handler may go on to write to the arrays it answered with
        self._replies[key] = [bytes(frame) for frame in frames]
        self._reply_bytes += sum(map(len, frames))
        while len(self._replies) > CACHED_REPLIES or self._reply_bytes > CACHED_REPLY_BYTES:
            _, oldest = self._replies.popitem(last=False)
            self._reply_bytes -= sum(map(len, oldest))

    def _on_message(self, frames: list[bytes]) -> None:
        peer, parts = frames[0], frames[1:]
        try:
            decoded = codec.decode(parts, self._limits)
            if decoded.envelope.flags & FLAG_REPLY:
                raise WireError(f"{type(decoded.body).__name__} flagged as a reply: a mailbox takes requests")
        except WireError as error:
            self._refuse(peer, parts, error)
            return
        key = (decoded.envelope.incarnation, decoded.envelope.request_id)
        loop = asyncio.get_running_loop()
        call = Call(self, peer, decoded, loop.time())
        if not call.one_way:
            running = self._running.get(key)
            if running is not None:
                running.peer = peer
                return
            known = self._replies.get(key)
            if known is not None:
                self._transmit(peer, known)
                return
        handler = self._handlers.get(type(decoded.body))
        if handler is None:
            call.fail(RpcError(ErrorCode.BAD_REQUEST, f"{self._name} does not answer {type(decoded.body).__name__}"))
            return
        if not call.one_way:
            self._running[key] = call
        try:
            answer = handler(decoded.body, call)
            if isinstance(answer, _ANSWERS):
                self._finish(call, answer)
                return
        except Exception as error:
            self._fail(call, decoded.body, error)
        else:
            task = asyncio.ensure_future(self._await(call, decoded.body, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await(self, call: Call, body: Message, answer: Awaitable[Answer]) -> None:
        try:
            async with asyncio.timeout_at(call.deadline if not call.one_way else None):
                self._finish(call, await answer)
        except TimeoutError:
            call.fail(RpcError(ErrorCode.DEADLINE, f"{self._name}: {type(body).__name__} was not done in time"))
        except asyncio.CancelledError:
            call.fail(RpcError(ErrorCode.DRAINING, f"{self._name} is going away"))
            raise
        except Exception as error:
            self._fail(call, body, error)

    def _finish(self, call: Call, answer: Answer) -> None:
        if isinstance(answer, Reply):
            call.reply(answer.body, answer.arrays)
        elif isinstance(answer, Message):
            call.reply(answer)
        elif not call.answered:
            call.expiry = asyncio.get_running_loop().call_at(call.deadline + 1.0, self._expire, call)

    def _expire(self, call: Call) -> None:
        """Nobody waits for this deferred answer any more: forget it, so that nothing accumulates."""
        call.fail(RpcError(ErrorCode.DEADLINE, f"{self._name}: the deferred answer did not come in time"))

    def _fail(self, call: Call, body: Message, error: Exception) -> None:
        if isinstance(error, RpcError):
            call.fail(error)
            return
        self._log.error("handler failed", request=type(body).__name__, exc_info=error)
        text = f"{self._name}: {type(body).__name__} failed: {type(error).__name__}: {error}"
        call.fail(RpcError(ErrorCode.INTERNAL, text[:1000]))

    def _refuse(self, peer: bytes, parts: list[bytes], error: WireError) -> None:
        known = len(self.malformed) < MAX_LOGGED_PEERS or peer in self.malformed
        if known:
            self.malformed[peer] += 1
        if known and self.malformed[peer] <= 3:
            self._log.warning("malformed message refused", peer=peer.hex(), error=str(error))
        try:
            head = envelope.unpack(parts[0], self._limits) if parts else None
        except WireError:
            return
        if head is not None and not head.flags & (FLAG_ONE_WAY | FLAG_REPLY):
            reply = RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: {error}").to_message()
            self._transmit(
                peer,
                codec.encode(reply, request_id=head.request_id, incarnation=self._incarnation, flags=FLAG_REPLY),
            )
