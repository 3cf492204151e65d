"""What of this rank's training state is on the device, and when it has to leave because others compute there too.

Moves are whole parts, bit for bit, on the compute thread, between calls only. Where the devices are the trainer's own
nothing ever has to leave. On CUDA an offloaded part is in host memory; on a CPU, where that would free nothing, it is a
file of the run's directory, which is not in any process's memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from proto import messages
from proto.messages import WorkerRequest
from services.policy_trainer.worker.residency import PARTS, Part, Residency
from shared.actor.service import Service
from shared.devices import Parts
from shared.turns import OwnDevices, Turns, take_turns

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend import Backend

OnCompute = Callable[[Callable[[], Any]], Awaitable[Any]]


class Devices:
    """Of one rank; belongs to the event loop. `load` comes before everything else."""

    def __init__(self, on_compute: OnCompute, settled: Callable[[], Awaitable[None]]) -> None:
        """`on_compute` runs on the compute thread; `settled` waits until nobody reads the weights any more."""
        self._on_compute = on_compute
        self._settled = settled
        self._turns: Turns = OwnDevices()
        self._residency = Residency()
        self._backend: Backend | None = None
        self._drop_later = False
        """A gradient that nobody needs any more lies on the host, and goes once it is back."""

    def share(self, service: Service) -> None:
        """Others compute on the same devices: take turns from now on."""
        self._turns = take_turns(service, self._leave)

    async def room(self) -> None:
        """Wait until a model may be loaded."""
        await self._turns.acquire(device_parts(frozenset({"parameters"})))

    def loaded(self, backend: Backend) -> None:
        """`backend` has its model on the device."""
        self._backend = backend
        self._turns.done()

    async def bring(self, parts: frozenset[Part]) -> int:
        """Have `parts` on the device, in use until `after`; returns bytes moved."""
        await self._turns.acquire(device_parts(parts))
        missing = self._residency.backload(parts)
        backend, moved = self._backend, 0
        if missing and backend is not None:
            moved = await self._on_compute(lambda: backend.backload(missing))
        if self._drop_later and backend is not None and "gradients" not in self._residency.on_host:
            await self._on_compute(backend.drop_gradients)
            self._drop_later = False
        return moved

    async def send_away(self, parts: frozenset[Part]) -> int:
        """Take `parts` off; returns bytes freed."""
        moving = self._residency.offload(parts)
        backend, freed = self._backend, 0
        if moving and backend is not None:
            freed = await self._on_compute(lambda: backend.offload(moving))
        return freed

    async def drop_gradients(self) -> None:
        """Forget what was accumulated: a driver takes over, no step is under way."""
        if self._backend is None:
            return  # the model is being loaded, in a turn that is not this caller's to end
        if "gradients" in self._residency.on_host:
            self._drop_later = True  # the devices may be somebody else's
        else:
            await self._on_compute(self._backend.drop_gradients)
        self._turns.done()

    def renewed(self) -> None:
        """State was loaded anew: all of it is on the device, no gradient is left."""
        self._residency.forget()
        self._drop_later = False

    def after(self, request: WorkerRequest, *, followed: bool) -> None:
        """`request` has ended. The devices stay in use through a step, and for a call that waits already."""
        in_step = isinstance(request, messages.Forward | messages.ForwardBackward) or (
            isinstance(request, messages.OptimStep | messages.SkipUpdate) and not request.last
        )
        if not in_step and not followed:
            self._turns.done()

    async def _leave(self, parts: Parts) -> Parts:
        """Others need the room."""
        await self._settled()
        await self.send_away(own_parts(parts))
        return parts


def device_parts(parts: frozenset[Part]) -> Parts:
    """As `shared.devices` names them."""
    return frozenset(f"policy.{part}" for part in parts)


def own_parts(parts: Parts) -> frozenset[Part]:
    """What `device_parts` made of them."""
    return frozenset(part for part in PARTS if f"policy.{part}" in parts)
