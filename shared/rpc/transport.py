"""ZeroMQ sockets with safe options, pumped by an asyncio loop through their file descriptor.

`zmq.asyncio` with a task per request costs 2.3 to 2.5 times the bare round trip; `add_reader` and a drain loop cost 1.2
to 1.3 times. Sends never block: if a peer is gone or its queue is full, the message is lost. Messages that exceed the
limits are truncated, so memory usage is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import zmq
from zmq.backend import Socket as Raw

from proto.limits import CONTROL
from proto.tensors import Buffer

HIGH_WATER_MESSAGES = 4096
LINGER_MS = 200
BACKLOG = 1024
"""Maximum number of connections that wait to be accepted. With libzmq's default of 100, a burst of new peers loses
handshakes, and the kernel retries each of these only after one second or more."""
DRAIN_MESSAGES = 256
MAX_FRAMES = CONTROL.frames + 6
"""Maximum number of frames of a message: the raw frames, and user, address, routing id, envelope, body and table."""
MAX_BYTES = CONTROL.total_bytes + CONTROL.body_bytes
"""Maximum number of bytes of a message that are received before its envelope is examined."""
SKIP_FRAMES = 20_000
"""Number of frames of an overlong message that are discarded before other callbacks of the loop run."""
CURVE_BYTES = 33
"""Number of bytes that encryption adds to a frame (RFC 26, MESSAGE). libzmq includes them in its size limit."""
USER_PROPERTY = "User-Id"
ADDRESS_PROPERTY = "Peer-Address"
# These are plain integers and compiled methods, because pyzmq's Python wrappers turn every option into an enum, which
# costs a mailbox that wakes with cold caches 20 microseconds per round trip.
_send = cast("Callable[[zmq.Socket[bytes], Buffer | zmq.Frame, int], None]", Raw.send)
_recv = cast("Callable[[zmq.Socket[bytes], int], bytes]", Raw.recv)
_recv_frame = cast("Callable[[zmq.Socket[bytes], int, bool], zmq.Frame]", Raw.recv)
_get = cast("Callable[[zmq.Socket[bytes], int], int]", Raw.get)
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_RCVMORE = int(zmq.RCVMORE)
_SRCFD = int(zmq.SRCFD)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a socket with bounded queues, frame size and linger. Its heartbeats detect a dead TCP peer in 6 s."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    # This limits single frames only; the codec checks sizes, counts and totals.
    socket.setsockopt(zmq.MAXMSGSIZE, max(CONTROL.body_bytes, CONTROL.frame_bytes) + CURVE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if kind == zmq.DEALER:
        # Queue nothing for a peer that is unavailable: it would receive requests whose callers had given up long ago.
        socket.setsockopt(zmq.IMMEDIATE, 1)
    return socket


class Pump:
    """Moves messages between one socket and the event loop on which the pump was created. It is not thread-safe."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
        on_writable: Callable[[], None] | None = None,
        *,
        on_lost: Callable[[], None] | None = None,
        on_source: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """`on_message` is called with the frames of each message, `on_drained` after each burst (group commit).

        `on_lost` is called when messages are no longer accepted, which means that a socket with one peer has lost its
        connection. `on_writable` is called when messages are accepted again after such a loss or a refused send. A
        message that exceeds the limits is cut after the first frame over the limit, so the frames do not match what its
        envelope announces. `on_source` is called with the descriptor through which each message arrived, and the
        authenticated name of the sender (ZAP User-Id, empty if there is none); in that case this name and the address
        of the sender's host are passed to `on_message` as two additional leading frames.
        """
        self._socket = socket
        self._on_message = on_message
        self._on_drained = on_drained
        self._on_writable = on_writable
        self._on_lost = on_lost
        self._receive = self._receive_frames if on_source is None else self._receive_with_origin
        self._on_source = on_source
        self._skipping = False
        """Whether the rest of an overlong message is being discarded."""
        self._refused = False
        self._lost = False
        """Whether the socket accepted no messages at the last check."""
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_scheduled = False
        self._draining = False
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self._check()

    def send(self, frames: Sequence[Buffer | zmq.Frame]) -> bool:
        """Send without blocking. Return False if the peer is gone or its queue is full: then the message is lost."""
        if self._closed:
            return False
        try:
            for frame in frames[:-1]:
                _send(self._socket, frame, _MORE)
            _send(self._socket, frames[-1], _DONTWAIT)
        except zmq.Again:
            self._refused = True
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            # The descriptor is edge-triggered, and a send might have consumed the edge of an arriving message.
            if not self._draining:
                self._check()
        return True

    def send_tracked(self, frames: Sequence[Buffer]) -> zmq.MessageTracker | None:
        """Send as `send` does.

        Return a tracker that is done when libzmq has released the whole message, or None if the message is lost.
        """
        # libzmq does not copy a tracked frame, so it must be immutable: bytes.
        last = zmq.Frame(bytes(frames[-1]), track=True, copy=False)
        return last.tracker if self.send([*frames[:-1], last]) else None

    def wait_writable(self) -> None:
        """Call `on_writable` as soon as a message would be accepted, as happens after a refused send."""
        self._refused = True
        if not self._draining:
            self._check()

    def close(self) -> None:
        """Stop pumping and close the socket; queued messages linger for `LINGER_MS`."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _is_closed(self) -> bool:
        return self._closed

    def _check(self) -> None:
        """Read the state of the socket, which resets its edge trigger, and schedule a drain if needed."""
        events = _get(self._socket, _EVENTS)
        lost = not events & _POLLOUT
        if lost and not self._lost and self._on_lost is not None:
            self._refused = True
            self._on_lost()
        self._lost = lost
        writable = self._refused and self._on_writable is not None and bool(events & _POLLOUT)
        if (events & _POLLIN or writable) and not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        if self._closed:
            return
        self._draining = True
        quiet = False
        try:
            for _ in range(DRAIN_MESSAGES):
                if self._skipping and not self._skip():
                    break
                try:
                    frames = self._receive()
                except zmq.Again:
                    break
                self._on_message(frames)
                if self._is_closed():
                    return
                events = _get(self._socket, _EVENTS)
                if not events & _POLLIN:
                    quiet = self._on_drained is None and not self._refused and bool(events & _POLLOUT)
                    break
            if self._on_drained is not None and not self._closed:
                self._on_drained()
            if self._refused and self._on_writable is not None and not self._closed:
                self._retry()
        except zmq.ContextTerminated:
            self.close()  # no message will ever arrive, and checking again would be a busy loop
        finally:
            self._draining = False
            if not quiet and not self._closed:
                # More may be waiting, but other callbacks run first. The edge must not be lost if a callback raises.
                self._check()

    def _receive_frames(self) -> list[bytes]:
        """Return the frames of one message, truncated if it exceeds the limits. Raises zmq.Again if there is none."""
        socket = self._socket
        frame = _recv(socket, _DONTWAIT)
        frames = [frame]
        left = MAX_BYTES
        while _get(socket, _RCVMORE):
            left -= len(frame)
            if left < 0 or len(frames) > MAX_FRAMES:
                self._skipping = True
                break
            frame = _recv(socket, _DONTWAIT)
            frames.append(frame)
        return frames

    def _receive_with_origin(self) -> list[bytes]:
        first = _recv_frame(self._socket, _DONTWAIT, False)
        frames = [_property(first, USER_PROPERTY), _property(first, ADDRESS_PROPERTY), first.bytes]
        if first.more:
            frames += self._receive_frames()
        descriptor = _descriptor(first)
        if self._on_source is not None and descriptor is not None:
            self._on_source(descriptor, frames[0])
        return frames

    def _skip(self) -> bool:
        """Discard the next frames of an overlong message. Return True if its last frame has been discarded."""
        for _ in range(SKIP_FRAMES):
            if not _get(self._socket, _RCVMORE):
                self._skipping = False
                return True
            _recv(self._socket, _DONTWAIT)
        return False

    def _retry(self) -> None:
        if self._on_writable is not None and _get(self._socket, _EVENTS) & _POLLOUT:
            self._refused = False
            self._on_writable()


def _descriptor(frame: zmq.Frame) -> int | None:
    """Return the descriptor through which a frame arrived, or None if it comes from the socket itself: an XPUB socket
    reports the end of subscriptions whose connection has ended."""
    try:
        return int(frame.get(_SRCFD))
    except zmq.ZMQError:
        return None


def _property(frame: zmq.Frame, name: str) -> bytes:
    """Return a property of the connection through which a frame arrived, or empty bytes if it is unknown."""
    try:
        return str(frame.get(name)).encode()
    except zmq.ZMQError:
        return b""
