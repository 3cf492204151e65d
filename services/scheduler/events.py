"""What happens to the scheduler, and what it wants done: the alphabet of the state machine. No behaviour here.

Durable events are journaled and replayed in order; requests of the wire that change state are durable as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from proto import messages
from proto.registry import Message

Ref = Any
"""An open call, opaque to the state machine; it comes back in `Answer` and `Fail`."""


# ------------------------------------------------------------------------- durable, besides requests of the wire


class Configure(msgspec.Struct, frozen=True, tag=True):
    """At each start: what a resumed run may have changed. `steps` of the whole run; `attempts` of a task."""

    steps: int
    attempts: int
    keep_last: int
    collect_at_commit: bool


class Leased(msgspec.Struct, frozen=True, tag=True):
    """A lease was given for this request. `call`: (caller's incarnation, request id), to answer a retry alike."""

    request: bytes
    call: tuple[int, int]


class LeaseExpired(msgspec.Struct, frozen=True, tag=True):
    """No progress for `lease_s`: the lease's tasks go to others. `untouched`: it only waited for its turn."""

    lease_id: int
    untouched: bool = False


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """A store acknowledged the first `count` clears of its queue."""

    store: str
    count: int


class StoreGone(msgspec.Struct, frozen=True, tag=True):
    """A store of a host that had joined was silent for so long that nobody waits for it any more."""

    store: str


Internal = Configure | Leased | LeaseExpired | Cleared | StoreGone
Durable = Internal | Message


# --------------------------------------------------------------------------------------------------- volatile


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: leases expire, held-back calls are answered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request arrived. `deadline`: when the caller gives up, in the clock of `now`."""

    ref: Ref
    request: Any
    deadline: float
    call: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ClearDone:
    """A store acknowledged the first `count` clears that were sent to it."""

    store: str
    count: int


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of what a store holds."""

    store: str
    tasks: list[messages.PutTask]


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The supervisor says that a life of a process is over (`KillProcess`)."""

    service: str
    instance: int
    incarnation: int


Event = Tick | Asked | ClearDone | Listed | ProcessGone


# ---------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Append to the journal before anything of this burst leaves."""

    event: Durable


@dataclass(frozen=True, slots=True)
class Answer:
    ref: Ref
    body: Message


@dataclass(frozen=True, slots=True)
class Fail:
    ref: Ref
    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendClear:
    """Tombstone these at `store`; then `ClearDone` when `tracked` (strays are found again anyway)."""

    store: str
    tasks: list[messages.PutTask]
    tracked: bool


@dataclass(frozen=True, slots=True)
class StopClear:
    """Give up the tracked clear that is on its way to `store`: no `ClearDone` of it may come any more."""

    store: str


@dataclass(frozen=True, slots=True)
class RequestInventory:
    """List what `store` holds, page by page (`Listed`)."""

    store: str


@dataclass(frozen=True, slots=True)
class SaveStep:
    """A readable row of the table `steps`. `state`: BATCHED or TRAINED."""

    step: int
    state: str
    task_ids: list[str] | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveEval:
    name: str
    version: int
    accuracy: float
    samples: int
    dropped: int


@dataclass(frozen=True, slots=True)
class WriteRow:
    """A complete row of `metrics.jsonl`, in step order."""

    step: int
    row: dict[str, float]


@dataclass(frozen=True, slots=True)
class Rewound:
    """The run went back to `step`: the steps after it, up to `committed`, were of this lineage or earlier ones."""

    lineage: int
    step: int
    committed: int


@dataclass(frozen=True, slots=True)
class DiscardRows:
    """The rows of all steps after `step` leave the journal and `metrics.jsonl`; `metrics.discarded.jsonl` keeps them.

    `waiting`: rows by step that had not been written, because an evaluation before them was under way.
    """

    lineage: int
    step: int
    waiting: dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Tell:
    """Telemetry: may be lost."""

    topic: str
    values: dict[str, float | str]


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Have the supervisor kill it; then `ProcessGone`."""

    holder: tuple[str, int]
    incarnation: int
    pid: int
    cause: str


@dataclass(frozen=True, slots=True)
class TellDevices:
    """For people: what a process has on the shared devices now, and what they are used for."""

    name: str
    parts: list[str]
    phase: str


Effect = (
    KillProcess
    | TellDevices
    | Persist
    | Answer
    | Fail
    | SendClear
    | StopClear
    | RequestInventory
    | SaveStep
    | SaveEval
    | WriteRow
    | Rewound
    | DiscardRows
    | Tell
)
