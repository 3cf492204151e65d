"""A network between nodes that loses, duplicates, delays, reorders and cuts off messages, in place of libzmq's sockets.

`SimContext` replaces a `zmq.Context`. Its sockets have their own pump (`SimSocket.pump`), which takes the place
of `Pump`. `Mailbox` and `Client` run unchanged above them, with encoding, deadlines, retries and answers that are
computed only once.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from proto import codec
from proto.envelope import FLAG_REPLY
from proto.messages import Complete
from tests.sim.clock import Node, VirtualLoop

if TYPE_CHECKING:
    from tests.sim.world import World

IN_PIPE = 0.5
"""Probability that a message is lost if its sender dies while the message is in transit."""
TURN_S = 0.0005
"""Interval in seconds. Messages arrive at multiples of this interval, so that some arrive together in a burst."""
RECONNECT_S = 0.05
STORE_ENDPOINT = "sim://batch-store-0"
TENSOR_BYTES = 64 << 10
_TYPE = slice(6, 8)
_FLAGS = slice(8, 10)
KIND = slice(6, 10)
"""Position of the message number and the flags in a header."""


@dataclass(frozen=True)
class Weather:
    """Network conditions: the probabilities that a message is lost, that a second copy of it arrives late, and that it
    is delayed."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    late_s: float = 2.0


CALM = Weather()


class Network:
    """The network of one world."""

    def __init__(self, world: World, loop: VirtualLoop, rng: Random) -> None:
        self.weather = CALM
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes, by name, between which no message passes."""
        self.ghosts: set[str] = set()
        """Processes whose next completion another process also sends."""
        self.last_words: dict[str, float] = {}
        """Processes that are killed once they have sent their next completion, with the delay of that message in
        seconds."""
        self.bound: dict[str, SimSocket] = {}
        self.dialled: dict[str, list[SimSocket]] = {}
        self.sent = self.lost = self.repeated = 0
        self._world = world
        self._loop = loop
        self._rng = rng
        self.numbers = itertools.count(1)
        self._wire = contextvars.Context()
        """Context that belongs to no process, so that a message arrives even if its sender has died or is stopped."""

    def carry(self, source: SimSocket, target: SimSocket, frames: list[bytes], header: bytes) -> None:
        """Send a message. Whether and when it arrives is drawn at random now."""
        self.sent += 1
        name = source.node.name
        if (name in self.ghosts or name in self.last_words) and kind_of(header) == (Complete.TYPE, False):
            if name in self.ghosts:
                self.ghosts.discard(name)
                self._put(self._loop.time(), source, target, self._from_another(frames), header)
            if (delay_s := self.last_words.pop(name, None)) is not None:
                self._put(self._loop.time() + delay_s, source, target, frames, header)
                self._loop.before_waiting.append(lambda: self._world.kill(source.node))
                return
        weather, rng = self.weather, self._rng
        copies = 1
        if weather is not CALM:
            copies = 0 if rng.random() < weather.lost else 2 if rng.random() < weather.twice else 1
        if frozenset((name, target.node.name)) in self.cut:
            copies = 0
        if not copies:
            self.lost += 1
            self._world.note("lost", name, target.node.name, header)
        for number in range(copies):
            self.repeated += number
            delay = 0.0002 + rng.expovariate(1.0) * 0.0008
            if number or (weather is not CALM and rng.random() < weather.late):
                delay += rng.random() * weather.late_s
            at = (int((self._loop.time() + delay) / TURN_S) + 1) * TURN_S
            self._put(at, source, target, frames, header)

    def _put(self, at: float, source: SimSocket, target: SimSocket, frames: list[bytes], header: bytes) -> None:
        self._loop.call_at(at, self._arrive, source, target, frames, header, context=self._wire)

    def _from_another(self, frames: list[bytes]) -> list[bytes]:
        """Return a completion as another process would send it."""
        decoded = codec.decode(frames[1:])
        incarnation = decoded.envelope.incarnation ^ 2
        body = msgspec.structs.replace(cast(Complete, decoded.body), incarnation=incarnation)
        made = codec.encode(body, request_id=1, incarnation=incarnation, remaining_s=1.0)
        return [frames[0], *map(bytes, made)]

    def _arrive(self, source: SimSocket, target: SimSocket, frames: list[bytes], header: bytes) -> None:
        if target.closed or not target.node.alive:
            return
        if target.peers is None and self.bound.get(target.endpoint, source) is not source:
            return  # Meanwhile, the client has disconnected from this server.
        if not source.node.alive and self._rng.random() < IN_PIPE:
            return
        self._world.note("to", source.node.name, target.node.name, header)
        target.receive(frames)


class SimContext:
    """Context that creates the sockets of one node."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node
        self._sockets: list[SimSocket] = []

    def socket(self, kind: int) -> SimSocket:
        made = SimSocket(self._network, self._node, answers=kind == zmq.ROUTER)
        self._sockets.append(made)
        self._node.on_kill.append(made.close)
        return made

    def destroy(self, linger: int | None = None) -> None:
        for each in self._sockets:
            each.close()

    term = destroy


class SimSocket:
    """A ROUTER (`answers`) or a DEALER, and its own pump."""

    def __init__(self, network: Network, node: Node, *, answers: bool) -> None:
        self.node = node
        self.endpoint = ""
        self.closed = False
        self.peers: dict[bytes, SimSocket] | None = {} if answers else None
        """Known clients of a ROUTER by routing id, or None for a DEALER."""
        self._names: dict[SimSocket, bytes] = {}
        self._network = network
        self._refused = False
        self._inbox: list[list[bytes]] = []
        self._on_message: Callable[[list[bytes]], None] = lambda frames: None
        self._on_drained: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None

    # ---- the socket

    def setsockopt(self, *_: Any) -> None:
        """Accept any option."""

    def getsockopt_string(self, _: int) -> str:
        return self.endpoint

    def bind(self, endpoint: str) -> None:
        other = self._network.bound.get(endpoint)
        if other is not None and not other.closed:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.endpoint = endpoint
        self._network.bound[endpoint] = self
        for dealer in self._network.dialled.get(endpoint, []):
            dealer.wait_writable()

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._network.dialled.setdefault(endpoint, []).append(self)

    def disconnect(self, endpoint: str) -> None:
        self._network.dialled[endpoint].remove(self)
        self.endpoint = ""

    def close(self, *_: Any) -> None:
        if self.closed:
            return
        self.closed = True
        if self.peers is None:
            if self.endpoint:
                self._network.dialled[self.endpoint].remove(self)
        elif self._network.bound.get(self.endpoint) is self:
            del self._network.bound[self.endpoint]

    # ---- the pump

    def pump(
        self,
        on_message: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
        on_writable: Callable[[], None] | None = None,
        **_: Any,
    ) -> SimSocket:
        """Take the place of `Pump(socket, ...)`."""
        self._on_message, self._on_drained, self._on_writable = on_message, on_drained, on_writable
        return self

    def send(self, frames: Sequence[Any]) -> bool:
        self._network._world.operation(self.node, "send")
        if self.closed or not self.node.alive:
            return False
        plain = [bytes(frame) for frame in frames]
        if self.peers is None:
            server = self._network.bound.get(self.endpoint)
            if server is None or server.closed:
                self._refused = True
                return False
            self._check_size(plain)
            self._network.carry(self, server, [server.name_of(self), *plain], plain[0])
            return True
        client = self.peers.get(plain[0])
        if client is None or client.closed or client.endpoint != self.endpoint:
            return False
        self._check_size(plain[1:])
        self._network.carry(self, client, plain[1:], plain[1])
        return True

    def send_tracked(self, frames: Sequence[Any]) -> None:
        raise AssertionError("only sockets for other hosts track messages")

    def wait_writable(self) -> None:
        """Call `on_writable` once the peer is connected."""
        self._refused = True
        self._network._loop.call_later(RECONNECT_S, self._writable, context=self.node.context)

    def name_of(self, client: SimSocket) -> bytes:
        """Return the routing id that a client sends in the handshake."""
        if client not in self._names and self.peers is not None:
            self._names[client] = next(self._network.numbers).to_bytes(5, "big")
            self.peers[self._names[client]] = client
        return self._names[client]

    def receive(self, frames: list[bytes]) -> None:
        """Hand over a message. `on_drained` is called after the last of the messages that arrive at the same time."""
        self._inbox.append(frames)
        if len(self._inbox) == 1:
            self._network._loop.call_soon(self._drain, context=self.node.context)

    def _drain(self) -> None:
        while self._inbox and not self.closed:
            self._on_message(self._inbox.pop(0))
        if self._on_drained is not None and not self.closed:
            self._on_drained()
        if self.peers is not None and self.endpoint == STORE_ENDPOINT:
            self._network._world.checks.store_is_sound()

    def _check_size(self, frames: Sequence[bytes]) -> None:
        """Check promise 6: a control message carries no tensor over 64 KiB."""
        largest = max(map(len, frames[3:]), default=0)
        self._network._world.check(largest <= TENSOR_BYTES, f"promise 6: a message carries a frame of {largest} bytes")

    def _writable(self) -> None:
        if self._refused and not self.closed and self._network.bound.get(self.endpoint) and self._on_writable:
            self._refused = False
            self._on_writable()


def kind_of(header: bytes) -> tuple[int, bool]:
    """Return the message number of an envelope, and whether it is a reply."""
    flags = int.from_bytes(header[_FLAGS], "little")
    return int.from_bytes(header[_TYPE], "little"), bool(flags & FLAG_REPLY)
