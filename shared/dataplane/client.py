"""Puts shards into stores on this host, and fetches shards from any store. The stores themselves handle only metadata.

Every wait has a deadline, and no computation runs on the event loop's thread. A put survives a restart of its store: it
continues under the same id, or begins again if the unsealed file was lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from proto.blockfile import BlockLayout
from proto.errors import WireError
from proto.limits import MAX_NDIM
from proto.messages import (
    Ack,
    BatchMeta,
    ErrorCode,
    GetInventory,
    GetStorePlace,
    Held,
    Hold,
    Inventory,
    Locate,
    Located,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    ReportShards,
    StorePlace,
)
from proto.registry import Message, Request
from proto.tensors import Array, as_wire
from shared.dataplane.mapping import AGAIN_S, BlockMapping, DamagedShards, TableCache, lock_named, merged
from shared.dataplane.reach import Reach, shares_memory
from shared.dataplane.reused_pages import ReadMappingPool, WriteMappingPool
from shared.dataplane.stream import (
    INFLIGHT_BYTES,
    OnProgress,
    StreamReader,
    ignore_progress,
    missing_shards,
    with_shard_names,
)
from shared.dataplane.write import copy_block, write_block
from shared.os_limits import DISK_FULL_ERRNOS, NO_DESCRIPTOR, raise_descriptor_limit
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import parse_service_name

LOCATE_TASKS = 16384
_PLAIN = frozenset(np.dtype(name) for name in ("<i4", "<f4", "u1", "<i8", "?"))
"""dtypes of most shards. Arrays of other types are checked individually."""
FULL_RETRY_S = 0.5
REPORT_S = 10.0
"""Maximum time, in seconds, that a reader waits for its report to be acted upon. Meanwhile, the store rereads the
shards."""
LARGE_BYTES = 256 << 20
R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True)
class TaskShards:
    """The shards to put for one task, in the order of its stage's keys. The content hash uses the same order."""

    task_id: str
    fence: int
    shards: dict[str, Array]


@dataclass(frozen=True)
class Receipt:
    """A sealed task. `content_hash` is defined in `proto.blockfile`; `nbytes` is the size of its shards."""

    task_id: str
    fence: int
    store: str
    content_hash: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """Tasks with the same keys to read from one store. `keys` None means all keys; `at` lists the positions of the
    tasks in the result.
    """

    store: str
    keys: tuple[str, ...] | None
    at: Sequence[int]
    tasks: list[PutTask]


class DataClient:
    """Puts and fetches shards. A process has one data client, on the event loop of its bus clients."""

    def __init__(
        self,
        client_of: Callable[[str, int], Client],
        *,
        reports: bool = False,
        reach: Reach = Reach.AUTO,
        plain: bool = False,
        inflight_bytes: int = INFLIGHT_BYTES,
        cached_rows: int | None = None,
    ) -> None:
        """`client_of` returns the bus client of (service, instance), as `Service.client` does.

        With `reports`, missing and damaged shards are reported to the scheduler, so that they are produced again. The
        other arguments concern stores on other hosts. With `plain`, unencrypted streams are also accepted.
        `inflight_bytes` limits the bytes that are requested but not yet received. `cached_rows` limits the file tables
        that are kept in case the process fetches from a file again; None: `mapping.CACHED_ROWS`.
        """
        raise_descriptor_limit()
        self._client_of = client_of
        self._reports = reports
        self._reach = reach
        self._shares: dict[str, bool] = {}
        self._cache = TableCache(cached_rows)
        self._threads = ThreadPoolExecutor(2, "dataplane")
        self._helper = ThreadPoolExecutor(1, "dataplane-helper")
        self._write_mappings = WriteMappingPool()
        self._read_mappings = ReadMappingPool(self._helper)
        self.streams = StreamReader(
            lambda store: client_of(*parse_service_name(store)), plain=plain, inflight_bytes=inflight_bytes
        )

    def close(self) -> None:
        """Shut down the threads. Fetched arrays stay valid."""
        self.streams.close()
        self._threads.shutdown(wait=False)
        self._helper.shutdown(wait=False)
        self._read_mappings.close()
        self._write_mappings.close()

    async def put(self, tasks: Sequence[TaskShards], *, store: str, deadline_s: float) -> list[Receipt]:
        """Put all shards of `tasks` as one file into `store` (`batch-store/0`). Return one receipt per task, in order.

        The arrays must not change until this returns. Raises WireError for values that cannot be written,
        DeadlineExceeded, and RpcError: busy (no room by the deadline), collected (`names` holds the tombstoned tasks),
        conflict (same fence, different bytes), bad_request (larger than the store).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        client = self._client_of(*parse_service_name(store))
        if not await self._shares_memory(store, client, deadline):
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"put into {store}, which is on another host: put into a store on this host"
            )
        layout = await loop.run_in_executor(self._threads, _plan, tasks)
        put_id = secrets.token_hex(16)
        begin = PutBegin(
            put_id=put_id, nbytes=layout.file_bytes, tasks=[PutTask(task.task_id, task.fence) for task in tasks]
        )
        grant = await _ask(client, begin, PutGrant, deadline)
        while True:
            try:
                written = await self._write(grant.path, tasks, layout, store)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
                # The store counts requests with `full` set. A producer that sends them keeps its grant.
                again = msgspec.structs.replace(begin, full=True)
                grant = await _ask(client, again, PutGrant, deadline)
                await _wait_for_mount(grant.path, layout.file_bytes, deadline)
                continue
            if written is None:  # the grant was revoked, or lost with the store
                grant = await _ask(client, begin, PutGrant, deadline)
                continue
            descriptor, receipts = written
            try:
                await _ask(client, PutSeal(put_id=put_id), PutSealed, deadline)
            except RpcError as error:
                if error.code != ErrorCode.MISSING:
                    raise
            else:
                return receipts
            finally:
                os.close(descriptor)
            grant = await _ask(client, begin, PutGrant, deadline)  # a restarted store has deleted the unsealed file

    async def fetch(
        self, meta: BatchMeta, keys: Sequence[str], *, deadline_s: float, on_progress: OnProgress = ignore_progress
    ) -> list[dict[str, Array]]:
        """Return the shards `keys` of every task in `meta`, one dict per task, private to the caller.

        Shards in stores on this host are mapped copy-on-write, and verified when this process reads them for the first
        time. Others are streamed, and every byte is verified. Without keys, all shards in the tasks' stores are
        returned in put order, as for the weights of a version. Raises DeadlineExceeded, RpcError(collected), and, for
        missing or damaged shards (`names` holds `task_id#key`), RpcError(missing) after reporting them. When data
        arrives, `on_progress` is called and a stream's deadline is extended: a stream ends after `deadline_s` without
        data, not because it is slow.
        """
        results: list[dict[str, Array]] = [{} for _ in meta.tasks]
        wanted = _by_store(meta, keys)
        jobs = [asyncio.ensure_future(self._fetch(wants, results, deadline_s, on_progress)) for wants in wanted]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        order = tuple(keys)
        if all(wants.keys in (None, order) for wants in wanted):
            return results
        return [{key: shards[key] for key in order} for shards in results]

    async def hold(
        self, task: PutTask, *, store: str, origin: str, stall_s: float, on_progress: OnProgress = ignore_progress
    ) -> None:
        """Have `store` fetch a version that the trainer put into `origin`, and return once `store` has the whole
        version.

        Calls `on_progress` when there is progress. Raises DeadlineExceeded after `stall_s` without progress, and
        RpcError as `Hold` does.
        """
        loop = asyncio.get_running_loop()
        client = self._client_of(*parse_service_name(store))
        since, most = loop.time(), -1
        while True:
            left_s = since + stall_s - loop.time()
            reply = await client.call(Hold(task=task, origin=origin, whole=True), Held, deadline_s=left_s)
            if reply.held_bytes == reply.total_bytes:
                return
            if reply.held_bytes > most:
                most, since = reply.held_bytes, loop.time()
                on_progress()

    async def recheck(self, task: PutTask, *, store: str) -> None:
        """Have a store read the shards of a task again and drop those that are damaged. Raises RpcError."""
        client = self._client_of(*parse_service_name(store))
        await client.call(GetInventory(tasks=[task]), Inventory, deadline_s=REPORT_S)

    def is_streamed(self, store: str) -> bool:
        """Return whether fetches from `store` are streamed, or False while that is unknown."""
        return self._reach is Reach.STREAM or self._shares.get(store) is False

    async def _shares_memory(self, store: str, client: Client, deadline: float) -> bool:
        if store not in self._shares:
            place = await _ask(client, GetStorePlace(), StorePlace, deadline)
            self._shares[store] = self._with_descriptors(lambda: shares_memory(place), f"to look for {store}")
        return self._shares[store]

    def _with_descriptors(self, work: Callable[[], T], what: str) -> T:
        """Return the result of `work`. If no descriptor is left, close the kept mappings and try once more.

        Raises RpcError(internal) if there is still none.
        """
        try:
            return work()
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
        self._write_mappings.close()
        self._read_mappings.close()
        try:
            return work()
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            raise RpcError(
                ErrorCode.INTERNAL,
                f"no descriptor is left {what} ({error.strerror}): raise ulimit -n, or put more tasks in one put",
            ) from None

    # ---- put

    async def _write(
        self, path: str, tasks: Sequence[TaskShards], layout: BlockLayout, store: str
    ) -> tuple[int, list[Receipt]] | None:
        """Return the receipts and the descriptor, whose lock marks a live producer, or None if the file is gone."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._fill, path, tasks, layout, store)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_close_result)
            raise

    def _fill(
        self, path: str, tasks: Sequence[TaskShards], layout: BlockLayout, store: str
    ) -> tuple[int, list[Receipt]] | None:
        descriptor = self._with_descriptors(lambda: lock_named(path, os.O_RDWR), f"to write {path}")
        if descriptor is None:
            return None
        try:
            target = self._write_mappings.of(descriptor, layout.file_bytes)
            if target is None:
                checksums = write_block(descriptor, layout, self._helper)
            else:
                # With two cores, the other core is computing the canary while large weights are put.
                helps = layout.file_bytes < LARGE_BYTES or len(os.sched_getaffinity(0)) > 2
                checksums = copy_block(target, layout, self._helper if helps else None)
            return descriptor, [
                Receipt(task.task_id, task.fence, store, digest, nbytes)
                for task, digest, nbytes in zip(tasks, *layout.sums(checksums), strict=True)
            ]
        except BaseException:
            os.close(descriptor)
            raise

    # ---- fetch

    async def _fetch(
        self, wants: _ReadRequest, results: list[dict[str, Array]], deadline_s: float, on_progress: OnProgress
    ) -> None:
        deadline = asyncio.get_running_loop().time() + deadline_s
        client = self._client_of(*parse_service_name(wants.store))
        try:
            if self._reach is Reach.STREAM or not await self._shares_memory(wants.store, client, deadline):
                on_progress()
                per_task = await self.streams.fetch(wants.store, wants.tasks, wants.keys or (), deadline_s, on_progress)
            else:
                per_task = await self._map(client, wants, deadline)
                _check_whole(per_task, wants)
        except RpcError as error:
            if error.code == ErrorCode.MISSING and self._reports:
                await self._report(wants, str(error))
            raise
        for at, arrays in zip(wants.at, per_task, strict=True):
            results[at] = merged(results[at], arrays, ()) if results[at] else arrays

    async def _report(self, wants: _ReadRequest, why: str) -> None:
        """Report to the scheduler that these shards cannot be read. Once the scheduler answers, the shards will be
        produced again.
        """
        log = structlog.get_logger("dataplane")
        log.error("shards not readable", store=wants.store, tasks=len(wants.tasks), why=why[:400])
        request = ReportShards(store=wants.store, tasks=wants.tasks)
        try:
            await self._client_of("scheduler", 0).call(request, Ack, deadline_s=REPORT_S)
        except RpcError as error:  # the next inventory finds what the store has lost
            log.warning("shards not reported", store=wants.store, error=str(error))

    async def _map(self, client: Client, wants: _ReadRequest, deadline: float) -> list[dict[str, Array]]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                located = await client.call(Locate(tasks=wants.tasks), Located, deadline_s=deadline - loop.time())
            except RpcError as error:
                raise with_shard_names(error, wants.tasks, wants.keys or ()) from None
            what = f"to map {len(located.files)} files of {wants.store}"
            read = partial(self._with_descriptors, partial(self._read, located, wants), what)
            per_task = await loop.run_in_executor(self._threads, read)
            if per_task is not None:
                return per_task
            await asyncio.sleep(AGAIN_S)  # the file was collected after the answer; the next answer will say so

    def _read(self, located: Located, wants: _ReadRequest) -> list[dict[str, Array]] | None:
        per_task: list[dict[str, Array]] = [{} for _ in wants.tasks]
        try:
            whole = wants.keys is None  # weights, all of which a service will read while it samples
            for place, ats in _by_file(located).items():
                mapping = BlockMapping(located.files[place], self._cache, self._read_mappings)
                index = mapping.table.index
                if whole:
                    mapping.touch(self._helper)
                rows = [index.get((wants.tasks[at].task_id, wants.tasks[at].fence), -1) for at in ats]
                if -1 in rows:
                    ats = [at for at, row in zip(ats, rows, strict=True) if row >= 0]
                    rows = [row for row in rows if row >= 0]
                for at, arrays in zip(ats, mapping.arrays(rows, wants.keys, self._helper), strict=True):
                    per_task[at] = merged(per_task[at], arrays, wants.keys or ()) if per_task[at] else arrays
        except FileNotFoundError:
            return None
        except DamagedShards as error:
            raise RpcError(ErrorCode.MISSING, f"{wants.store}: damaged shards: {error}", names=error.names) from None
        except WireError as error:  # a header or table is damaged
            names = [f"{wants.tasks[at].task_id}#{key}" for at in ats for key in wants.keys or ("*",)]
            text = f"{wants.store}: damaged shards: {located.files[place]}: {error}"
            raise RpcError(ErrorCode.MISSING, text, names=names) from None
        return per_task


async def _ask(client: Client, request: Request, reply: type[R], deadline: float) -> R:
    """Return a store's answer, retrying while the store is busy. Raises RpcError(busy) at `deadline`, which is in loop
    time."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await client.call(request, reply, deadline_s=deadline - loop.time())
        except RpcError as error:
            if error.code != ErrorCode.BUSY or loop.time() + error.retry_after_s >= deadline:
                raise
            await asyncio.sleep(error.retry_after_s)


async def _wait_for_mount(path: str, nbytes: int, deadline: float) -> None:
    """Wait until the next attempt is due. Raises RpcError(busy) if the deadline is earlier."""
    if asyncio.get_running_loop().time() + FULL_RETRY_S >= deadline:
        raise RpcError(
            ErrorCode.BUSY,
            f"{path}: no room for {nbytes} bytes on the mount although the store granted them; something else is "
            "filling it (or its quota): enlarge it (mount -o remount,size=…) or lower services.batch-store.memory",
            retry_after_s=FULL_RETRY_S,
        )
    await asyncio.sleep(FULL_RETRY_S)


def _by_file(located: Located) -> dict[int, list[int]]:
    """Return, for each file, the positions of the tasks whose shards it holds. Files are ordered by their first
    task."""
    by_file: dict[int, list[int]] = {}
    for at, places in enumerate(located.places):
        for place in places:
            by_file.setdefault(place, []).append(at)
    return by_file


def _check_whole(per_task: list[dict[str, Array]], wants: _ReadRequest) -> None:
    """Raise RpcError(missing), which names the shards, if some shards were not found in any file."""
    keys = wants.keys or ()
    lacking = [at for at, arrays in enumerate(per_task) if len(arrays) < len(keys)]
    if lacking:
        names = [f"{wants.tasks[at].task_id}#{key}" for at in lacking for key in keys if key not in per_task[at]]
        raise missing_shards(wants.store, names)


def _plan(tasks: Sequence[TaskShards]) -> BlockLayout:
    return BlockLayout([(task.task_id, task.fence, _writable(task)) for task in tasks])


def _writable(task: TaskShards) -> dict[str, Array]:
    """Return the shards in the form to be written. Raises WireError with the name of a shard that cannot be written."""
    return {
        key: array
        if isinstance(array, np.ndarray)
        and array.dtype in _PLAIN
        and array.flags.c_contiguous
        and array.ndim <= MAX_NDIM
        else _as_wire(array, f"{task.task_id}#{key}")
        for key, array in task.shards.items()
    }


def _as_wire(array: Array, where: str) -> Array:
    if not hasattr(array, "dtype"):
        raise WireError(f"{where} is a {type(array).__name__}: shards are arrays; omit keys without a value")
    try:
        return as_wire(array)
    except WireError as error:
        raise WireError(f"{where}: {error}") from None


def _close_result(work: asyncio.Future[tuple[int, list[Receipt]] | None]) -> None:
    """Close the file of a cancelled put, so that the store reclaims its space."""
    if not work.cancelled() and work.exception() is None:
        written = work.result()
        if written is not None:
            os.close(written[0])


def _by_store(meta: BatchMeta, keys: Sequence[str]) -> list[_ReadRequest]:
    part_of = {key: number for number, part in enumerate(meta.parts) for key in part.keys}
    unknown = [key for key in keys if key not in part_of]
    if unknown:
        raise RpcError(
            ErrorCode.MISSING,
            f"the batch has no {', '.join(unknown)}: its keys are {', '.join(part_of)}",
            names=unknown,
        )
    places: dict[tuple[int, ...], list[int]] = {}
    for at, handle in enumerate(meta.tasks):
        places.setdefault(tuple(handle.stores), []).append(at)
    wanted: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}
    for stores, ats in places.items():
        first = meta.tasks[ats[0]].task_id
        if keys and len(stores) != len(meta.parts):
            raise WireError(f"task {first}: {len(stores)} stores for {len(meta.parts)} parts")
        for number, mine in _split(stores, keys, part_of).items():
            if not 0 <= number < len(meta.stores):
                raise WireError(f"task {first}: store number {number}, but only {len(meta.stores)} stores are listed")
            wanted.setdefault((number, mine), []).extend(ats)
    tasks = [PutTask(handle.task_id, handle.fence) for handle in meta.tasks]
    return [
        _ReadRequest(meta.stores[number], mine, page, [tasks[at] for at in page])
        for (number, mine), ats in wanted.items()
        for page in (ats[first : first + LOCATE_TASKS] for first in range(0, len(ats), LOCATE_TASKS))
    ]


def _split(stores: tuple[int, ...], keys: Sequence[str], part_of: dict[str, int]) -> dict[int, tuple[str, ...] | None]:
    """Return the keys to read from each store. Without keys, each store is mapped to None."""
    if not keys:
        return dict.fromkeys(stores)
    by_store: dict[int, list[str]] = {}
    for key in keys:
        by_store.setdefault(stores[part_of[key]], []).append(key)
    return {number: tuple(mine) for number, mine in by_store.items()}
