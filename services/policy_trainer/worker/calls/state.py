"""Executes the calls that replace, save or move the state of a rank: the initial model, checkpoints and snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proto.messages import (
    ErrorCode,
    InitModel,
    LoadCheckpoint,
    Move,
    Moved,
    SaveCheckpoint,
    Saved,
    WorkerReady,
    WorkerRequest,
)
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.devices import parts_named
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.training_state import TrainingState
from shared.checkpoint_files import AdapterNote, check_note
from shared.colocation.devices import Part
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import CHECKPOINT_PREFIX


class StateCalls:
    """Replaces, saves and moves the state of one rank. Checkpoints are written one at a time on a thread of their
    own."""

    def __init__(self, rank: Rank, loaded: Loaded, *, several_hosts: bool) -> None:
        """`several_hosts` means that ranks on other hosts cannot read the checkpoints."""
        self._rank, self._loaded, self._several_hosts = rank, loaded, several_hosts
        self._folder = rank.model.checkpoints(rank.run.checkpoints)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: set[asyncio.Task[None]] = set()
        rank.resources.push_async_callback(self._close)

    @property
    def runners(self) -> dict[type[WorkerRequest], Runner]:
        return {
            InitModel: self._init_model,
            LoadCheckpoint: self._load_checkpoint,
            SaveCheckpoint: self._save_checkpoint,
            Move: self._move,
        }

    async def _close(self) -> None:
        """Wait for the checkpoints that are being written."""
        if self._saving:
            await asyncio.wait(self._saving)
        self._thread.shutdown(wait=False)

    # ---- loading

    async def _init_model(self, request: InitModel, _: Call) -> WorkerReady:
        rank = self._rank
        rank.reader.end_step()
        await rank.ready(request, rank.weights_settled())
        if not rank.standing.pristine:
            rank.standing.dirty = True
            await rank.together("InitModel", self._loaded.backend.restart)
            rank.standing.pristine = True
            rank.devices.loaded_anew()
        await rank.together("InitModel", lambda: self._begin_at(0))
        return self._ready_at(0)

    async def _load_checkpoint(self, request: LoadCheckpoint, _: Call) -> WorkerReady:
        rank, loaded = self._rank, self._loaded

        async def read() -> Callable[[], None]:
            await rank.weights_settled()
            if request.snapshot_lineage >= 0:
                state = await asyncio.to_thread(rank.standing.snapshots.read, request.snapshot_lineage, request.step)
                return lambda: loaded.load_state(state)
            reads = rank.place.rank == 0 or not self._several_hosts
            mine = await asyncio.to_thread(checkpoint.load, self._folder, request.step) if reads else None
            if mine is not None and rank.place.rank == 0:  # only this rank knows the base
                check_note(self._folder / f"{CHECKPOINT_PREFIX}{request.step}", mine.adapter, self._adapter())

            def load() -> None:
                saved = checkpoint.broadcast(mine) if mine is None or self._several_hosts else mine
                loaded.backend.load_state(TrainingState(saved.weights, saved.optimizer))
                loaded.earlier.restore(saved.earlier, loaded.canaries)

            return load

        rank.reader.end_step()
        load = await rank.ready(request, read())

        def work() -> None:
            rank.standing.pristine, rank.standing.dirty = False, True
            load()
            self._begin_at(request.step, request.snapshot_lineage)

        await rank.together("LoadCheckpoint", work)
        rank.devices.loaded_anew()
        return self._ready_at(request.step)

    def _begin_at(self, step: int, lineage: int = -1) -> None:
        """Begin a sequence of steps at `step`. Discard all snapshots except the loaded one, if any."""
        self._loaded.record(step)
        self._rank.standing.snapshots.keep_only(lineage, step)

    def _ready_at(self, step: int) -> WorkerReady:
        self._rank.standing.step, self._rank.standing.dirty = step, False
        return WorkerReady(step=step, parameters=self._loaded.backend.parameters)

    def _adapter(self) -> AdapterNote | None:
        """Return what this run's checkpoints say of its adapter, if it trains one. Only rank 0 may call this."""
        lora, base = self._rank.model.lora, self._loaded.backend.base
        return None if lora is None or base is None else AdapterNote(base.name, lora.rank, lora.alpha)

    # ---- saving

    async def _save_checkpoint(self, request: SaveCheckpoint, call: Call) -> Saved | Deferred:
        """Gather the state in call order and write it during the next step."""
        rank, loaded = self._rank, self._loaded

        await rank.ready(request, rank.require_step(request.step, "checkpoint"))
        state = await rank.together("SaveCheckpoint", loaded.backend.state)
        if rank.place.rank != 0:
            return Saved(path="", seconds=0.0)
        earlier = loaded.earlier.tensors(request.step)
        saved = SavedState(
            request.step, state.weights, state.optimizer, earlier, at_stop=request.at_stop, adapter=self._adapter()
        )
        return self.write(request, call, lambda: checkpoint.save(self._folder, saved))

    def write(self, request: WorkerRequest, call: Call, save: Callable[[], Path]) -> Deferred:
        """Answer `call` once `save`, which runs on the thread for checkpoints, has returned the path of a folder."""
        task = asyncio.create_task(self._write(request, call, save))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        return DEFERRED

    async def _write(self, request: WorkerRequest, call: Call, save: Callable[[], Path]) -> None:
        began = time.perf_counter()
        try:
            path = await asyncio.get_running_loop().run_in_executor(self._thread, save)
        except Exception as error:
            self._rank.refuse(request, call, error)
        else:
            call.reply(Saved(path=str(path), seconds=time.perf_counter() - began))

    # ---- moving

    async def _move(self, request: Move, _: Call) -> Moved:
        began, rank = time.perf_counter(), self._rank

        async def may_move() -> frozenset[Part]:
            if request.to not in ("host", "device"):
                raise RpcError(ErrorCode.BAD_REQUEST, f"move to {request.to!r}: use host or device")
            await rank.weights_settled()
            return parts_named(request.parts)

        parts = await rank.ready(request, may_move())
        move = rank.devices.offload if request.to == "host" else rank.devices.backload
        return Moved(nbytes=await move(parts), seconds=time.perf_counter() - began)
