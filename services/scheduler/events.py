"""The events and effects of the scheduler's state machine.

Durable events are journaled and replayed in order. Wire requests that change the state are durable events themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

import msgspec

from proto import codec
from proto.messages import (
    CheckpointSaved,
    CommitStep,
    Complete,
    FinishRun,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HoldDevices,
    HoldShards,
    HostGone,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    PutTask,
    Register,
    ReleaseShards,
    ReportShards,
    Resolve,
    TakeSamples,
    TaskState,
    WaitEvals,
)
from proto.registry import Message
from shared.samples.text import Choice

Ref = object
"""An open call, opaque to the state machine, which returns it in `Answer` or `Fail`."""


# ------------------------------------------------------------------------- durable, in addition to wire requests


class Recording(msgspec.Struct, frozen=True):
    """The tasks whose samples are recorded, and how many tasks of maximum size may wait for the recorder after they
    have ended."""

    choice: Choice
    hold_tasks: int


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The settings that a resumed run may change, applied at each start. `attempts` is the limit per task."""

    steps: int
    attempts: int
    keep_last: int
    collect_at_commit: bool
    recording: Recording | None = None


class Leased(msgspec.Struct, frozen=True, tag=True):
    """A lease was granted.

    `call` is the pair (caller's incarnation, request id), so that a retry gets the same answer.
    """

    request: bytes
    call: tuple[int, int]


class LeaseExpired(msgspec.Struct, frozen=True, tag=True):
    """A lease made no progress for `lease_s`. `not_started` is true if work on its tasks had not begun."""

    lease_id: int
    not_started: bool = False


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """A store acknowledged the first `count` clears of its queue."""

    store: str
    count: int


class StoreGone(msgspec.Struct, frozen=True, tag=True):
    """A store on another host has been silent for so long that it is considered gone for good."""

    store: str


class TailLost(msgspec.Struct, frozen=True, tag=True):
    """The end of the journal was lost, and its content is known only from traces in other files.

    `agreed` is the last step up to which no row of `metrics.jsonl` contradicts the journal. `reached`,
    `fence` and `lineage` are the newest committed step, the highest fence and the highest lineage that any trace shows.
    """

    agreed: int
    reached: int
    fence: int
    lineage: int


class ShardsLost(msgspec.Struct, frozen=True, tag=True):
    """A store has confirmed that it no longer holds intact shards of these tasks under these fences."""

    store: str
    tasks: list[PutTask]


class SamplesTaken(msgspec.Struct, frozen=True, tag=True):
    """The recorder has taken these tasks or, if `lost` is true, the scheduler no longer keeps them for the recorder."""

    tasks: list[PutTask]
    lost: bool = False


Internal = Configure | Leased | LeaseExpired | Cleared | StoreGone | TailLost | ShardsLost | SamplesTaken
DriverRequest = (
    GetRunInfo | NextBatch | CommitStep | PublishWeights | CheckpointSaved | FinishRun | HoldShards | ReleaseShards
)
Durable = Internal | DriverRequest | Register | Complete
Request = (
    DriverRequest
    | Register
    | Complete
    | ReportShards
    | Heartbeat
    | HoldDevices
    | HostGone
    | Resolve
    | LeaseRequest
    | TakeSamples
    | WaitEvals
    | GetStatus
)
"""The wire requests that the scheduler answers."""

_INTERNAL: tuple[type[Internal], ...] = get_args(Internal)
_DECODERS = {-1 - i: msgspec.msgpack.Decoder(kind) for i, kind in enumerate(_INTERNAL)}
_KINDS = {kind: -1 - i for i, kind in enumerate(_INTERNAL)}


def encode(event: Durable) -> tuple[int, bytes]:
    """Return the kind of an event, which is negative for internal events, and its encoding for the journal."""
    if isinstance(event, Message):
        return event.TYPE, codec.encode_body(event)
    return _KINDS[type(event)], msgspec.msgpack.encode(event)


def decode(kind: int, body: bytes) -> Durable:
    """Return the event of this kind and encoding. Raises WireError or MsgspecError."""
    decoder = _DECODERS.get(kind)
    return decoder.decode(body) if decoder is not None else cast(Durable, codec.decode_body(kind, body))


# --------------------------------------------------------------------------------------------------- volatile


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Leases may expire, and deferred calls are answered when their time is up."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request arrived. `deadline` is the time until which the caller waits, on the same clock as `now`."""

    ref: Ref
    request: Request
    deadline: float
    call: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ClearDone:
    """A store acknowledged the first `count` clears that were sent to it."""

    store: str
    count: int


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a store's inventory. `hashes` holds the content hashes of each task's shards."""

    store: str
    tasks: list[PutTask]
    hashes: list[list[int]] = field(default_factory=list)
    first: bool = False
    last: bool = False


HeldHashes = Mapping[tuple[str, int], list[int]]
"""Content hashes of the shards that a store holds, by (task id, fence)."""


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """The content that a store must hold: a task with the hashes of its accepted results. Weights have no hashes."""

    task: PutTask
    hashes: tuple[int, ...] = ()

    def met(self, held: HeldHashes) -> bool:
        """Return whether a store that holds the shards `held` satisfies the claim."""
        hashes = held.get((self.task.task_id, self.task.fence))
        return hashes is not None and set(self.hashes) <= set(hashes)


@dataclass(frozen=True, slots=True)
class Checked:
    """A store has read shards again, as requested.

    `held` names the intact shards, or is None if the store did not answer.
    """

    order: CheckShards
    held: HeldHashes | None


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The supervisor confirmed that a life of a process has ended (`KillProcess`)."""

    service: str
    instance: int
    incarnation: int


Event = Tick | Asked | ClearDone | Listed | Checked | ProcessGone


# ---------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Append the event to the journal before any effect of this burst is carried out."""

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
    """Tombstone these tasks at `store`, and report `ClearDone` if `tracked`. Clears of strays are untracked."""

    store: str
    tasks: list[PutTask]
    tracked: bool


@dataclass(frozen=True, slots=True)
class StopClear:
    """Cancel the tracked clear in flight to `store`. No `ClearDone` for that clear may follow."""

    store: str


@dataclass(frozen=True, slots=True)
class RequestInventory:
    """Request the inventory of `store`, which arrives page by page (`Listed`)."""

    store: str


@dataclass(frozen=True, slots=True)
class CheckShards:
    """Have `store` read the shards of these tasks again. `Checked` follows. `ref` is the call of a waiting reader."""

    store: str
    claims: list[ShardClaim]
    ref: Ref | None = None


@dataclass(frozen=True, slots=True)
class SaveStep:
    """Write a row of the journal's readable table `steps`. `state` is BATCHED, with the tasks, or TRAINED."""

    step: int
    state: TaskState
    task_ids: list[str] | None = None


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Write a complete row of `metrics.jsonl`. Rows are written in step order."""

    step: int
    row: dict[str, float]


@dataclass(frozen=True, slots=True)
class Rewound:
    """The run returned to `step`. The steps after `step`, up to `committed`, belonged to this lineage or earlier ones.

    `cause` is the reason in a few words. An empty `cause` means that the steps cannot be replayed because their shards
    are gone.
    """

    lineage: int
    step: int
    committed: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class DiscardRows:
    """Move the rows of all steps after `step` from the journal and `metrics.jsonl` to `metrics.discarded.jsonl`.

    `waiting` holds, by step, rows that had not been written yet because an earlier evaluation was under way.
    """

    lineage: int
    step: int
    waiting: dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class ForgetSteps:
    """Delete the batches and metrics rows of the steps up to `step` from the journal. No recovery returns to before
    them, and the rows remain in `metrics.jsonl`."""

    step: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Publish telemetry, which may be lost."""

    topic: str
    values: dict[str, float | str]


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Have the supervisor kill a process. `ProcessGone` follows."""

    holder: tuple[str, int]
    incarnation: int
    pid: int
    cause: str


@dataclass(frozen=True, slots=True)
class TellDevices:
    """Log and publish the parts that a process now holds on the shared devices, and the phase of the devices."""

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
    | CheckShards
    | SaveStep
    | WriteRow
    | Rewound
    | DiscardRows
    | ForgetSteps
    | Tell
)
