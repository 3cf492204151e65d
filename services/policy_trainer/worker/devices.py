"""Manages the residency of this rank's training state on a device that other services may share.

The parts that each call needs are declared here and brought back before the call runs, so callers need not move them.
Whole parts are moved, bit for bit, on the compute thread and only between calls. If the devices belong to the trainer
alone, nothing needs to be moved. On CUDA, an offloaded part is in host memory. On a CPU, where that would free nothing,
the part is in a file in the run's directory, outside any process's memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from proto import messages
from proto.messages import ErrorCode, WorkerRequest
from shared.actor.service import Service
from shared.colocation.devices import PARTS, Part, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.rpc.errors import RpcError

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend import Backend

_PARAMETERS: frozenset[Part] = frozenset({"parameters"})

NEEDS: Mapping[type[WorkerRequest], frozenset[Part]] = MappingProxyType(
    {
        messages.InitModel: PARTS,
        messages.LoadCheckpoint: PARTS,
        messages.Forward: _PARAMETERS,
        messages.Credit: frozenset(),
        messages.ForwardBackward: frozenset({"parameters", "gradients"}),
        messages.OptimStep: PARTS,
        messages.SkipUpdate: frozenset({"parameters", "gradients"}),
        messages.Publish: _PARAMETERS,
        messages.SaveCheckpoint: frozenset({"parameters", "optimizer"}),
        messages.SaveModel: _PARAMETERS,
        messages.Move: frozenset(),
        messages.OpenModel: PARTS,
        messages.SaveState: frozenset({"parameters", "optimizer"}),
        messages.CloseModel: frozenset(),
        messages.ForwardBackwardModel: frozenset({"parameters", "gradients"}),
        messages.OptimStepModel: PARTS,
        messages.PublishModel: _PARAMETERS,
    }
)
"""Parts that each call needs on the device. `ForwardBackward` adds to the gradients there, so it needs the earlier
gradients."""

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
        self._on_host: frozenset[Part] = frozenset()
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
        missing = parts & self._on_host
        self._on_host -= parts
        backend, moved = self._backend, 0
        if missing and backend is not None:
            moved = await self._on_compute(lambda: backend.shelves.backload(missing))
        if self._drop_later and backend is not None and "gradients" not in self._on_host:
            await self._on_compute(backend.drop_gradients)
            self._drop_later = False
        return moved

    async def offload(self, parts: frozenset[Part]) -> int:
        """Move `parts` off the device and return the number of bytes freed."""
        moving = parts - self._on_host
        self._on_host |= parts
        backend, freed = self._backend, 0
        if moving and backend is not None:
            freed = await self._on_compute(lambda: backend.shelves.offload(moving))
        return freed

    async def drop_gradients(self) -> None:
        """Drop the accumulated gradients, because a driver is taking over and no step is under way."""
        if self._backend is None:
            return  # the model is being loaded, and its loader will end the turn
        if "gradients" in self._on_host:
            self._drop_later = True  # another service may have its turn
        else:
            await self._on_compute(self._backend.drop_gradients)
        self._turns.done()

    def loaded_anew(self) -> None:
        """Record that the state was reloaded: all of it is on the device, without gradients."""
        self._on_host = frozenset()
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
        own = frozenset(part for part in PARTS if device_parts(self._model, frozenset([part])) <= parts)
        if "parameters" in own or not self._shows_parameters:
            await self._settled()
        await self.offload(own)
        return parts


def device_parts(model: str, parts: frozenset[Part]) -> Parts:
    """Return the names that `shared.colocation.devices` uses for `parts` of a trained model."""
    return frozenset(f"{model}.{part}" for part in parts)


def parts_named(names: list[str]) -> frozenset[Part]:
    """Return the parts named in a request. Raises RpcError(bad_request) for an unknown name."""
    unknown = sorted(set(names) - PARTS)
    if unknown:
        raise RpcError(ErrorCode.BAD_REQUEST, f"part {unknown[0]!r}: use {', '.join(sorted(PARTS))}")
    return frozenset(part for part in PARTS if part in names)
