"""Fetches shards from stores on other hosts: opens streams, reads them over lines, and reopens lost streams.

A fetch returns complete, checked shards in their own memory, or raises. It does not keep anything for the next fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from proto.errors import WireError
from proto.messages import ErrorCode, LineOpened, OpenLine, OpenStream, PutTask, StreamOpened
from proto.registry import Message, Request
from proto.tensors import Array
from shared.dataplane.reused_pages import Regions
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_line import (
    Counts,
    Incoming,
    RequestWindow,
    StreamGroup,
    StreamLine,
    StreamOutcome,
    Target,
)
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError

STREAM_BYTES = 64 << 20
"""Maximum size in bytes of a stream of several tasks. A fetch is split into such streams, `STREAMS` of which run per
store."""
STREAMS = 4
FIRST_TASKS, OPEN_TASKS = 128, 4096
"""Number of tasks requested for the first stream of a fetch, and the maximum number for any stream."""
IDLE_S = 30.0
"""Seconds for which a stream's memory is kept for later streams once its arrays are gone."""
INFLIGHT_BYTES = 16 << 20
CALL_S = 5.0
CORRUPT_TRIES = 3
SHOWN_NAMES = 8
AGAIN_S, AGAIN_MAX_S = 0.05, 2.0
"""Minimum and maximum delay, in seconds, before a lost stream is opened again. The delay doubles after each attempt
that received nothing, so that a peer that causes streams to be lost costs little."""
R = TypeVar("R", bound=Message)
OnProgress = Callable[[], None]
"""Callback for the progress of a long operation, so that its caller can extend a time limit."""


def ignore_progress() -> None:
    """An `OnProgress` that does nothing."""


@dataclass(slots=True, eq=False)
class _Load:
    """A fetch in progress."""

    store: str
    client: Client
    tasks: list[PutTask]
    keys: tuple[str, ...]
    pieces: dict[int, list[dict[str, Array]]] = field(default_factory=dict)
    """One dict of arrays per task of each stream, by the index of the stream's first task."""
    group: StreamGroup = field(default_factory=StreamGroup)


class StreamReader:
    """Fetches shards from any number of stores. A process has one reader, on the event loop of its bus clients."""

    def __init__(
        self, client_of: Callable[[str], Client], *, plain: bool = False, inflight_bytes: int = INFLIGHT_BYTES
    ) -> None:
        """`client_of` returns the bus client of a store by name.

        With `plain`, unencrypted streams are also accepted; otherwise they are refused. `inflight_bytes` is the maximum
        number of bytes that are requested but have not arrived.
        """
        self._client_of = client_of
        self.plain = plain
        self.counts = Counts()
        """Counters of the data received and refused so far."""
        self._regions = Regions()
        self._window = RequestWindow(inflight_bytes, self.counts)
        self._checker = ThreadPoolExecutor(1, "stream-checker")
        self._lines: dict[str, StreamLine] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Slots are per store, because streams from an absent store keep their slots until their callers' deadlines.
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, STREAMS))
        self._works: set[asyncio.Task[None]] = set()
        self._trimmer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("stream")

    def close(self) -> None:
        """Stop transfers and threads, and close sockets. Fetched arrays stay valid. Call it on the loop's thread."""
        for work in self._works:
            work.cancel()
        if self._trimmer is not None:
            self._trimmer.cancel()
        for line in self._lines.values():
            line.close()
        self._checker.shutdown(wait=False)
        self._regions.close()

    async def fetch(
        self,
        store: str,
        tasks: Sequence[PutTask],
        keys: tuple[str, ...],
        stall_s: float,
        on_progress: OnProgress = ignore_progress,
    ) -> list[dict[str, Array]]:
        """Return the arrays under `keys` (all arrays if `keys` is empty) of each task. They are private to the caller.

        While data arrives, `on_progress` is called at least every `stall_s`. Raises RpcError, which has
        `names` if its code is missing or collected, and DeadlineExceeded if nothing arrives for `stall_s`.
        """
        load = _Load(store, self._client_of(store), _once(tasks), keys)
        work = asyncio.create_task(self._load(load))
        self._works.add(work)
        since = time.monotonic()
        on_progress()
        try:
            while not work.done():
                left_s = max(0.0, since + stall_s - time.monotonic())
                await asyncio.wait([work], timeout=left_s)
                if load.group.arrived_at > since:
                    since = load.group.arrived_at
                    on_progress()
                elif not left_s and not work.done():
                    raise DeadlineExceeded(
                        f"fetch from {store}: nothing arrived for {stall_s:g} s and {len(load.tasks)} tasks are not "
                        "complete; is the store's host reachable? (ctl status)"
                    )
        finally:
            work.cancel()
            self._works.discard(work)
        if work.cancelled():
            raise RpcError(ErrorCode.DRAINING, f"fetch from {store}: this reader was closed")
        work.result()
        arrays_in_order = [arrays for first in sorted(load.pieces) for arrays in load.pieces[first]]
        if len(load.tasks) == len(tasks):
            return arrays_in_order
        by_task = dict(zip(load.tasks, arrays_in_order, strict=True))
        return [dict(by_task[task]) for task in tasks]

    # ---- streams

    async def _load(self, load: _Load) -> None:
        at, ask = 0, FIRST_TASKS
        slots = self._slots[load.store]
        try:
            async with asyncio.TaskGroup() as group:
                while at < len(load.tasks):
                    await slots.acquire()
                    try:
                        line, opened = await self._open(load, load.tasks[at : at + ask], STREAM_BYTES)
                    except BaseException:
                        slots.release()
                        raise
                    stream = group.create_task(self._stream(load, at, line, opened))
                    stream.add_done_callback(lambda _: slots.release())  # even if it was cancelled before it began
                    at += opened.covered
                    # Ask for slightly more tasks than would fill a stream if all were as large as these: looking up
                    # tasks that do not fit is wasted work, and asking for too few creates unnecessary streams.
                    ask = min(OPEN_TASKS, STREAM_BYTES * opened.covered * 17 // 16 // opened.total_bytes + 1)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self._watch_idle()

    async def _stream(self, load: _Load, first: int, line: StreamLine, opened: StreamOpened) -> None:
        """Receive one stream completely, reopening it each time it is lost."""
        tasks = load.tasks[first : first + opened.covered]
        corrupt = changed = 0
        pause = AGAIN_S
        arrival: Arrival | None = None
        while True:
            if arrival is not None and not arrival.is_same(opened):
                arrival = None
                changed += 1
                if changed >= CORRUPT_TRIES:
                    raise RpcError(
                        ErrorCode.INTERNAL, f"{load.store} repeatedly announces different bytes for the same shards"
                    )
            if arrival is None:
                arrival = Arrival(opened, tasks, load.keys, STREAM_BYTES, self._regions)
            received = arrival.received
            outcome, why = await self._receive(load, line, arrival, opened.stream)
            if outcome is StreamOutcome.COMPLETE:
                load.pieces[first] = arrival.arrays()
                return
            self._log.warning("stream begins again", store=load.store, outcome=outcome.value, why=why)
            pause = AGAIN_S if arrival.received > received else min(AGAIN_MAX_S, 2 * pause)
            if outcome is StreamOutcome.CORRUPT:
                arrival = None
                corrupt += 1
                if corrupt >= CORRUPT_TRIES:
                    names = [f"{task.task_id}#{key}" for task in tasks for key in load.keys or ("*",)]
                    raise RpcError(ErrorCode.MISSING, f"{load.store}: damaged shards: {why}", names=names)
            if outcome is StreamOutcome.FAILED:
                raise RpcError(ErrorCode.INTERNAL, f"{load.store}: {why}")
            await asyncio.sleep(pause)  # paces the retries
            line, opened = await self._open(load, tasks, 1 << 62)
            if opened.covered != len(tasks):
                raise RpcError(
                    ErrorCode.BUSY,
                    f"{load.store} covers {opened.covered} of {len(tasks)} tasks in a stream: they are in more files "
                    "than when the stream began, and the store has descriptors for fewer; fetch again",
                    retry_after_s=AGAIN_S,
                )

    async def receive_into(self, target: Target, store: str, task: PutTask, open_s: float) -> tuple[StreamOutcome, str]:
        """Receive the bytes that `target` lacks, from a stream of all shards of `task`. Return the outcome and reason.

        The line is not used again after a failure. Nothing is written to `target` after this method returns. Raises
        RpcError or WireError if no such stream opens within `open_s`.
        """
        load = _Load(store, self._client_of(store), [task], ())
        try:
            async with asyncio.timeout(open_s):
                line, opened = await self._open(load, load.tasks, 1 << 62)
        except TimeoutError:
            raise DeadlineExceeded(f"{store}: no stream for {task.task_id} opened within {open_s:g} s") from None
        if opened.total_bytes != target.total_bytes:
            raise WireError(f"{store}: {task.task_id} has {opened.total_bytes} bytes, not {target.total_bytes}")
        outcome, why = await self._receive(load, line, target, opened.stream)
        if outcome is not StreamOutcome.COMPLETE:
            await asyncio.to_thread(line.close)
            await asyncio.wrap_future(self._checker.submit(int))  # wait for the checks already submitted
        return outcome, why

    async def _receive(self, load: _Load, line: StreamLine, arrival: Target, number: int) -> tuple[StreamOutcome, str]:
        """Receive `arrival` over the line, and return the outcome and the reason.

        If cancelled, wait until the line has released `arrival`.
        """
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[tuple[StreamOutcome, str]] = loop.create_future()

        def settle(outcome: StreamOutcome, why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_set, settled, (outcome, why))

        incoming = Incoming(arrival, load.group, number, settle)
        line.add(incoming)
        try:
            return await asyncio.shield(settled)
        except asyncio.CancelledError:
            line.cancel(incoming)
            await settled  # until then the line may write to the memory
            raise

    # ---- requests to a store

    async def _open(self, load: _Load, tasks: list[PutTask], max_bytes: int) -> tuple[StreamLine, StreamOpened]:
        """Open a stream, on a new line if the current one has ended."""
        while True:
            line = await self._line(load.store, load.client)
            request = OpenStream(line_id=line.line_id, tasks=tasks, keys=list(load.keys), max_bytes=max_bytes)
            try:
                opened = await _ask(load.client, request, StreamOpened)
            except RpcError as error:
                if error.code == ErrorCode.LOST:  # the store has restarted, or the line was idle
                    line.close()
                    await asyncio.sleep(AGAIN_S)  # paces the retries
                    continue
                raise with_shard_names(error, tasks, load.keys) from None
            if not 0 < opened.covered <= len(tasks) or opened.total_bytes <= 0:
                raise WireError(
                    f"{load.store} covers {opened.covered} of {len(tasks)} tasks in {opened.total_bytes} bytes"
                )
            return line, opened

    async def _line(self, store: str, client: Client) -> StreamLine:
        """Return the line to a store, opening a new one if there is none or it has ended."""
        async with self._opening[store]:
            line = self._lines.get(store)
            if line is None or not line.is_open:
                opened = await _ask(client, OpenLine(), LineOpened)
                if not opened.secret and not self.plain:
                    raise RpcError(
                        ErrorCode.BAD_REQUEST,
                        f"{store} streams without encryption, which this reader refuses: transport.encrypt_bulk must "
                        "be the same on both sides",
                    )
                line = self._lines[store] = StreamLine(opened, self._window, self._checker, self.counts)
            return line

    # ---- memory

    def _watch_idle(self) -> None:
        """Trim the memory of ended streams periodically until none is left."""
        if self._trimmer is None:
            self._trimmer = asyncio.get_running_loop().call_later(IDLE_S / 2, self._trim)

    def _trim(self) -> None:
        self._trimmer = None
        if self._regions.trim(time.monotonic() - IDLE_S):
            self._watch_idle()


async def _ask(client: Client, request: Request, reply: type[R]) -> R:
    """Repeat a request until the store answers. Only the fetch that needs the answer has a deadline."""
    while True:
        try:
            return await client.call(request, reply, deadline_s=CALL_S)
        except DeadlineExceeded:  # a closed client raises it at once
            await asyncio.sleep(AGAIN_S)
        except RpcError as error:
            if error.code not in (ErrorCode.BUSY, ErrorCode.DEADLINE, ErrorCode.DRAINING):
                raise
            await asyncio.sleep(max(AGAIN_S, error.retry_after_s))


def _once(tasks: Sequence[PutTask]) -> list[PutTask]:
    """Return the tasks without duplicates. Duplicates have the same task id and fence."""
    if len({task.task_id for task in tasks}) == len(tasks):
        return list(tasks)
    return list({(task.task_id, task.fence): task for task in tasks}.values())


def _set(future: asyncio.Future[tuple[StreamOutcome, str]], value: tuple[StreamOutcome, str]) -> None:
    if not future.done():
        future.set_result(value)


def with_shard_names(error: RpcError, tasks: Sequence[PutTask], keys: Sequence[str]) -> RpcError:
    """Return the error with shard names: the store names the tasks that it lacks, but the reader asked for shards."""
    if error.code != ErrorCode.MISSING:
        return error
    lacking = set(error.names)
    names = [f"{task.task_id}#{key}" for task in tasks if task.task_id in lacking for key in keys or ("*",)]
    if not names:  # the store has named shards
        return error
    return RpcError(error.code, f"{error}; asked for {_first(names)}", names=names)


def missing_shards(store: str, names: list[str]) -> RpcError:
    """Return the error for missing shards, each named `task_id#key`."""
    return RpcError(ErrorCode.MISSING, f"{store}: {len(names)} shards are missing: {_first(names)}", names=names)


def _first(names: Sequence[str]) -> str:
    """Return the first `SHOWN_NAMES` names as text for an error message."""
    return ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
