"""Conversion of the durable state to bytes and back: raw columns, and msgpack for the rest, without pickle. Pure.

A snapshot is taken at once by copying and packed part by part while the run continues. Requests are delayed only by the
copy of the columns (about 80 bytes per task), not by the packing.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from proto import codec
from proto.messages import Register
from services.scheduler.admission import Window
from services.scheduler.collection import ClearQueues, Entry
from services.scheduler.core import Core
from services.scheduler.evaluations import Evaluations
from services.scheduler.events import Configure
from services.scheduler.leases import Leases
from services.scheduler.losses import Losses
from services.scheduler.plan import Plan
from services.scheduler.tasks import TaskTable
from services.scheduler.versions import Versions

LAYOUT = 11
"""Version of the snapshot layout, raised with every change of what `begin` writes. Others are refused."""
PART_BYTES = 1 << 20
PART_ENTRIES = 8192

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
    "uncovered",
    "gone",
    "owed",
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
_CELLS, _SCALARS, _CLEARS = range(3)
"""Kinds of the parts after the first one: bytes of an array, per-sample values, clears."""


def begin(core: Core) -> Iterator[bytes]:
    """Copy the state of `core` and return an iterator over its parts. Later changes of `core` are not in them."""
    data: dict[str, Any] = {name: getattr(core, name) for name in _PLAIN}
    # The lines of waiting tasks are left out because they follow from the table.
    data["splits"] = core.tasks.splits
    data["free"] = array("q", core.tasks.free).tobytes()
    data["window"], cells = core.window.dump()
    data["leases"] = core.leases.dump()
    data["collected"] = core.clears.collected
    data["versions"] = core.versions.dump()
    data["evaluations"] = core.evaluations.dump()
    data["losses"] = core.losses.dump()
    data["registry"] = [codec.encode_body(row) for row in core.registry.values()]
    data["layouts"] = core.layouts
    data["config"] = msgspec.msgpack.encode(core.config)
    data["batches"] = [[step, len(slots)] for step, slots in core.batches.items()]
    data["identities"] = [[step, len(names)] for step, names in core.identities.items()]
    data["waiting_rows"] = [[step, row] for step, row in core.waiting_rows.items()]
    cells["batches"] = b"".join(slots.tobytes() for slots in core.batches.values())
    cells["identities"] = b"".join(names.tobytes() for names in core.identities.values())
    cells["reopened"] = core.reopened.tobytes()
    cells |= {str(number): column.tobytes() for number, column in enumerate(core.tasks.columns())}
    return _parts(msgspec.msgpack.encode(data), cells, core.tasks.scalars[:], core.clears.entries())


def _parts(
    head: bytes, cells: dict[str, bytes], scalars: list[bytes | None], clears: dict[str, list[Entry]]
) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    yield head
    while cells:
        name, packed = cells.popitem()
        for at in range(0, len(packed), PART_BYTES):
            yield encode([_CELLS, name, packed[at : at + PART_BYTES]])
    for at in range(0, len(scalars), PART_ENTRIES):
        yield encode([_SCALARS, "", scalars[at : at + PART_ENTRIES]])
    for store, entries in clears.items():
        for at in range(0, max(len(entries), 1), PART_ENTRIES):
            yield encode([_CLEARS, store, entries[at : at + PART_ENTRIES]])


def dump(core: Core) -> list[bytes]:
    """Return all parts. They are equal for two cores with the same history."""
    return list(begin(core))


def load(plan: Plan, parts: Iterable[bytes]) -> Core:
    """Rebuild a core from its parts. Raises MsgspecError, KeyError, ValueError or TypeError for other bytes."""
    rest = iter(parts)
    data = msgspec.msgpack.decode(next(rest, b""))
    core = Core(plan)
    for name in _PLAIN:
        setattr(core, name, data[name])
    core.tasks = TaskTable(len(plan.stages), data["splits"])
    core.tasks.free = _numbers("q", data["free"]).tolist()
    core.clears = ClearQueues()
    core.clears.collected = data["collected"]
    cells: dict[str, bytearray] = defaultdict(bytearray)
    for part in rest:
        kind, name, content = msgspec.msgpack.decode(part)
        if kind == _CELLS:
            cells[name] += content
        elif kind == _SCALARS:
            core.tasks.scalars.extend(content)
        else:
            core.clears.extend(name, content)
    for number, column in enumerate(core.tasks.columns()):
        column.frombytes(cells.pop(str(number), b""))
    core.tasks.index_slots()
    core.window = Window.load(data["window"], cells, by_completion=plan.by_completion)
    core.leases = Leases.load(data["leases"])
    core.versions = Versions.load(data["versions"])
    core.evaluations = Evaluations.load(data["evaluations"])
    core.losses = Losses.load(data["losses"])
    for row in data["registry"]:
        request = cast(Register, codec.decode_body(Register.TYPE, row))
        core.registry[request.service, request.instance] = request
    core.layouts = [tuple((name, dtype) for name, dtype in layout) for layout in data["layouts"]]
    core.config = msgspec.msgpack.decode(data["config"], type=Configure)
    slots = _numbers("I", cells["batches"])
    for step, count in data["batches"]:
        core.batches[step], slots = slots[:count], slots[count:]
    names = _numbers("q", cells["identities"])
    for step, count in data["identities"]:
        core.identities[step], names = names[:count], names[count:]
    core.reopened = _numbers("q", cells["reopened"])
    core.waiting_rows = {step: row for step, row in data["waiting_rows"]}
    core.line_up()
    return core


def _numbers(kind: str, cells: bytes | bytearray) -> array[int]:
    numbers: array[int] = array(kind)
    numbers.frombytes(cells)
    return numbers
