"""The durable state as bytes and back: columns as they are, the rest as msgpack. Pure, and never pickle."""

from __future__ import annotations

from array import array
from typing import Any, cast

import msgspec

from proto import codec
from proto.messages import Register
from services.scheduler.admission import Window
from services.scheduler.collection import ClearQueues
from services.scheduler.core import Core
from services.scheduler.evaluations import Evaluations
from services.scheduler.events import Configure
from services.scheduler.leases import Leases
from services.scheduler.plan import Plan
from services.scheduler.tasks import TaskTable
from services.scheduler.versions import Versions

LAYOUT = 5
"""Raised with every change of what `dump` writes; another layout is refused by name."""

_PLAIN = (
    "driver",
    "old_drivers",
    "lineage",
    "batched_step",
    "committed_step",
    "checkpoint_step",
    "finished",
    "position",
    "highest_fence",
    "broken",
    "uncovered_bytes",
    "dropped",
    "filtered",
    "filtered_samples",
    "filtered_reward",
    "batch_filtered",
    "checked",
    "stale",
    "dropped_reported",
    "batch_dropped",
    "next_row",
    "store_names",
)


def dump(core: Core) -> bytes:
    """The whole of `core`. Two cores with the same history give the same bytes."""
    data: dict[str, Any] = {name: getattr(core, name) for name in _PLAIN}
    data["tasks"] = core.tasks.dump()
    data["window"] = core.window.dump()
    data["leases"] = core.leases.dump()
    data["clears"] = core.clears.dump()
    data["versions"] = core.versions.dump()
    data["evaluations"] = core.evaluations.dump()
    # stale entries of the heaps are skipped whenever they come up: they are no part of the state
    data["ready"] = [array("q", core.waiting_for(stage)).tobytes() for stage in range(len(core.plan.stages))]
    data["registry"] = [codec.encode_body(row) for row in core.registry.values()]
    data["layouts"] = core.layouts
    data["config"] = msgspec.msgpack.encode(core.config)
    data["batches"] = [[step, array("q", slots).tobytes()] for step, slots in core.batches.items()]
    data["waiting_rows"] = [[step, row] for step, row in core.waiting_rows.items()]
    return msgspec.msgpack.encode(data)


def load(plan: Plan, packed: bytes) -> Core:
    """The inverse of `dump`. Raises msgspec.MsgspecError, KeyError or ValueError for other bytes."""
    data = msgspec.msgpack.decode(packed)
    core = Core(plan)
    for name in _PLAIN:
        setattr(core, name, data[name])
    core.tasks = TaskTable.load(data["tasks"])
    core.window = Window.load(data["window"])
    core.leases = Leases.load(data["leases"])
    core.clears = ClearQueues.load(data["clears"])
    core.versions = Versions.load(data["versions"])
    core.evaluations = Evaluations.load(data["evaluations"])
    core.ready = [_numbers(cells) for cells in data["ready"]]
    for row in data["registry"]:
        request = cast(Register, codec.decode_body(Register.TYPE, row))
        core.registry[request.service, request.instance] = request
    core.layouts = [tuple((name, dtype) for name, dtype in layout) for layout in data["layouts"]]
    core.config = msgspec.msgpack.decode(data["config"], type=Configure)
    core.batches = {step: _numbers(slots) for step, slots in data["batches"]}
    core.waiting_rows = {step: row for step, row in data["waiting_rows"]}
    return core


def _numbers(cells: bytes) -> list[int]:
    numbers = array("q")
    numbers.frombytes(cells)
    return numbers.tolist()
