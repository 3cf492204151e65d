"""Manages the residency of this rank's training state on a device that other services may share.

Whole parts are moved, bit for bit, on the compute thread and only between calls. If the devices belong to the trainer
alone, nothing needs to be moved. On CUDA, an offloaded part is in host memory. On a CPU, where that would free nothing,
the part is in a file in the run's directory, outside any process's memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from proto import messages
from proto.messages import WorkerRequest
from services.policy_trainer.worker.colocation.residency import PARTS, Part, Residency
from shared.actor.service import Service
from shared.colocation.devices import Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend import Backend

OnCompute = Callable[[Callable[[], Any]], Awaitable[Any]]


class Devices:
    """The devices of one rank. Use this object only on the event loop. Before `loaded`, only `share` and `acquire_room`
    are called."""

    def __init__(
        self,
        model: str,
        on_compute: OnCompute,
        settled: Callable[[], Awaitable[None]],
        *,
        shows_parameters: bool = False,
    ) -> None:
        """`model` is the name of the model. `on_compute` runs a function on the compute thread. `settled` waits until
        no weights are being read. With `shows_parameters`, engines copy the weights from the parameters themselves,
        after the optimizer and the gradients have left the device."""
        self._model = model
        self._on_compute = on_compute
        self._settled = settled
        self._shows_parameters = shows_parameters
        self._turns: Turns = OwnDevices()
        self._residency = Residency()
        self._backend: Backend | None = None
        self._drop_later = False
        """Whether a gradient on the host is no longer needed and must be dropped once it is back on the device."""

    def share(self, service: Service) -> None:
        """Take turns from now on, because other services compute on the same devices."""
        self._turns = take_turns(service, self._leave)

    async def acquire_room(self) -> None:
        """Wait for a turn in which the model may be loaded. During that turn, the backend also creates masters and
        buffers."""
        await self._turns.acquire(device_parts(self._model, PARTS))

    def loaded(self, backend: Backend) -> None:
        """Register `backend`, whose model is on the device, and end the turn of `acquire_room`."""
        self._backend = backend
        self._turns.done()

    async def backload(self, parts: frozenset[Part]) -> int:
        """Move `parts` to the device, where they stay in use until `after` is called. Return the number of
        bytes moved."""
        await self._turns.acquire(device_parts(self._model, parts))
        missing = self._residency.backload(parts)
        backend, moved = self._backend, 0
        if missing and backend is not None:
            moved = await self._on_compute(lambda: backend.shelves.backload(missing))
        if self._drop_later and backend is not None and "gradients" not in self._residency.on_host:
            await self._on_compute(backend.drop_gradients)
            self._drop_later = False
        return moved

    async def offload(self, parts: frozenset[Part]) -> int:
        """Move `parts` off the device and return the number of bytes freed."""
        moving = self._residency.offload(parts)
        backend, freed = self._backend, 0
        if moving and backend is not None:
            freed = await self._on_compute(lambda: backend.shelves.offload(moving))
        return freed

    async def drop_gradients(self) -> None:
        """Drop the accumulated gradients, because a driver is taking over and no step is under way."""
        if self._backend is None:
            return  # the model is being loaded, and its loader will end the turn
        if "gradients" in self._residency.on_host:
            self._drop_later = True  # another service may have its turn
        else:
            await self._on_compute(self._backend.drop_gradients)
        self._turns.done()

    def loaded_anew(self) -> None:
        """Record that the state was reloaded: all of it is on the device, without gradients."""
        self._residency.forget()
        self._drop_later = False

    def after(self, request: WorkerRequest, *, followed: bool) -> None:
        """End the turn after `request`, unless an update is under way or the next call is already waiting.

        A forward pass leaves nothing on the device that the next call needs. If the turn were kept, the
        trainer could wait forever: the next call may depend on another model that is waiting for the device.
        """
        in_step = isinstance(request, messages.ForwardBackward) or (
            isinstance(request, messages.OptimStep | messages.SkipUpdate) and not request.last
        )
        if not in_step and not followed:
            self._turns.done()

    async def _leave(self, parts: Parts) -> Parts:
        """Move `parts` off the device because another service needs the memory, and return `parts`."""
        own = own_parts(self._model, parts)
        if "parameters" in own or not self._shows_parameters:
            await self._settled()
        await self.offload(own)
        return parts


def device_parts(model: str, parts: frozenset[Part]) -> Parts:
    """Return the names that `shared.colocation.devices` uses for `parts` of a trained model."""
    return frozenset(f"{model}.{part}" for part in parts)


def own_parts(model: str, parts: Parts) -> frozenset[Part]:
    """Return the parts of a trained model among `parts`: the inverse of `device_parts`."""
    return frozenset(part for part in PARTS if f"{model}.{part}" in parts)
