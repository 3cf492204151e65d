"""The recorder process: asks the scheduler for tasks that have ended, reads their shards and writes their samples.

Nothing waits long for the recorder: after a task has ended, the scheduler keeps it for only a few seconds
(`services/scheduler/ended.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from proto.errors import WireError
from proto.messages import BatchMeta, BatchPart, EndedTask, ErrorCode, PutTask, SamplesDue, TakeSamples, TaskHandle
from proto.tensors import Array
from services.recorder.build import bare, records
from services.recorder.files import SampleFiles
from shared.actor.service import Service
from shared.dataplane.client import DataClient
from shared.rpc.errors import BadInput, RpcError
from shared.rundir import RunDir
from shared.samples.record import FOLDER, SampleState, file_of, split_of
from shared.stages import RECORD, REWARD, ROLLOUT, SAMPLE_ADVANTAGES, TEXT, with_keys_of
from shared.topology import load_resolved

ASK_S = 4.0
"""Time, in seconds, that a request waits for tasks that have ended."""
AGAIN_S = 0.5
"""Seconds before the scheduler is asked again after an error."""
FETCH_S = 3.0
READ_S = 5.0
"""Maximum time, in seconds, to read the shards of one answer. Soon after this time, the scheduler stops keeping the
tasks of the answer."""
LATE_S = (0.1, 0.3, 0.9)
"""Seconds to wait for the trainer's shards of a committed step. The trainer puts these shards while it computes."""
LAST_S = 5.0
"""Maximum time, in seconds, to record the tasks that are due when the run ends."""
Shards = dict[str, dict[str, Array]]
"""Shards by task id."""


class RecorderService(Service):
    """The recorder of a run."""

    NAME: ClassVar[str] = "recorder"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        topology = load_resolved(run.topology)
        settings = topology.monitor.samples
        if settings is None:
            raise BadInput("recorder: monitor.samples is null, so there is nothing to record")
        self._scored_later = topology.reward_model is not None
        self._trained_keys = with_keys_of(RECORD, topology).makes
        self._data = DataClient(self.client, plain=not topology.transport.encrypt_bulk, cached_rows=0)
        self.closing.callback(self._data.close)
        self._files = SampleFiles(run.path / FOLDER, settings.limit_bytes)
        self._taken: list[PutTask] = []
        """Tasks of the last answer that have been processed."""
        self._rewinds = 0
        self._lost = 0
        self._step = 0
        """The newest step with recorded samples."""
        self._counts = {"tasks": 0, "samples": 0, "unreadable": 0}

    async def serve(self) -> None:
        while True:
            await self._record(final=False)

    async def drain(self) -> None:
        """Record the tasks that are due at the end of the run."""
        try:
            async with asyncio.timeout(LAST_S):
                while await self._record(final=True):
                    pass
        except TimeoutError:
            self._miss(f"the run ended, and {LAST_S:g} s were not enough for all of them", after_step=self._step)

    async def _record(self, *, final: bool) -> bool:
        """Ask the scheduler once, and record the tasks in its answer. Return whether the answer contained any tasks."""
        request = TakeSamples(incarnation=self.incarnation, taken=self._taken, rewinds=self._rewinds, final=final)
        try:
            due = await self.scheduler.call(request, SamplesDue, deadline_s=ASK_S)
        except (RpcError, WireError) as error:
            if isinstance(error, RpcError) and error.code == ErrorCode.NOT_READY:
                self._taken = []
            else:
                self.log.warning("scheduler does not answer", error=str(error))
                await asyncio.sleep(AGAIN_S)
            return False
        self._taken = []
        for rewind in due.rewinds:
            moved = self._files.discard(rewind.lineage, rewind.step)
            self.log.info("samples discarded", lineage=rewind.lineage, step=rewind.step, files=moved)
        self._rewinds += len(due.rewinds)
        if due.lost > self._lost:
            self._miss("the recorder was too slow or not running", tasks=due.lost - self._lost, after_step=self._step)
            self._lost = due.lost
        shards: Shards = {}
        removed = self._files.removed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self._read(due, shards)
        for ended in due.tasks:
            self._write(ended, shards.get(ended.task_id))
            self._taken.append(PutTask(ended.task_id, ended.fence))
            await asyncio.sleep(0)  # let the event loop do other work between two tasks
        if due.tasks:
            files = self._files
            if files.removed and not removed:
                self.log.warning(
                    "samples/ is full, so its oldest files are removed; training is not affected",
                    limit_bytes=files.limit_bytes,
                )
            self.telemetry.emit(
                "samples",
                {
                    **self._counts,
                    "lost": self._lost,
                    "left_out": files.left_out,
                    "removed": files.removed,
                    "bytes": files.nbytes,
                },
            )
        return bool(due.tasks)

    def _miss(self, cause: str, **where: int | str) -> None:
        """Log that samples are missing from their files. Nothing that trains reads these files."""
        self.log.warning(f"samples are missing from {FOLDER}/: {cause}; training is not affected", **where)

    def _write(self, ended: EndedTask, shards: Mapping[str, Array] | None) -> None:
        now, file = time.time(), file_of(split_of(ended.task_id), ended.step)
        self._step = max(self._step, ended.step)
        if self._scored_later and ended.samples and not ended.rewards:  # it was dropped before it was scored
            ended = msgspec.structs.replace(ended, rewards={REWARD: [math.nan] * ended.samples})
        made = [bare(ended, now)]
        if shards is not None:
            try:
                made = records(ended, shards, now)
            except (ValueError, KeyError, IndexError, msgspec.DecodeError) as error:
                self._miss(f"they cannot be read ({error})"[:200], task_id=ended.task_id, file=file)
        elif ended.samples:
            self._counts["unreadable"] += 1
            self._miss("their shards are gone", task_id=ended.task_id, file=file)
            return
        try:
            if self._files.append(made):
                self._counts["tasks"] += 1
                self._counts["samples"] += sum(record.sample >= 0 for record in made)
        except OSError as error:
            self._counts["unreadable"] += 1
            self._miss(f"they cannot be written ({error.strerror or error})", task_id=ended.task_id, file=file)

    # ---- shards

    async def _read(self, due: SamplesDue, shards: Shards) -> None:
        """Put the tasks' shards into `shards`. Shards that cannot be read are omitted."""
        recorded = [key.name for key in ROLLOUT.keys if key.recorded]
        groups: dict[tuple[str, tuple[str, ...]], list[EndedTask]] = {}
        for task in due.tasks:
            if task.store:
                keys = (*recorded, TEXT) if task.samples else (TEXT,)
                groups.setdefault((task.store, keys), []).append(task)
        await asyncio.gather(*(self._fetch(tasks, store, keys, shards) for (store, keys), tasks in groups.items()))
        left = [task for task in due.tasks if task.state == SampleState.TRAINED and task.task_id in shards]
        for pause_s in (0.0, *LATE_S):
            await asyncio.sleep(pause_s if left else 0)
            for store in due.trainer_stores:
                await self._fetch(left, store, self._trained_keys, shards)
                left = [task for task in left if SAMPLE_ADVANTAGES not in shards[task.task_id]]

    async def _fetch(self, tasks: Sequence[EndedTask], store: str, keys: tuple[str, ...], shards: Shards) -> None:
        """Add a store's readable shards to `shards`: all at once or, if the store lacks some of them, task by task."""
        if not tasks:
            return
        handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
        meta = BatchMeta(tasks=handles, parts=[BatchPart(ROLLOUT.name, list(keys))], stores=[store])
        try:
            arrays = await self._data.fetch(meta, keys, deadline_s=FETCH_S)
        except (RpcError, WireError) as error:
            silent = isinstance(error, RpcError) and error.code == ErrorCode.DEADLINE
            if silent or len(tasks) == 1:
                self.log.debug("shards not read", store=store, tasks=len(tasks), error=str(error)[:200])
                return
            for task in tasks:
                await self._fetch([task], store, keys, shards)
            return
        for task, task_shards in zip(tasks, arrays, strict=True):
            shards.setdefault(task.task_id, {}).update(task_shards)
