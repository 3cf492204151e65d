"""The versions that an engine holds for a server, by name, and who uses them.

A version is loaded when it is asked for, and proved as in a training run (`WeightsSync`). Each has a place of the
engine. If all places are taken, the version that was used least recently is dropped, but never one that an open request
names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proto.messages import ErrorCode, WeightsRef
from services.rollout.direct.gate import ScoreGate
from services.rollout.engine import BASE, Engine
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import WeightsSync
from shared.rpc.errors import RpcError

BUSY_S = 1.0
"""Seconds after which a caller that found no place asks again."""
Name = tuple[str, int]
"""The task id and the fence of a version's weights. The base has no name: ("", 0)."""
NO_NAME: Name = ("", 0)


@dataclass(eq=False)
class HeldWeights:
    """A version in the engine. `swaps` and `step` are those of its tokens."""

    swaps: int
    step: int
    users: int = 0
    is_unloaded: bool = False
    """Whether it is dropped at the end of its last use."""


class NamedVersions:
    """The named versions of one engine. It is used only on the service's loop."""

    def __init__(self, engine: Engine, sync: WeightsSync, source: WeightsSource, gate: ScoreGate, places: int) -> None:
        """`gate` is that of the engine; `places` is the maximum number of versions that the engine holds at the same
        time."""
        self._engine = engine
        self._gate = gate
        self._sync = sync
        self._source = source
        self._places = places
        self._held: dict[Name, HeldWeights] = {}
        """The versions in the order of their last use."""
        self._loading: dict[Name, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the error after which the engine must not sample."""

    def __len__(self) -> int:
        return len(self._held) - (NO_NAME in self._held)

    async def load(self, ref: WeightsRef) -> None:
        """Load and prove a version, unless the engine holds it.

        Raises RpcError: gone if the store no longer has the weights, busy if open requests name the versions in all
        places, and conflict if engine and trainer disagree, after which the engine must not continue.
        """
        name = (ref.task_id, ref.fence)
        if name in self._held:
            self._held[name].is_unloaded = False
            self._held[name] = self._held.pop(name)
            return
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.create_task(self._load(name, ref))
            loading.add_done_callback(lambda _: self._loading.pop(name))
        # A caller that no longer waits must not break off a load halfway.
        await asyncio.shield(loading)

    def unload(self, name: Name) -> None:
        """Drop a version, now or once no request names it. Its memory is freed when the next version is loaded."""
        held = self._held.get(name)
        if held is not None:
            held.is_unloaded = True
            self._drop_unloaded(name, held)

    def fail(self, error: BaseException) -> None:
        """End the service with this error, after which the engine must not sample."""
        if not self.failed.done():
            self.failed.set_exception(error)

    @contextmanager
    def using(self, name: Name) -> Iterator[HeldWeights]:
        """Yield a version that is not dropped within the block. Raises RpcError(missing) if the engine does not hold
        it."""
        held = self._held.get(name)
        if held is None:
            what = f"version {name[0]}" if name != NO_NAME else "a proved base"
            raise RpcError(ErrorCode.MISSING, f"the engine does not hold {what}; load a version first", names=[name[0]])
        self._held[name] = self._held.pop(name)
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            self._drop_unloaded(name, held)

    async def _load(self, name: Name, ref: WeightsRef) -> None:
        try:
            delivery = await self._source.fetch(ref)
        except RpcError as error:
            if error.code in (ErrorCode.MISSING, ErrorCode.COLLECTED):
                text = f"the weights of version {ref.task_id} no longer exist; save them again, or sample with another"
                raise RpcError(ErrorCode.GONE, text, names=[ref.task_id]) from None
            raise
        async with self._turn:
            self._make_room(ref)
            try:
                async with self._gate.alone():
                    await self._sync.load(ref, delivery)
            except BaseException as error:
                self.fail(error)
                raise
            self._held[name] = HeldWeights(self._engine.swaps, ref.step)
            if ref.base:
                self._held.setdefault(NO_NAME, HeldWeights(BASE, BASE))

    def _make_room(self, ref: WeightsRef) -> None:
        """Drop the version that was used least recently if every place is taken, and have the engine keep the rest."""
        if len(self) >= self._places:
            idle = [name for name, held in self._held.items() if not held.users and name != NO_NAME]
            if not idle:
                raise RpcError(
                    ErrorCode.BUSY,
                    f"no place for version {ref.task_id}: open requests name all {self._places} versions that the "
                    "engine holds (serve.max_models)",
                    retry_after_s=BUSY_S,
                )
            del self._held[idle[0]]
        self._retain()

    def _drop_unloaded(self, name: Name, held: HeldWeights) -> None:
        if held.is_unloaded and not held.users and self._held.get(name) is held:
            del self._held[name]
            self._retain()

    def _retain(self) -> None:
        self._engine.retain({held.swaps for held in self._held.values() if held.swaps != BASE})
