"""The versions that an engine holds for a server, by name, and who uses them.

A version is loaded when it is asked for, and proved as in a training run (`WeightsSync`). Each has a place of the
engine. If all places are taken, the version that was used least recently is dropped, but never one that an open request
names, nor one whose turn has just begun: with few places, versions would otherwise take each other's place for ever.
Callers that find no place ask again, and get one in the order in which they first asked. While one waits, versions
whose turn is over take no new requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proto.messages import ErrorCode, WeightsRef
from services.rollout.direct.gate import ScoreGate
from services.rollout.engine import BASE, Engine
from services.rollout.weights.source import Delivery, WeightsSource
from services.rollout.weights.sync import WeightsSync
from shared.rpc.errors import RpcError

BUSY_S = 1.0
"""Seconds after which a caller that found no place asks again."""
WAITS_S = 5 * BUSY_S
"""Seconds for which a caller that does not ask again keeps its place in the order."""
TURN_S = 5.0
"""A turn lasts so many seconds, and at least as long as it took to load the version."""
IDLE_S = 1.0
"""A turn ends early if nobody has used the version for so long."""
Name = tuple[str, int]
"""The task id and the fence of a version's weights. The base has no name: ("", 0)."""
NO_NAME: Name = ("", 0)


@dataclass(eq=False)
class HeldWeights:
    """A version in the engine. `swaps` and `step` are those of its tokens."""

    swaps: int
    step: int
    turn_ends: float = 0.0
    used: float = math.inf
    """When its last use ended, or infinity before the first."""
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
        self._waiting: dict[Name, float] = {}
        """The versions that found no place, in the order in which they were first asked for, and until when each waits
        for the next attempt."""
        self._turn = asyncio.Lock()
        self._now = asyncio.get_running_loop().time
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
        if name != NO_NAME and held.turn_ends < self._now() and len(self) >= self._places and self._first_waiting():
            text = f"version {name[0]} makes room for another, which waits for its place"
            raise RpcError(ErrorCode.BUSY, text, retry_after_s=BUSY_S)
        self._held[name] = self._held.pop(name)
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            held.used = self._now()
            self._drop_unloaded(name, held)

    async def _load(self, name: Name, ref: WeightsRef) -> None:
        async with self._turn:
            self._room(name)  # nothing is fetched in vain
            began, delivery = self._now(), await self._fetched(ref)
            if (gone := self._room(name)) is not None:
                del self._held[gone]
            self._waiting.pop(name, None)
            self._retain()
            try:
                async with self._gate.alone():
                    await self._sync.load(ref, delivery)
            except BaseException as error:
                self.fail(error)
                raise
            now = self._now()
            self._held[name] = HeldWeights(self._engine.swaps, ref.step, turn_ends=now + max(TURN_S, now - began))
            if ref.base:
                self._held.setdefault(NO_NAME, HeldWeights(BASE, BASE))

    async def _fetched(self, ref: WeightsRef) -> Delivery:
        try:
            return await self._source.fetch(ref)
        except RpcError as error:
            if error.code in (ErrorCode.MISSING, ErrorCode.COLLECTED):
                text = f"the weights of version {ref.task_id} no longer exist; save them again, or sample with another"
                raise RpcError(ErrorCode.GONE, text, names=[ref.task_id]) from None
            raise

    def _room(self, wanted: Name) -> Name | None:
        """Return the version that was used least recently, which makes room for another, or None if there is room.

        Raises RpcError(busy) if no version may leave yet.
        """
        if len(self) < self._places:
            return None
        now = self._now()
        idle = [name for name, held in self._held.items() if name != NO_NAME and self._may_go(held, now)]
        if idle and self._first_waiting() in (None, wanted):
            return idle[0]
        self._waiting[wanted] = now + WAITS_S
        text = f"no place for version {wanted[0]}: the engine holds {self._places} others (serve.max_models), which are"
        raise RpcError(
            ErrorCode.BUSY, f"{text} in use or have just been loaded, or others wait, too", retry_after_s=BUSY_S
        )

    def _may_go(self, held: HeldWeights, now: float) -> bool:
        return not held.users and (held.turn_ends <= now or held.used + IDLE_S <= now)

    def _first_waiting(self) -> Name | None:
        """Return the version that is to get the next place, or None if none waits."""
        now = self._now()
        self._waiting = {name: until for name, until in self._waiting.items() if until > now}
        return next(iter(self._waiting), None)

    def _drop_unloaded(self, name: Name, held: HeldWeights) -> None:
        if held.is_unloaded and not held.users and self._held.get(name) is held:
            del self._held[name]
            self._retain()

    def _retain(self) -> None:
        self._engine.retain({held.swaps for held in self._held.values() if held.swaps != BASE})
