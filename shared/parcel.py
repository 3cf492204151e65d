"""Sends arrays between two services: in the message itself, or, if they are larger than a message may carry, through a
store.

Nothing accounts for the shards of a parcel, so the scheduler deletes those that its reader did not clear. It may also
delete them before they are read, and the reader then asks for the parcel again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping

from proto.ids import make_task_id
from proto.limits import MAX_INLINE_BYTES
from proto.messages import Ack, BatchMeta, Clear, Parcel, PutTask, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import parse_service_name

SPLIT = "parcel"
"""Split name of the shards of parcels. The task id is `parcel/<incarnation>/<n>`, of the service that puts them."""
FENCE = 1
PUT_S = 60.0
FETCH_S = 60.0
CLEAR_S = 10.0


class Parcels:
    """Packs and unpacks the parcels of one service. It is used on the service's loop."""

    def __init__(
        self, data: DataClient, client_of: Callable[[str, int], Client], *, store: str, incarnation: int
    ) -> None:
        """`client_of` returns the bus client of (service, instance); `store` is the store on the service's host."""
        self._data = data
        self._client_of = client_of
        self._store = store
        self._incarnation = incarnation
        self._numbers = itertools.count()

    async def pack(self, arrays: Mapping[str, Array]) -> Parcel:
        """Return a parcel with copies of `arrays`. Raises the errors of `DataClient.put`."""
        if sum(array.nbytes for array in arrays.values()) <= MAX_INLINE_BYTES:
            return Parcel(arrays=dict(arrays))
        task_id = make_task_id(SPLIT, self._incarnation, next(self._numbers))
        shards = [TaskShards(task_id, FENCE, dict(arrays))]
        (receipt,) = await self._data.put(shards, store=self._store, deadline_s=PUT_S)
        handle = TaskHandle(task_id=task_id, fence=FENCE, nbytes=receipt.nbytes, stores=[0])
        return Parcel(batch=BatchMeta(tasks=[handle], stores=[self._store]))

    async def unpack(self, parcel: Parcel) -> dict[str, Array]:
        """Return the arrays of a parcel, and delete its shards. Raises the errors of `DataClient.fetch`: collected or
        missing if they are gone already."""
        if parcel.batch is None:
            return dict(parcel.arrays)
        (arrays,) = await self._data.fetch(parcel.batch, (), deadline_s=FETCH_S)
        store = self._client_of(*parse_service_name(parcel.batch.stores[0]))
        tasks = [PutTask(task.task_id, task.fence) for task in parcel.batch.tasks]
        with contextlib.suppress(RpcError):  # the scheduler deletes them later
            await store.call(Clear(tasks=tasks), Ack, deadline_s=CLEAR_S)
        return arrays
