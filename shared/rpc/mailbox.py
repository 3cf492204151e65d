"""The server side of the bus: one mailbox per process. Handlers must not block the mailbox's thread.

A mailbox thus always answers. It listens on ipc, where the private directory of the run decides who may connect, and on
tcp for other hosts, where only peers with one of the run's keys are admitted. Forbidden and unreadable messages are
counted. After too many of them, the peer is ignored for a while.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import zmq

from proto import codec, envelope
from proto.envelope import FLAG_ONE_WAY, FLAG_REPLY, Envelope
from proto.errors import WireError
from proto.limits import CONTROL
from proto.messages import ErrorCode
from proto.registry import Message, Request, all_messages, by_type
from proto.tensors import Buffer
from shared.os_limits import raise_descriptor_limit
from shared.rpc.claim import IPC, Claim, socket_path
from shared.rpc.errors import RpcError
from shared.rpc.replies import Replies, RequestKey, fingerprint
from shared.rpc.senders import Offenders, Sender
from shared.rpc.transport import Pump, open_socket
from shared.rpc.unread import Unread
from shared.security.connections import Connections
from shared.security.curve import is_tcp, lock
from shared.security.roles import Role, least_role
from shared.security.zap import Gate

REMOTE_MESSAGES = 128
"""Maximum number of unread messages on a connection from another host. Further messages wait at the sender."""
MAX_RUNNING, MAX_RUNNING_OF_GUESTS = 65_536, 1024
"""Maximum number of requests that are handled or deferred at once, of all services together and of all peers of another
role together. Further requests are answered with BUSY."""
BUSY_S = 1.0
LOGGED_STRIKES = 3
"""Maximum number of offences by one account that are logged individually."""


class Deferred:
    """The type of `DEFERRED`, which a handler returns when it will call `call.reply` or `call.fail` later."""


DEFERRED = Deferred()
Answer = Message | Deferred
Handler = Callable[[Any, "Call"], Answer | Awaitable[Answer]]
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Door:
    """One socket of a mailbox. Answers are sent through the socket on which the request arrived."""

    number: int
    claim: Claim | None
    pump: Pump | None = None
    connections: Connections | None = None
    unread: Unread | None = None

    def send(self, to: Sender, frames: list[Buffer]) -> bool:
        """Send without blocking. Return False if the peer is gone or has left too much unread."""
        if self.pump is None:
            return False
        nbytes = sum(map(len, frames))
        if self.unread is None or not self.unread.counts(to, nbytes):
            return self.pump.send([to.peer, *frames])
        if not self.unread.takes(to, nbytes):
            return False
        tracker = self.pump.send_tracked([to.peer, *frames])
        if tracker is not None:
            self.unread.sent(to, nbytes, tracker)
        return tracker is not None

    def close(self) -> None:
        if self.connections is not None:
            self.connections.close()
        if self.pump is not None:
            self.pump.close()
        if self.claim is not None:
            self.claim.release()


class Call:
    """One request being handled."""

    def __init__(self, mailbox: Mailbox, door: Door, sender: Sender, head: Envelope, request: int, now: float) -> None:
        self._mailbox = mailbox
        self.door = door
        self.sender = sender
        """The peer to answer. `sender` and `door` change when the client reconnects and retries."""
        self.request = request
        """Fingerprint of the content of the request."""
        self.incarnation = head.incarnation
        self.request_id = head.request_id
        self.deadline = now + head.remaining_ms / 1000
        """Time of the event loop at which the caller gives up."""
        self.one_way = bool(head.flags & FLAG_ONE_WAY)
        self.answered = False
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def role(self) -> Role:
        """The role that the sender has proved."""
        return self.sender.role

    def reply(self, body: Message) -> None:
        """Answer the request. A second answer is ignored."""
        self._mailbox.answer(self, body)

    def fail(self, error: RpcError) -> None:
        """Answer with an Error."""
        self._mailbox.answer(self, error.to_message())


class Mailbox:
    """Receives, checks, de-duplicates and dispatches requests. It belongs to the event loop on which it was bound."""

    def __init__(self, name: str, incarnation: int) -> None:
        self._name = name
        self._incarnation = incarnation
        self._handlers: dict[type[Message], Handler] = {}
        self._known_types = frozenset(all_messages())
        self._running: dict[RequestKey, Call] = {}
        self._running_of: Counter[Role] = Counter()
        self._replies = {role: Replies() for role in Role}
        self._doors: list[Door] = []
        self._on_drained: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("mailbox")
        self.offenders = Offenders()
        self.lost_replies = 0
        """Number of replies lost because the peer was gone or its queue was full."""

    def handle(self, request: type[M], handler: Callable[[M, Call], Answer | Awaitable[Answer]]) -> None:
        """Register the handler for one message type: a plain function (answers at once) or a coroutine function."""
        if request in self._handlers:
            raise ValueError(f"{self._name}: {request.__name__} already has a handler")
        self._handlers[request] = handler

    def bind(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_drained: Callable[[], None] | None = None,
        *,
        gate: Gate | None = None,
        admits: Role = Role.OPERATOR,
    ) -> str:
        """Bind, begin to answer, and return the endpoint with its wildcard port resolved. A second call adds a second
        endpoint; `on_drained` runs for all of them.

        On tcp, `gate` (of the same context) admits peers whose role is at least `admits`; on ipc every peer counts as
        a service. Raises RpcError(bad_request) naming the endpoint if it is in use, cannot be bound, or is a tcp
        endpoint and no gate is given.
        """
        if is_tcp(endpoint) and gate is None:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{self._name}: {endpoint} refused: tcp needs the keys of the run, but there are none (keys/); use ipc",
            )
        raise_descriptor_limit()
        door = Door(len(self._doors), self._take(endpoint))
        socket = open_socket(context, zmq.ROUTER)
        try:
            if door.claim is not None:
                scratch = door.claim.scratch(self._incarnation)
                socket.bind(f"{IPC}{scratch}")
                door.claim.publish(scratch)
            else:
                if is_tcp(endpoint) and gate is not None:
                    socket.setsockopt(zmq.RCVHWM, REMOTE_MESSAGES)
                    lock(socket, gate.keys, admits)
                    door.connections = Connections(socket, self._name)
                    door.unread = Unread()
                socket.bind(endpoint)
                endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except (zmq.ZMQError, OSError) as error:
            door.close()
            socket.close()
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}; is it in use?"
            ) from None
        if on_drained is not None:
            self._on_drained = on_drained
        on_message = self._on_authenticated if is_tcp(endpoint) else self._on_trusted
        door.pump = Pump(
            socket,
            functools.partial(on_message, door),
            self._on_drained,
            on_source=door.connections.heard if door.connections is not None else None,
        )
        self._doors.append(door)
        return endpoint

    def counts(self) -> dict[str, int]:
        """Return the counts of offences by peers, and of messages lost because of them, since the start."""
        offenders = self.offenders
        doors = [door.connections for door in self._doors if door.connections is not None]
        return {
            "malformed": offenders.malformed,
            "forbidden": offenders.forbidden,
            "unread": offenders.unread,
            "quarantines": offenders.quarantines,
            "lost_replies": self.lost_replies,
            "failed_handshakes": sum(door.failed for door in doors),
            "ended_connections": sum(door.ended for door in doors),
        }

    async def close(self) -> None:
        """Cancel running handlers, close the sockets and remove their files."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._running.values():
            if call.expiry is not None:
                call.expiry.cancel()
        self._running.clear()
        for door in self._doors:
            door.close()

    def _take(self, endpoint: str) -> Claim | None:
        path = socket_path(endpoint)
        if path is None:
            return None
        try:
            claim = Claim.take(path)
        except OSError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}") from None
        if claim is None:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{self._name}: {endpoint} is in use by a live process; stop it or use another instance number",
            )
        return claim

    def answer(self, call: Call, body: Message) -> None:
        """Send the answer to `call` and keep it for retries. Handlers use `Call` instead."""
        if call.answered:
            return
        frames: list[Buffer] = []
        if not call.one_way:
            try:
                frames = self._encode(call, body)
            except WireError as error:
                self._log.error("reply cannot be sent", reply=type(body).__name__, error=str(error))
                frames = self._encode(call, RpcError(ErrorCode.INTERNAL, f"{self._name}: {error}").to_message())
        call.answered = True
        if call.expiry is not None:
            call.expiry.cancel()
        if call.one_way:
            return
        key = RequestKey(call.role, call.incarnation, call.request_id)
        if self._running.pop(key, None) is not None:
            self._running_of[call.role] -= 1
        self._transmit(call, frames)
        self._replies[call.role].keep(
            key, call.request, frames, now=asyncio.get_running_loop().time(), deadline=call.deadline
        )

    def _encode(self, call: Call, body: Message) -> list[Buffer]:
        return codec.encode(body, request_id=call.request_id, incarnation=self._incarnation, flags=FLAG_REPLY)

    def _transmit(self, call: Call, frames: list[Buffer]) -> None:
        if not call.door.send(call.sender, frames):
            self.lost_replies += 1

    def _on_trusted(self, door: Door, frames: list[bytes]) -> None:
        self._on_message(door, Sender(door.number, Role.SERVICE, frames[0]), frames[1:])

    def _on_authenticated(self, door: Door, frames: list[bytes]) -> None:
        """Handle a message from tcp. libzmq attaches the role that the gate assigned during the handshake."""
        try:
            role = Role.of_label(frames[0].decode())
        except ValueError:
            self.offenders.forbidden += 1
            return
        self._on_message(door, Sender(door.number, role, frames[2], frames[1]), frames[3:])

    def _on_message(self, door: Door, who: Sender, parts: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        if self.offenders.unheard(who.account, now):
            return
        try:
            head = codec.check(parts)
            kind = by_type(head.type)
            if head.flags & FLAG_REPLY:
                raise WireError(f"{kind.__name__} flagged as a reply: a mailbox accepts only requests")
            if head.flags & FLAG_ONE_WAY and issubclass(kind, Request):
                raise WireError(f"{kind.__name__} flagged as one-way: nothing would bound how many are under way")
        except WireError as error:
            self._refuse(door, who, parts, error, now)
            return
        call = Call(self, door, who, head, fingerprint(head.type, parts), now)
        if who.is_guest and who.role < least_role(kind):
            self._forbid(call, kind, now)
            return
        key = RequestKey(who.role, head.incarnation, head.request_id)
        if not call.one_way and self._is_known(key, call):
            return
        handler = self._handlers.get(kind)
        if handler is None:
            call.fail(RpcError(ErrorCode.BAD_REQUEST, f"{self._name} does not answer {kind.__name__}"))
            return
        # A decoded body can take up many times its length: decode it only if the peer may send it and can be answered.
        try:
            body = codec.decode_checked(head, parts).body
        except WireError as error:
            self._refuse(door, who, parts, error, now)
            return
        if not call.one_way:
            running = self._running_of[who.role]
            if running >= (MAX_RUNNING_OF_GUESTS if who.is_guest else MAX_RUNNING):
                text = f"{self._name}: {running} requests are being handled"
                call.fail(RpcError(ErrorCode.BUSY, text, retry_after_s=BUSY_S))
                return
            self._running[key] = call
            self._running_of[who.role] += 1
        try:
            answer = handler(body, call)
            if isinstance(answer, Answer):
                self._finish(call, answer)
                return
        except Exception as error:
            self._fail(call, body, error)
        else:
            task = asyncio.ensure_future(self._await(call, body, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await(self, call: Call, body: Message, answer: Awaitable[Answer]) -> None:
        try:
            async with asyncio.timeout_at(call.deadline if not call.one_way else None):
                self._finish(call, await answer)
        except TimeoutError:
            call.fail(RpcError(ErrorCode.DEADLINE, f"{self._name}: {type(body).__name__} did not finish in time"))
        except asyncio.CancelledError:
            call.fail(RpcError(ErrorCode.DRAINING, f"{self._name} is shutting down"))
            raise
        except Exception as error:
            self._fail(call, body, error)

    def _finish(self, call: Call, answer: Answer) -> None:
        if isinstance(answer, Message):
            call.reply(answer)
        elif not call.answered:
            call.expiry = asyncio.get_running_loop().call_at(call.deadline + 1.0, self._expire, call)

    def _expire(self, call: Call) -> None:
        """Forget a deferred answer that no caller is waiting for, so that calls do not accumulate."""
        call.fail(RpcError(ErrorCode.DEADLINE, f"{self._name}: the deferred answer did not arrive in time"))

    def _fail(self, call: Call, body: Message, error: Exception) -> None:
        if isinstance(error, RpcError):
            call.fail(error)
            return
        self._log.error("handler failed", request=type(body).__name__, exc_info=error)
        text = f"{self._name}: {type(body).__name__} failed: {type(error).__name__}: {error}"
        call.fail(RpcError(ErrorCode.INTERNAL, text[:1000]))

    def _is_known(self, key: RequestKey, call: Call) -> bool:
        """Return whether the key has been used before.

        If so, serve a retry of the same request or refuse a different one.
        """
        running = self._running.get(key)
        if running is not None:
            if running.request != call.request:
                self._conflict(call)
            else:
                running.door, running.sender = call.door, call.sender
            return True
        answer = self._replies[call.role].get(key)
        if answer is None:
            return False
        if answer[0] != call.request:
            self._conflict(call)
        else:
            self._transmit(call, answer[1])
        return True

    def _conflict(self, call: Call) -> None:
        """Refuse a request whose id has already been used for a different request."""
        text = f"{self._name}: request id {call.request_id} was used for another request; each request needs its own id"
        self._transmit(call, self._encode(call, RpcError(ErrorCode.CONFLICT, text).to_message()))

    def _forbid(self, call: Call, kind: type[Message], now: float) -> None:
        self.offenders.forbidden += 1
        self._strike(call.sender, f"{kind.__name__} sent by role {call.role.label}", now)
        if not call.one_way:
            text = f"{self._name}: {kind.__name__} needs role {least_role(kind).label}, you are {call.role.label}"
            self._transmit(call, self._encode(call, RpcError(ErrorCode.BAD_REQUEST, text).to_message()))

    def _strike(self, who: Sender, what: str, now: float) -> None:
        if self.offenders.strike(who.account, now):
            self._log.warning("sender in quarantine", peer=str(who), why=what)
        elif self.offenders.strikes(who.account) <= LOGGED_STRIKES:
            self._log.warning("message refused", peer=str(who), why=what)

    def _refuse(self, door: Door, who: Sender, parts: list[bytes], error: WireError, now: float) -> None:
        self.offenders.malformed += 1
        try:
            head = envelope.unpack(parts[0], CONTROL) if parts else None
        except WireError:
            head = None
        if head is None or head.type in self._known_types:
            # A message number that only a later minor version defines is not an offence.
            self._strike(who, str(error), now)
        if head is not None and not head.flags & (FLAG_ONE_WAY | FLAG_REPLY):
            reply = RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: {error}").to_message()
            frames = codec.encode(reply, request_id=head.request_id, incarnation=self._incarnation, flags=FLAG_REPLY)
            self.lost_replies += not door.send(who, frames)
