"""The batch store service. It grants room, locates files and removes them. Its mailbox never transfers shards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from proto import messages
from proto.errors import WireError
from proto.ids import check_task_ids, split_task_id
from proto.messages import (
    Ack,
    Clear,
    ErrorCode,
    GetInventory,
    GetStorePlace,
    GetStoreStats,
    Held,
    Hold,
    Inventory,
    LineOpened,
    Locate,
    Located,
    OpenLine,
    OpenStream,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    StorePlace,
    StoreStats,
    StreamOpened,
    WaitKind,
    WaitRow,
)
from proto.registry import Message
from services.batch_store.files import Leftover, StoreFiles
from services.batch_store.relay import CALL_S, ChunkDigests, Relay
from services.batch_store.retirement import Retirement
from services.batch_store.room import RETRY_AFTER_S, Tier
from services.batch_store.spill import Spiller, spill_folder
from services.batch_store.state import StoreState
from services.batch_store.stream_server import StreamedContent, StreamServer
from services.batch_store.stream_source import DistributedFiles, SealedFile, StreamSource, pin
from shared import topology
from shared.actor.service import Service
from shared.dataplane.mapping import AGAIN_S, MappingCache
from shared.dataplane.reach import write_place
from shared.dataplane.stream import StreamReader
from shared.os_limits import DISK_FULL_ERRNOS, NO_DESCRIPTOR
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir, parse_service_name, service_name
from shared.stages import WEIGHTS
from shared.topology import distribution

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)
REAP_S = 0.25
EMIT_S = 1.0
FULL_SHARE = 0.95
"""A store is reported as full if at least this fraction of its limit is in use."""
REFUSED_S = 3.0
"""Time, in seconds, for which a refused put is reported as a current problem."""
MAX_STREAM_TASKS = 16384
"""Maximum number of tasks that one stream covers."""


class StoreService(Service):
    """One store of a host. Its files outlive the process and are removed with the run."""

    NAME = "batch-store"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._parent = os.getppid()
        loaded = topology.load_resolved(run.topology)
        settings = loaded.services.batch_store
        self.telemetry.traced_share = loaded.monitor.traced_share
        self.index = StoreState(self.name, settings.memory, self.incarnation, settings.spill_limit or 0)
        self._mappings = MappingCache()
        folder = f"{self.NAME}-{instance}"
        spill = spill_folder(self.name, settings.spill, run, folder) if settings.spill is not None else None
        # The identity of the directory is part of the registration.
        self._files = StoreFiles(self.name, run.shm / folder, spill, on_retire=self._mappings.drop)
        self._retirement = Retirement(self.name, self.index.room, self._files, asyncio.get_running_loop().time)
        self._spiller = Spiller(self.name, self.index, self._files, self._retirement) if spill is not None else None
        self._scanned = asyncio.Event()
        """Set once the files of earlier incarnations have been recovered."""
        handle = self.mailbox.handle
        handle(PutBegin, self._busy_without_descriptor(self._begin))
        handle(PutSeal, self._busy_without_descriptor(self._seal))
        handle(Locate, self._locate)
        handle(Clear, self._clear)
        handle(GetInventory, self._busy_without_descriptor(self._inventory))
        handle(GetStoreStats, self._stats)
        self._refused = (0, -1.0)
        """Number of puts so far for which there was no room, and the loop time at which the last one was noticed, or
        -1."""
        self._streams = StreamServer(self.name, plain=not loaded.transport.encrypt_bulk)
        self._digests = ChunkDigests()
        self._relay = Relay(
            self.name,
            self._client_of,
            StreamReader(self._client_of, plain=not loaded.transport.encrypt_bulk),
            begin=self._begin_fill,
            seal=self._seal_put,
            abandon=self._abandon_fill,
            on_progress=self._streams.look_again,
        )
        self._origins = {self.name}
        """The stores that are known to exist. Each has a client, and thereby a socket, for the rest of this life."""
        self._distributed = DistributedFiles(self.name, run.topology, loaded)
        handle(Hold, self._busy_without_descriptor(self._hold))
        handle(OpenLine, self._open_line)
        handle(OpenStream, self._busy_without_descriptor(self._open_stream))
        handle(GetStorePlace, self._busy_without_descriptor(self._store_place))

    # ---- life-cycle

    async def start(self) -> None:
        """Recover the files of earlier incarnations, then begin answering requests."""
        files = self._files
        try:
            files.check_room(self.index.room.limits)
        except RpcError as error:
            if not files.has_sealed():
                raise
            # Acknowledged files are served even if other processes have since filled the mount.
            self.log.warning("less room than the limit: puts may be answered with BUSY", why=str(error))
        self.index.recall(files.tombstones.read())
        for leftover in await asyncio.to_thread(files.scan):
            self._recover(leftover)
        self._retirement.settle()
        stats = self.index.stats()
        self.log.info("scanned", files=stats.files, tasks=stats.tasks, shards=stats.shards, bytes=stats.bytes)
        self._streams.bind(self.bulk_endpoint(), self.bulk_advertised)
        self._scanned.set()

    async def serve(self) -> None:
        files = await self._ready()
        emitted = self.loop.time()
        while True:
            await asyncio.sleep(REAP_S)  # the kernel does not report when a mapping ends
            files.check_exists()
            self._streams.check()
            if self.index.room.busy != self._refused[0]:
                self._refused = (self.index.room.busy, self.loop.time())
            for put_id in self.index.overdue(self.loop.time()):
                if not files.in_use(put_id):
                    self.log.warning("grant withdrawn: its producer is gone", put_id=put_id)
                    self._retirement.take([self.index.abandon(put_id)])
            self._retirement.settle()
            self._retirement.free(self.index.room.surplus(self.loop.time()))
            if self.loop.time() - emitted >= EMIT_S:
                if files.tombstones.incomplete:
                    with contextlib.suppress(OSError):  # logged at the first attempt
                        files.tombstones.compact(self.index.tombstones)
                emitted = self.loop.time()
                stats = msgspec.structs.asdict(self.index.stats())
                stats |= {
                    "spilled_bytes": self.index.room.used[Tier.DISK],
                    "memory_bytes": self.index.room.used[Tier.MEMORY],
                }
                self.telemetry.emit("store", {name: float(value) for name, value in stats.items()})
                streams = dataclasses.asdict(self._streams.stats())
                self.telemetry.emit("streams", {name: float(value) for name, value in streams.items()})

    async def drain(self) -> None:
        """Keep the files for a restarted store, unless the supervisor of the run has ended."""
        if self.supervised and os.getppid() != self._parent:
            self.run.remove_shards()

    async def close(self) -> None:
        await self._relay.close()
        await super().close()
        await asyncio.to_thread(self._streams.close)
        if self._spiller is not None:
            await self._spiller.close()
        self._files.close()  # handlers no longer run

    def bulk_endpoint(self) -> str:
        """Return the endpoint that serves chunks to readers without shared memory; it is not the mailbox's endpoint."""
        if self.listen:
            return f"{self.listen.rpartition(':')[0]}:*"
        return f"{self.run.endpoint(self.NAME, self.instance)}-bulk"

    def bulk_advertised(self, bound: str) -> str:
        """Return the endpoint to give to readers instead of `bound`, for networks that translate addresses."""
        return bound

    def registration(self) -> messages.Register:
        limit_bytes, identity = self.index.room.limit_bytes, self._files.identity
        return msgspec.structs.replace(super().registration(), limit_bytes=limit_bytes, data_id=identity)

    def heartbeat(self) -> messages.Heartbeat:
        stats = self.index.stats()
        return msgspec.structs.replace(super().heartbeat(), store_bytes=stats.bytes, store_shards=stats.shards)

    def on_upstream(self, stores: list[str]) -> None:
        if stores != self._relay.upstream:
            self.log.info("weights come from", stores=stores)
            self._relay.upstream = stores

    async def open_waits(self) -> list[WaitRow]:
        stats, now = self.index.stats(), self.loop.time()
        rows = self._relay.waits(now)
        refused = self._refused[1] >= 0 and now - self._refused[1] < REFUSED_S
        if stats.bytes < FULL_SHARE * stats.limit_bytes and not refused:
            return rows
        text = (
            f"{stats.bytes / (1 << 20):.1f} of {stats.limit_bytes / (1 << 20):.1f} MiB in use, {stats.tasks} tasks, "
            f"{stats.zombie_bytes / (1 << 20):.1f} MiB collected but still mapped"
        )
        if refused:
            text += f"; puts are being refused (last: {now - self._refused[1]:.1f} s ago; services.batch-store.memory)"
        return [*rows, WaitRow(WaitKind.ROOM, text, 0.0)]

    def _recover(self, leftover: Leftover) -> None:
        if leftover.table is not None:
            put_id = leftover.name.removesuffix(".blk")
            self._retirement.take(self.index.recover(put_id, leftover.nbytes, leftover.table, leftover.place))
            return
        if leftover.unreadable:
            self.log.error("unreadable file kept; its shards are missing", file=leftover.name, why=leftover.why)
            return
        if leftover.name.endswith(".blk") and not leftover.duplicate:
            self.log.error("damaged file deleted", file=leftover.name, bytes=leftover.nbytes, why=leftover.why)
        self._retirement.take([self.index.recover_refuse(leftover.name, leftover.nbytes, leftover.place)])

    async def _ready(self) -> StoreFiles:
        """Wait until the files of earlier incarnations have been recovered, and return this store's files. The
        caller's deadline limits the wait.
        """
        await self._scanned.wait()
        return self._files

    # ---- requests

    def _busy_without_descriptor(self, answer: Callable[[M, Call], Awaitable[A]]) -> Callable[[M, Call], Awaitable[A]]:
        """Wrap `answer` so that it closes cached mappings and raises RpcError(busy) when no descriptor is left."""

        async def asked(request: M, call: Call) -> A:
            try:
                return await answer(request, call)
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                self.index.room.busy += 1
                self._mappings.clear()
                text = (
                    f"{self.name}: {type(request).__name__}: no descriptor is left ({error}); if this persists, raise "
                    "ulimit -n or put more tasks in each put"
                )
                raise RpcError(ErrorCode.BUSY, text, retry_after_s=RETRY_AFTER_S) from None

        return asked

    async def _begin(self, request: PutBegin, call: Call) -> PutGrant:
        return await self._grant(request, call.deadline)

    async def _grant(self, request: PutBegin, deadline: float) -> PutGrant:
        files = await self._ready()
        self._retirement.settle()
        self.index.check(request.put_id, request.nbytes, request.tasks)
        if self._retirement.is_due(f"{request.put_id}.tmp"):
            text = f"{self.name}: put {request.put_id} was abandoned and its file still waits for a descriptor"
            raise RpcError(ErrorCode.BUSY, text, retry_after_s=RETRY_AFTER_S)
        self._retirement.free(self.index.make_room(request.put_id, request.nbytes))
        if self._spiller is not None:
            await self._spiller.make_room(request.put_id, request.nbytes, deadline)
        spare = self._claim_spare(files, request)
        try:
            new = self.index.begin(request.put_id, request.nbytes, request.tasks, self.loop.time(), spare)
        except RpcError:
            if spare is not None:
                files.release(spare)
            raise
        if not new:
            if request.full:
                self.index.room.busy += 1
                self._retirement.free(self.index.room.give_up_spares())
            return PutGrant(path=files.path(f"{request.put_id}.tmp"))
        try:
            if spare is None:
                return PutGrant(path=files.create(request.put_id, request.nbytes))
            path = files.reuse(spare, request.put_id, request.nbytes)
        except OSError as error:
            self.index.forget(request.put_id)
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise self._mount_full(f"put of {request.nbytes} bytes refused", error) from None
        self.index.room.lent += 1
        return PutGrant(path=path)

    def _mount_full(self, what: str, error: OSError) -> RpcError:
        """Give up the spares and return the busy error, which makes the producer ask again."""
        self.index.room.busy += 1
        self._retirement.free(self.index.room.give_up_spares())
        text = f"{self.name}: {what}: no room for another file ({error})"
        return RpcError(ErrorCode.BUSY, text, retry_after_s=RETRY_AFTER_S)

    def _claim_spare(self, files: StoreFiles, request: PutBegin) -> str | None:
        """Return a locked spare for a new grant, or None if there is none."""
        spare = self.index.spare(request.put_id, request.nbytes)
        if spare is None:
            return None
        if not files.claim(spare):  # a reader that opened it under its former name still has it open
            self._retirement.free([self.index.room.give_up_spare(spare)])
            return None
        return spare

    async def _seal(self, request: PutSeal, call: Call) -> PutSealed:
        return await self._seal_put(request.put_id)

    async def _seal_put(self, put_id: str) -> PutSealed:
        files = await self._ready()
        nbytes = self.index.to_seal(put_id)
        if nbytes is None:
            return PutSealed(nbytes=self.index.sealed(put_id).nbytes)
        try:
            table = files.read_table(f"{put_id}.tmp")
            if table.file_bytes != nbytes:
                raise WireError(f"file of {table.file_bytes} bytes, but {nbytes} were granted")
            new = self.index.has_new_shards(put_id, table)
        except (RpcError, WireError) as error:
            self._retirement.take([self.index.abandon(put_id)])
            if isinstance(error, WireError):
                raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: put {put_id}: {error}") from None
            raise
        if new:
            try:
                files.seal(put_id)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
                raise self._mount_full(f"put {put_id} not sealed", error) from None
            self.index.seal(put_id, table)
            self._retirement.take(self.index.supersede(put_id))
        else:
            self._retirement.take([self.index.abandon(put_id)])
        return PutSealed(nbytes=nbytes)

    async def _locate(self, request: Locate, call: Call) -> Located:
        files, places = await self._files_of(request.tasks)
        return Located(files=[file.path for file in files], places=places)

    async def _files_of(self, tasks: Sequence[PutTask]) -> tuple[list[SealedFile], list[list[int]]]:
        """Return files and, for each task, the indices of those that hold it.

        Raises RpcError(collected) or RpcError(missing), with `names`.
        """
        files = await self._ready()
        while True:
            put_ids, places = self.index.locate(tasks)
            sealed = [self.index.sealed(put_id) for put_id in put_ids]
            located = [
                SealedFile(files.path(f"{put_id}.blk", entry.place), entry.table)
                for put_id, entry in zip(put_ids, sealed, strict=True)
            ]
            lost = [at for at, entry in enumerate(sealed) if entry.place is Tier.DISK and _is_deleted(located[at].path)]
            if not lost:
                return located, places
            for at in lost:
                self.log.error("spilled file deleted by another process; its shards are missing", file=located[at].path)
                self._retirement.take(self.index.lose(put_ids[at]))

    async def _clear(self, request: Clear, call: Call) -> Ack:
        began = self.loop.time()
        files = await self._ready()
        try:  # a restart reads each tombstone from a line of its own
            check_task_ids([task.task_id for task in request.tasks])
        except WireError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: clear: {error}") from None
        bad = next((task for task in request.tasks if not 0 <= task.fence < 1 << 63), None)
        if bad is not None:
            text = f"{self.name}: clear of {bad.task_id} under fence {bad.fence}: a fence must be in 0..2**63-1"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        try:
            files.tombstones.append(self.index.entomb(request.tasks))
        except OSError as error:  # a full mount must not prevent the clear, which makes room
            self.log.error("tombstones not written", error=str(error))
        self._retirement.take(self.index.clear(request.tasks))
        self._relay.drop(self.index.is_collected)
        try:
            files.tombstones.compact(self.index.tombstones)
        except OSError as error:  # the list in use is longer but has the same content
            self.log.error("tombstones not compacted", error=str(error))
        tasks = self.telemetry.traced(task.task_id for task in request.tasks)
        self.telemetry.part("collect", self.loop.time() - began, {"tasks": tasks})
        return Ack()

    async def _inventory(self, request: GetInventory, call: Call) -> Inventory:
        files = await self._ready()
        if request.tasks:
            await self._check(files, request.tasks)
            tasks, cursor = [task for task in request.tasks if self.index.content_hashes(task)], 0
        else:
            tasks, cursor = self.index.inventory(request.cursor)
        hashes = [self.index.content_hashes(task) for task in tasks]
        return Inventory(tasks=tasks, cursor=cursor, files=[*map(len, hashes)], hashes=[*chain.from_iterable(hashes)])

    async def _check(self, files: StoreFiles, tasks: Sequence[PutTask]) -> None:
        """Read all shards of these tasks and forget those whose bytes are no longer the ones that were put."""
        for put_id, indices in self.index.files_of(tasks).items():
            place = self.index.place_of(put_id)
            if place is None:
                continue
            damaged = await asyncio.to_thread(files.damaged, put_id, place, indices)
            if damaged == [] or self.index.place_of(put_id) is not place:  # cleared or moved meanwhile
                continue
            table = self.index.sealed(put_id).table
            names = table.task_ids if damaged is None else [table.task_ids[index] for index in damaged]
            self.log.error("damaged shards dropped", put_id=put_id, tasks=names[:8], count=len(names))
            self._retirement.take(self.index.lose(put_id, damaged))

    async def _stats(self, request: GetStoreStats, call: Call) -> StoreStats:
        await self._ready()
        self._retirement.settle()
        return self.index.stats()

    # ---- readers that do not share memory with this store

    async def _open_line(self, request: OpenLine, call: Call) -> LineOpened:
        await self._ready()
        return self._streams.open_line()

    async def _open_stream(self, request: OpenStream, call: Call) -> StreamOpened:
        tasks = request.tasks[:MAX_STREAM_TASKS]  # the reply's `covered` tells the reader how many
        if not tasks or len({task.task_id for task in tasks}) != len(tasks):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: a stream must name at least one task, each only once")
        if len(set(request.keys)) != len(request.keys):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: a stream may name each key only once")
        if len(tasks) == 1 and not request.keys and self._relay.is_coming(tasks[0]):
            filling = self._relay.source(tasks[0])
            if filling is None:
                text = f"{self.name}: the head of {tasks[0].task_id} has not arrived yet"
                raise RpcError(ErrorCode.BUSY, text, retry_after_s=AGAIN_S)
            return self._streams.open_stream(request.line_id, filling)
        if len(tasks) == 1 and tasks[0].task_id.startswith(f"{distribution.SPLIT}/"):
            _, whole = await asyncio.to_thread(self._distributed.open, tasks[0])
            return self._streams.open_stream(request.line_id, whole)
        _, source = await self._pinned(tasks, request.keys, request.max_bytes)
        return self._streams.open_stream(request.line_id, source)

    async def _pinned(
        self, tasks: Sequence[PutTask], keys: Sequence[str], max_bytes: int
    ) -> tuple[list[SealedFile], StreamSource]:
        """Return the sealed files of the first tasks, and a stream of them. Raises the errors of `OpenStream`."""
        while True:
            sealed, places = await self._files_of(tasks)
            try:
                limits = (keys, max_bytes, self._mappings)
                return sealed, await asyncio.to_thread(pin, self.name, sealed, places, tasks, *limits)
            except FileNotFoundError:
                await asyncio.sleep(AGAIN_S)  # collected before it was mapped; the index knows this by now

    async def _hold(self, request: Hold, call: Call) -> Held:
        try:
            split = split_task_id(request.task.task_id)[0]
        except WireError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: {error}") from None
        source: StreamedContent
        if split == distribution.SPLIT:
            path, source = await asyncio.to_thread(self._distributed.open, request.task)
        elif split == WEIGHTS:
            try:
                sealed, source = await self._pinned([request.task], (), 1 << 62)
            except RpcError as error:
                if error.code != ErrorCode.MISSING:
                    raise
                await self._check_origin(request.origin)
                return await self._relay.hold(request)
            path = sealed[0].path
        else:
            text = (
                f"{self.name}: {request.task.task_id} is neither a version of the weights nor a file from the home host"
            )
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        digests = await self._digests.page(path, source, request.first) if request.first >= 0 else []
        return Held(total_bytes=source.total_bytes, held_bytes=source.total_bytes, digests=digests)

    async def _check_origin(self, origin: str) -> None:
        """Raise RpcError unless `origin` is a registered store, so that a request cannot open sockets for other
        names."""
        if origin in self._origins:
            return
        service, instance = parse_service_name(origin)
        if service != self.NAME or service_name(service, instance) != origin:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self.name}: origin {origin[:80]!r} is not the name of a store")
        try:
            await self.resolve(service, instance)
        except RpcError as error:
            if error.code != ErrorCode.MISSING:
                raise
            text = f"{self.name}: origin {origin} is not a store of this run: it has not registered (yet)"
            raise RpcError(ErrorCode.NOT_READY, text, retry_after_s=RETRY_AFTER_S) from None
        self._origins.add(origin)

    def _client_of(self, store: str) -> Client:
        return self.client(*parse_service_name(store))

    async def _begin_fill(self, put_id: str, nbytes: int, task: PutTask) -> str:
        begin = PutBegin(put_id=put_id, nbytes=nbytes, tasks=[task])
        return (await self._grant(begin, self.loop.time() + CALL_S)).path

    def _abandon_fill(self, put_id: str) -> None:
        if self.index.is_granted(put_id):
            self._retirement.take([self.index.abandon(put_id)])

    async def _store_place(self, request: GetStorePlace, call: Call) -> StorePlace:
        path = (await self._ready()).path("place")
        try:
            return write_place(path)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise self._mount_full("cannot determine whether a reader shares its memory", error) from None


def _is_deleted(path: str) -> bool:
    """Return whether the file no longer exists. Returns False if a disk error prevents the check."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
