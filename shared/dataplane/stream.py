"""Fetches shards from stores of other hosts: opens streams, waits for them, keeps copies until they are cleared.

A fetch gives whole, checked shards or raises; two that want the same shard at the same time move it once. It must
never serve a copy of a task whose clearing the store has acknowledged before the fetch began.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import structlog

from proto.errors import WireError
from proto.messages import Cleared, ErrorCode, GetCleared, OpenStream, PutTask, StreamOpened
from proto.tensors import Array
from shared.dataplane.stream_arrival import Arrival, Arrived
from shared.dataplane.stream_cache import Source, StreamCache
from shared.dataplane.stream_copies import Copies, Held
from shared.dataplane.stream_memory import Regions
from shared.dataplane.stream_receiver import Counts, Incoming, Outcome, Receiver
from shared.moved import Moved, nobody
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError

STREAM_BYTES = 32 << 20
"""A fetch is cut into streams of at most so many bytes (or one task), of which `STREAMS` of a store run at a time."""
STREAMS = 4
FIRST_TASKS, OPEN_TASKS = 128, 4096
"""How many tasks the first stream of a fetch asks for, and the most that any does."""
CACHE_BYTES = 256 << 20
IDLE_S = 30.0
"""Memory of streams whose arrays are gone is kept for the next ones so long."""
INFLIGHT_BYTES = 16 << 20
CALL_S = 5.0
WATCH_S = 20.0
CORRUPT_TRIES = 3
SHOWN_NAMES = 8
AGAIN_S, AGAIN_MAX_S = 0.05, 2.0
"""Between a lost stream and its next life, twice as long after each that brought nothing: who makes streams get lost
must not make us spin, nor use up the store's.
"""


@dataclass(slots=True, eq=False)
class Load:
    """Shards of some tasks, under way from one store for whoever waits."""

    store: str
    tasks: list[PutTask]
    keys: tuple[str, ...]
    arrived: Callable[[Arrived, tuple[str, ...], bool], None]
    """Is told of each stream that is complete, and whether the cache keeps it, for whoever began the load."""
    waiters: int = 0
    shared: bool = False
    """Somebody else has waited for it, too."""
    kept_bytes: int = 0
    """What the cache took of it."""
    work: asyncio.Task[None] | None = None
    pieces: dict[int, Arrived] = field(default_factory=dict)
    """What came of the tasks from that one on."""
    coming: set[Incoming] = field(default_factory=set)
    """Its streams that are being received."""
    arrived_at: float = 0.0
    """When the last chunk of its other streams came, by `time.monotonic`."""
    _where: dict[tuple[str, int], Arrived] = field(default_factory=dict)

    def add(self, first: int, arrived: Arrived, kept: bool) -> None:
        self.pieces[first] = arrived
        self.arrived(arrived, self.keys, kept)

    def begin(self, incoming: Incoming) -> None:
        self.coming.add(incoming)

    def end(self, incoming: Incoming) -> None:
        self.coming.discard(incoming)
        self.arrived_at = max(self.arrived_at, incoming.arrived_at)

    @property
    def last_chunk_at(self) -> float:
        """When anything of it came last, by `time.monotonic`; 0: nothing did."""
        return max([self.arrived_at, *(incoming.arrived_at for incoming in self.coming)])

    def where(self, task: PutTask) -> Arrived | None:
        """Once the load is over."""
        if not self._where:
            self._where = {pair: arrived for arrived in self.pieces.values() for pair in arrived.table.index}
        return self._where.get((task.task_id, task.fence))


class Patience:
    """Of one fetch: it lasts while something comes, and so long after that."""

    def __init__(self, stall_s: float, moved: Moved) -> None:
        self.stall_s = stall_s
        self._moved = moved
        self._since = 0.0

    def begin(self) -> None:
        """What is waited for has its whole time from now on."""
        self._since = time.monotonic()
        self._moved()

    def heard(self, at: float) -> None:
        """The last chunk came at that time, by `time.monotonic`."""
        if at > self._since:
            self._since = at
            self._moved()

    @property
    def left_s(self) -> float:
        return max(0.0, self._since + self.stall_s - time.monotonic())


class StreamReader:
    """One per process; belongs to the event loop of its clients."""

    def __init__(
        self,
        client_of: Callable[[str], Client],
        threads: Executor,
        *,
        plain: bool = False,
        cache_bytes: int = CACHE_BYTES,
        inflight_bytes: int = INFLIGHT_BYTES,
    ) -> None:
        """`client_of`: bus client of a store by name. `threads`: for what takes long.

        `plain`: take streams in clear too; otherwise they are refused.
        """
        self._client_of = client_of
        self._threads = threads
        self.plain = plain
        self.cache = StreamCache(cache_bytes)
        self._regions = Regions()
        self._receiver = Receiver(inflight_bytes)
        self._trimmer: asyncio.TimerHandle | None = None
        # of each store its own: the streams of one that is away keep theirs until their waiters' deadlines
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, STREAMS))
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._loads: set[Load] = set()
        self._log = structlog.get_logger("stream")

    @property
    def counts(self) -> Counts:
        """What was received, refused and asked for again so far."""
        return self._receiver.counts

    def close(self) -> None:
        """End transfers, threads and sockets; what was fetched stays valid. Loop thread only."""
        for task in self._watchers.values():
            task.cancel()
        for load in list(self._loads):
            if load.work is not None:
                load.work.cancel()
        if self._trimmer is not None:
            self._trimmer.cancel()
        self._receiver.close()
        self._regions.close()

    async def fetch(
        self, store: str, tasks: Sequence[PutTask], keys: tuple[str, ...], stall_s: float, moved: Moved = nobody
    ) -> list[dict[str, Array]]:
        """The arrays under `keys` (none: all there are) of each task, private to the caller.

        `moved` is told, at least every `stall_s`, that something came. Raises RpcError (missing and collected with
        `names`), DeadlineExceeded when the store has said nothing, or nothing came, for `stall_s`.
        """
        client = self._client_of(store)
        await self._learn_cleared(store, client, stall_s, moved)
        patience = Patience(stall_s, moved)
        copies = Copies(self._threads)
        mine = self._begin(store, client, tasks, keys, range(len(tasks)), copies)
        if len(mine) == 1:
            [load] = mine
            if len(load.tasks) == len(tasks) and load.keys == keys:  # all of it, in this order, and nobody else's
                await self._wait(mine, mine, store, patience)
                return await copies.in_order([load.pieces[at] for at in sorted(load.pieces)], keys, load.shared)
        return await self._gather(store, client, tasks, keys, patience, copies, mine)

    async def _gather(
        self,
        store: str,
        client: Client,
        tasks: Sequence[PutTask],
        keys: tuple[str, ...],
        patience: Patience,
        copies: Copies,
        mine: set[Load],
    ) -> list[dict[str, Array]]:
        """Some of it is here or comes for somebody else; `mine`: the loads that this fetch began."""
        begun = set(mine)
        by_source: dict[Held, list[int]] = {}
        lacking: Sequence[int] = range(len(tasks))
        while True:
            found = self.cache.sources(store, [tasks[at] for at in lacking], keys)
            everywhere = {where for each in found for where, _ in each}
            for where in everywhere:
                if isinstance(where, Arrived):
                    self.cache.used(where)
                elif where not in mine:
                    where.shared = True
            await self._wait({where for where in everywhere if isinstance(where, Load)}, mine, store, patience)
            again: list[int] = []
            for at, each in zip(lacking, found, strict=True):
                here = _placed(tasks[at], each)
                if here is None:  # that load failed, for reasons of its own: fetch this task ourselves
                    again.append(at)
                    continue
                for held in here:
                    by_source.setdefault(held, []).append(at)
            if not again:
                break
            lacking = again
            mine = self._begin(store, client, tasks, keys, lacking, copies)
            begun |= mine
        shared = {arrived for load in begun if load.shared for arrived in load.pieces.values()}
        return await copies.arrays(tasks, keys, by_source, shared)

    # ---- loads

    def _begin(
        self,
        store: str,
        client: Client,
        tasks: Sequence[PutTask],
        keys: tuple[str, ...],
        lacking: Iterable[int],
        copies: Copies,
    ) -> set[Load]:
        """Start to fetch what is neither here nor under way; returns the loads begun."""
        groups: dict[tuple[str, ...], list[PutTask]] = {}
        candidates = [tasks[at] for at in lacking]
        absent = self.cache.absent(store, candidates, keys)
        if absent is None:
            groups[keys] = candidates
        else:
            for task, missing in zip(candidates, absent, strict=True):
                if missing is not None:
                    groups.setdefault(missing, []).append(task)
        mine: set[Load] = set()
        for part, wanted in groups.items():
            load = Load(store, _once(wanted), part, copies.begin)
            self.cache.expect(store, load.tasks, part, load)
            load.work = asyncio.create_task(self._load(load, client))
            load.work.add_done_callback(_seen)
            self._loads.add(load)
            mine.add(load)
        return mine

    async def _wait(self, loads: set[Load], mine: set[Load], store: str, patience: Patience) -> None:
        """Until all are over. Raises what went wrong with those that this fetch began."""
        works = {load.work: load for load in loads if load.work is not None}
        for load in loads:
            load.waiters += 1
        try:
            pending = set(works)
            patience.begin()
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=patience.left_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for work in done & {load.work for load in mine}:
                    if work.cancelled():
                        raise RpcError(ErrorCode.DRAINING, f"fetch from {store}: this reader was closed")
                    error = work.exception()
                    if error is not None:
                        raise error
                patience.heard(max(load.last_chunk_at for load in loads))
                if pending and not patience.left_s:
                    count = sum(len(works[work].tasks) for work in pending)
                    raise DeadlineExceeded(
                        f"fetch from {store}: {count} tasks have not come, nothing of them for {patience.stall_s:g} s; "
                        "is the store's host reachable? (ctl status)"
                    )
        finally:
            for load in loads:
                load.waiters -= 1
                if not load.waiters and load.work is not None and not load.work.done():
                    self._give_up(load)

    def _give_up(self, load: Load) -> None:
        """Nobody waits any more."""
        self.cache.forget(load.store, load.tasks, load)
        if load.work is not None:
            load.work.cancel()

    async def _load(self, load: Load, client: Client) -> None:
        at, ask = 0, FIRST_TASKS
        try:
            async with asyncio.TaskGroup() as group:
                while at < len(load.tasks):
                    await self._slots[load.store].acquire()
                    try:
                        tasks = load.tasks[at : at + ask]
                        opened = await self._open(load, client, tasks, STREAM_BYTES)
                    except BaseException:
                        self._slots[load.store].release()
                        raise
                    stream = group.create_task(self._stream(load, client, at, opened))
                    stream.add_done_callback(lambda _: self._slots[load.store].release())  # cancelled unbegun, too
                    at += opened.covered
                    # what does not fit is looked up for nothing, what fits should not be cut up: a little more
                    # tasks than fill a stream if they are as large as these
                    ask = min(OPEN_TASKS, STREAM_BYTES * opened.covered * 17 // 16 // opened.total_bytes + 1)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self.cache.forget(load.store, load.tasks, load)
            self._loads.discard(load)
            self._watch(load.store, client)
            self._watch_idle()

    async def _open(self, load: Load, client: Client, tasks: list[PutTask], max_bytes: int) -> StreamOpened:
        """Asks until the store answers: those who wait have deadlines, this has not."""
        request = OpenStream(tasks=tasks, keys=list(load.keys), max_bytes=max_bytes)
        while True:
            try:
                opened = await client.call(request, StreamOpened, deadline_s=CALL_S)
            except DeadlineExceeded:  # without a wait when the client was closed
                await asyncio.sleep(AGAIN_S)
                continue
            except RpcError as error:
                if error.code == ErrorCode.BUSY:
                    await asyncio.sleep(error.retry_after_s)
                    continue
                if error.code in (ErrorCode.DEADLINE, ErrorCode.DRAINING):
                    await asyncio.sleep(AGAIN_S)
                    continue
                raise with_shard_names(error, tasks, load.keys) from None
            if not opened.secret and not self.plain:
                raise RpcError(
                    ErrorCode.BAD_REQUEST,
                    f"{load.store} streams in clear and this reader does not: transport.encrypt_bulk must be the same "
                    "on both sides",
                )
            if not 0 < opened.covered <= len(tasks) or opened.total_bytes <= 0:
                raise WireError(
                    f"{load.store} covers {opened.covered} of {len(tasks)} tasks in {opened.total_bytes} bytes"
                )
            return opened

    async def _stream(self, load: Load, client: Client, first: int, opened: StreamOpened) -> None:
        """One stream to its end, opened again as often as it gets lost. `_load` gives its slot back."""
        tasks = load.tasks[first : first + opened.covered]
        corrupt = changed = 0
        pause = AGAIN_S
        arrival: Arrival | None = None
        while True:
            if arrival is not None and not arrival.same(opened):
                arrival = None
                changed += 1
                if changed >= CORRUPT_TRIES:
                    raise RpcError(
                        ErrorCode.INTERNAL,
                        f"{load.store} announces other bytes for the same shards again and again",
                    )
            if arrival is None:
                arrival = Arrival(opened, tasks, load.keys, STREAM_BYTES, self._regions)
            left = arrival.left
            outcome, why = await self._receive(load, arrival, opened)
            if outcome is Outcome.COMPLETE:
                self._keep(load, first, tasks, arrival.take())
                return
            self._log.warning("stream begins again", store=load.store, outcome=outcome.value, why=why)
            pause = AGAIN_S if arrival.left < left else min(AGAIN_MAX_S, 2 * pause)
            if outcome is Outcome.CORRUPT:
                arrival = None
                corrupt += 1
                if corrupt >= CORRUPT_TRIES:
                    names = [f"{task.task_id}#{key}" for task in tasks for key in load.keys or ("*",)]
                    raise RpcError(ErrorCode.MISSING, f"{load.store}: damaged shards: {why}", names=names)
            if outcome is Outcome.FAILED:
                raise RpcError(ErrorCode.INTERNAL, f"{load.store}: {why}")
            await asyncio.sleep(pause)
            opened = await self._open(load, client, tasks, 1 << 62)
            if opened.covered != len(tasks):
                raise RpcError(
                    ErrorCode.BUSY,
                    f"{load.store} covers {opened.covered} of {len(tasks)} tasks of a stream: they are in more files "
                    "than when it began, and it has descriptors for fewer; fetch again",
                    retry_after_s=AGAIN_S,
                )

    async def _receive(self, load: Load, arrival: Arrival, opened: StreamOpened) -> tuple[Outcome, str]:
        """Hand `arrival` to the receiving thread until that is done with it, also when this is cancelled."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[tuple[Outcome, str]] = loop.create_future()

        def settle(outcome: Outcome, why: str) -> None:
            loop.call_soon_threadsafe(_set, settled, (outcome, why))

        incoming = Incoming.of(arrival, load, opened, settle)
        load.begin(incoming)
        self._receiver.add(incoming)
        try:
            return await asyncio.shield(settled)
        except asyncio.CancelledError:
            self._receiver.cancel(incoming)
            await settled  # it may be writing to the memory right now
            raise
        finally:
            load.end(incoming)

    def _keep(self, load: Load, first: int, tasks: list[PutTask], arrived: Arrived) -> None:
        load.add(first, arrived, self.cache.keep(load.store, tasks, load.keys, load, arrived))

    def _watch_idle(self) -> None:
        """Look after the memory of streams until none is left."""
        if self._trimmer is None:
            self._trimmer = asyncio.get_running_loop().call_later(IDLE_S / 2, self._trim)

    def _trim(self) -> None:
        self._trimmer = None
        if self._regions.trim(time.monotonic() - IDLE_S):
            self._watch_idle()

    # ---- clears

    async def _learn_cleared(self, store: str, client: Client, limit_s: float, moved: Moved) -> None:
        """Drop the copies of what the store has cleared up to now; `limit_s` for each part of its answer."""
        more = True
        while more:
            state = self.cache.store(store)
            request = GetCleared(log=state.log, serial=state.serial)
            cleared = await client.call(request, Cleared, deadline_s=limit_s)
            self.cache.apply(store, cleared)
            moved()
            state = self.cache.store(store)
            more = cleared.more and (state.log, state.serial) != (request.log, request.serial)

    def _watch(self, store: str, client: Client) -> None:
        """Let the copies go when they are cleared, though nobody fetches any more."""
        if self.cache.holds(store) and store not in self._watchers:
            self._watchers[store] = asyncio.create_task(self._watching(store, client))

    async def _watching(self, store: str, client: Client) -> None:
        try:
            while self.cache.holds(store):
                state = self.cache.store(store)
                request = GetCleared(log=state.log, serial=state.serial, wait=True)
                try:
                    self.cache.apply(store, await client.call(request, Cleared, deadline_s=WATCH_S))
                except DeadlineExceeded:
                    # the store is away: what it cleared meanwhile is unknown
                    self.cache.drop_store(store)
                except RpcError as error:
                    self._log.warning("clears unknown, copies dropped", store=store, error=str(error))
                    self.cache.drop_store(store)
        finally:
            self._watchers.pop(store, None)


def _once(tasks: list[PutTask]) -> list[PutTask]:
    """Each task and fence once."""
    if len({task.task_id for task in tasks}) == len(tasks):
        return tasks
    return list({(task.task_id, task.fence): task for task in tasks}.values())


def _placed(task: PutTask, sources: Sequence[Source]) -> list[Held] | None:
    """Where what a task needs arrived; None: some of it has not."""
    here: list[Held] = []
    for where, keys in sources:
        arrived = where.where(task) if isinstance(where, Load) else where
        if arrived is None:
            return None
        here.append((arrived, keys))
    return here


def _seen(work: asyncio.Task[None]) -> None:
    """Whoever began the load reports its failure; if they left, nobody needs to."""
    if not work.cancelled():
        work.exception()


def _set(future: asyncio.Future[tuple[Outcome, str]], value: tuple[Outcome, str]) -> None:
    if not future.done():
        future.set_result(value)


def with_shard_names(error: RpcError, tasks: Sequence[PutTask], keys: Sequence[str]) -> RpcError:
    """The store names tasks it lacks, and says how many they are; a reader asked for shards."""
    if error.code != ErrorCode.MISSING:
        return error
    lacking = set(error.names)
    names = [f"{task.task_id}#{key}" for task in tasks if task.task_id in lacking for key in keys or ("*",)]
    if not names:  # it has named the shards
        return error
    return RpcError(error.code, f"{error}; asked for {_first(names)}", names=names)


def missing_shards(store: str, names: list[str]) -> RpcError:
    """`names`: `task_id#key` of each."""
    return RpcError(ErrorCode.MISSING, f"{store}: {len(names)} shards are not there: {_first(names)}", names=names)


def _first(names: Sequence[str]) -> str:
    """The first of them, for a message."""
    return ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
