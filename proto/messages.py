"""Every message of the bus: purpose, fields, who sends it, who answers. Bodies only; tensors ride behind them.

Conventions: times in seconds, sizes in bytes, `instance` counts from 0. A task travels with its fence. Steps are
numbered from 1; version `step` is the policy after that many steps, version 0 the model the run began with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from proto.registry import Message, Record, Request, message

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:  # msgspec hands fields of this very class to the guarded msgpack-numpy hooks
    Array = np.ndarray


# ------------------------------------------------------------------------------------------------ everyone


@message(1)
class Error(Message, frozen=True, kw_only=True):
    """The other possible answer to any request. `code` is one of `ErrorCode`; `message` is one line for a person."""

    code: str
    message: str
    retry_after_s: float = 0.0
    names: list[str] = []
    """What the error is about (shards that are missing, a lease that is lost), bounded by the sender."""


class ErrorCode:
    """The closed list of `Error.code`."""

    BAD_REQUEST = "bad_request"  # the request can never succeed
    BAD_DATA = "bad_data"  # numbers or shapes of tasks (`names`) that cannot be computed with; nothing was changed
    BUSY = "busy"  # no room now; try again after retry_after_s
    NOT_READY = "not_ready"  # nothing to give before the deadline; ask again
    MISSING = "missing"  # shards that are not there (`names`)
    COLLECTED = "collected"  # the task was collected: tombstoned, never readable again
    CONFLICT = "conflict"  # same fence, other bytes; or a step, version or incarnation out of order
    LOST = "lost"  # the lease is no longer held, or the caller is not registered
    DEADLINE = "deadline"  # the handler did not finish in time
    DRAINING = "draining"  # the service is going away
    INTERNAL = "internal"  # a defect: see the service's log


@message(2)
class Ack(Message, frozen=True, kw_only=True):
    """Done, nothing to add."""


@message(3)
class Pong(Message, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    service: str
    instance: int
    incarnation: int
    state: str


@message(4)
class Ping(Request, frozen=True, kw_only=True):
    """Is the mailbox alive? Anyone to anyone."""

    REPLY: ClassVar[type[Message]] = Pong


# ------------------------------------------------------------------------------- life of a process (supervisor)


@message(10)
class ServiceReport(Request, frozen=True, kw_only=True):
    """A service tells its supervisor a change of state: STARTING, READY, DRAINING, STOPPED, FAILED."""

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int
    incarnation: int
    pid: int
    state: str
    cause: str = ""
    endpoint: str = ""


@message(11)
class RestartService(Request, frozen=True, kw_only=True):
    """Operator to supervisor: end and start again one instance (`instance` >= 0) or all of a service (-1)."""

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int = -1


@message(12)
class StopRun(Request, frozen=True, kw_only=True):
    """Operator to supervisor: drain everything and end the run."""

    REPLY: ClassVar[type[Message]] = Ack


class ProcessRow(Record, frozen=True, array_like=True):
    """One supervised process."""

    service: str
    instance: int
    state: str
    pid: int
    incarnation: int
    restarts: int
    cause: str = ""
    rss_bytes: int = 0


@message(13)
class SupervisorState(Message, frozen=True, kw_only=True):
    """Answer to `GetSupervisorState`."""

    run: str
    phase: str
    processes: list[ProcessRow]


@message(14)
class GetSupervisorState(Request, frozen=True, kw_only=True):
    """Operator to supervisor: which processes are there?"""

    REPLY: ClassVar[type[Message]] = SupervisorState


@message(15)
class KillInstance(Request, frozen=True, kw_only=True):
    """Scheduler to supervisor: SIGKILL this process, which hangs on devices that others wait for. Ack: it is dead.

    A process of that pid which is not there (any more) is dead; the instance starts again as after any death.
    """

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int
    pid: int
    cause: str


@message(18)
class LogLines(Message, frozen=True, kw_only=True):
    """Answer to `GetLog`: whole lines in order, 256 KiB of them at most, and the `position` to go on from."""

    lines: list[str]
    position: int


@message(19)
class GetLog(Request, frozen=True, kw_only=True):
    """The last `lines` lines of a service's log; with a `position`, what came after that.

    Of operators to the supervisor, which asks the service itself when its log lies on a host that has joined.
    """

    REPLY: ClassVar[type[Message]] = LogLines
    service: str
    instance: int
    lines: int = 50
    position: int = -1


# --------------------------------------------------------------------------------------- registry (scheduler)


@message(20)
class Registered(Message, frozen=True, kw_only=True):
    """Answer to `Register`."""

    scheduler_incarnation: int
    heartbeat_s: float


@message(21)
class Register(Request, frozen=True, kw_only=True):
    """A service announces this life of itself. An earlier incarnation of the same instance loses its leases."""

    REPLY: ClassVar[type[Message]] = Registered
    service: str
    instance: int
    incarnation: int
    pid: int
    host: str
    endpoint: str
    limit_bytes: int = 0
    """A batch store's memory limit (plus spill, when there is one); 0 for everyone else."""
    data_id: str = ""
    """A batch store's: names what it holds. Another one under the same name means that the former data is lost."""
    host_id: str = ""
    """Who has the same one reaches the service's ipc endpoint; everyone else needs a tcp `endpoint`."""


class LeaseProgress(Record, frozen=True, array_like=True):
    """How far the working thread is with one lease; only that thread advances `progress`."""

    lease_id: int
    progress: int


@message(22)
class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Answer to `Heartbeat`. `registered` false: register again. `lost_leases`: stop working on them.

    `weights`: only to an engine that holds an older version than the newest one; it may update what it is sampling.
    """

    scheduler_incarnation: int
    registered: bool
    lost_leases: list[int] = []
    weights: WeightsRef | None = None


@message(23)
class Heartbeat(Request, frozen=True, kw_only=True):
    """A service is alive; leases whose progress advanced are renewed. Sent by the mailbox thread."""

    REPLY: ClassVar[type[Message]] = HeartbeatAck
    service: str
    instance: int
    incarnation: int
    state: str
    rss_bytes: int = 0
    holds_step: int = -1
    """Policy version an engine has loaded; -1: none, or not an engine."""
    holds_lineage: int = 0
    leases: list[LeaseProgress] = []
    store_bytes: int = 0
    store_shards: int = 0
    progress: int = 0
    """Advanced by the working thread only; renews what the process holds on shared devices."""


@message(24)
class Resolved(Message, frozen=True, kw_only=True):
    """Answer to `Resolve`: what the service registered."""

    endpoint: str
    host_id: str
    incarnation: int


@message(25)
class Resolve(Request, frozen=True, kw_only=True):
    """Where does an instance of a service answer? Error(missing) while it is not registered."""

    REPLY: ClassVar[type[Message]] = Resolved
    service: str
    instance: int


@message(26)
class DeviceOrder(Message, frozen=True, kw_only=True):
    """Answer to `HoldDevices`: what may lie on the shared devices. `granted`: with all that was wanted, now in use.

    Parts that are held and not named have to leave; the next `HoldDevices` says that they did.
    """

    parts: list[str]
    granted: bool = False


@message(27)
class HoldDevices(Request, frozen=True, kw_only=True):
    """A colocated process says what of it lies on the shared devices. Answered when that has to change, or may.

    `using` (of `holds`): what it works with, not to be taken; `wants`: what it waits for, all at once, using nothing.
    Only the newest `number` of a life counts. A process loads nothing that was not granted to it.
    """

    REPLY: ClassVar[type[Message]] = DeviceOrder
    service: str
    instance: int
    incarnation: int
    number: int
    holds: list[str] = []
    using: list[str] = []
    wants: list[str] = []


# ------------------------------------------------------------------------------------------ tasks and batches


class TaskHandle(Record, frozen=True, array_like=True):
    """What a process must know of a task to fetch its shards; no data.

    `stores[p]` is an index into `BatchMeta.stores`: where part `p` of the batch lives for this task.
    """

    task_id: str
    fence: int
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    stores: list[int] = []


class BatchPart(Record, frozen=True, array_like=True):
    """A group of keys that one stage made together."""

    stage: str
    keys: list[str]


class BatchMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The metadata of a distributed batch: the wire form of `shared.batch.Batch`. What is empty is left out."""

    tasks: list[TaskHandle]
    parts: list[BatchPart] = []
    stores: list[str] = []
    """Service names such as `batch-store/0`."""
    scalars: dict[str, Array] = {}
    """What a caller says of each sample, such as `advantages` and `weights`: [samples] in the order of `tasks`."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """What loading is proved with: a fixed sequence and the trainer's log-probs of its tokens.

    `token_ids` int32 [T]; `logprobs` float32 [T - 1] of tokens 1.. at temperature 1; `tolerance` absolute.
    """

    token_ids: Array
    logprobs: Array
    tolerance: float


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where policy version (lineage, step) lies and how to prove that it was loaded.

    `drill` belongs to the start-up drill: the model directory's weights perturbed with `drill_seed`.
    """

    lineage: int
    step: int
    task_id: str
    fence: int
    store: str
    nbytes: int
    canary: Canary
    drill: Canary
    drill_seed: int


@message(30)
class LeaseGrant(Message, frozen=True, kw_only=True):
    """Answer to `LeaseRequest`: work on these tasks for `stage`; the lease ends when progress stops for `lease_s`.

    For the rollout stage `split` names the data and sampling (`train` or an evaluation set) and `weights` the version
    to sample with: load it if the engine holds an older one (`exact`: unless it holds this very one). For the
    reference stage `weights` is the version to score with, exactly; None is the model that the run began with.
    `group_size` samples a task; `block_rows` is the fixed number of rows to run (padding included), 0 for any.
    """

    lease_id: int
    stage: str
    split: str
    lease_s: float
    batch: BatchMeta
    min_step: int = 0
    exact: bool = False
    group_size: int = 1
    block_rows: int = 0
    weights: WeightsRef | None = None


@message(31)
class LeaseRequest(Request, frozen=True, kw_only=True):
    """A worker asks for work of `stage`. Held back until there is some, or Error(not_ready) before the deadline."""

    REPLY: ClassVar[type[Message]] = LeaseGrant
    stage: str
    service: str
    instance: int
    incarnation: int
    max_tasks: int
    holds_lineage: int = 0
    holds_step: int = -1


class Outcome:
    """The closed list of `TaskResult.outcome`."""

    DONE = 0
    RETRY = 1  # this attempt failed; another may succeed
    DROP = 2  # this task can never succeed (bad row, prompt too long, fewer than two samples left)


class TaskResult(Record, frozen=True, array_like=True):
    """The end of one attempt at one task in one stage.

    `content_hash`: xxh3-64 over the checksums of its shards in the order of the stage's keys (SPEC section 8).
    """

    task_id: str
    fence: int
    outcome: int
    store: str = ""
    content_hash: int = 0
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    reason: str = ""
    samples_failed: int = 0


class Refusal(Record, frozen=True, array_like=True):
    """Why a result was not accepted: its shards are garbage now."""

    task_id: str
    fence: int
    code: str
    message: str


@message(32)
class CompleteAck(Message, frozen=True, kw_only=True):
    """Answer to `Complete`: results that were refused; all others are accepted and durable."""

    refused: list[Refusal] = []


@message(33)
class Complete(Request, frozen=True, kw_only=True):
    """A worker ends (part of) a lease. Sealed shards become visible with the acceptance, not before.

    `scalars`: per-sample values (`reward` float32, `length` int32, `loss_tokens` int32, `truncated` uint8,
    `version_min` int32, `sync_error` float32, ...), each [sum of `samples` over the DONE results], in the order of
    `results`.
    `final`: the lease ends; tasks of it not in `results` go back to be leased again.
    """

    REPLY: ClassVar[type[Message]] = CompleteAck
    lease_id: int
    stage: str
    incarnation: int
    results: list[TaskResult]
    scalars: dict[str, Array] = {}
    final: bool = True


# ------------------------------------------------------------------------------------------------ the driver


@message(40)
class RunInfo(Message, frozen=True, kw_only=True):
    """Answer to `GetRunInfo`: where the journal says the run stands."""

    steps: int
    committed_step: int
    open_step: int
    """A step whose batch is journaled but not committed; 0 when there is none."""
    lineage: int
    """The lineage that this driver incarnation must publish under."""
    checkpoint_step: int
    """Newest verified checkpoint; -1 when there is none."""
    stopping: bool = False
    checkpoint_now: bool = False
    """As in `StepBatch`, of the steps trained so far: save one as soon as the workers stand at the committed step."""
    reference_step: int = 0
    """The reference has to be given the policy version of this step (`algorithm.kl.refresh_every`), and no store holds
    it: publish it anew from its checkpoint, unless the workers stand at it anyway. 0: nothing is missing."""


@message(41)
class GetRunInfo(Request, frozen=True, kw_only=True):
    """The driver's first call; an older driver incarnation is refused from here on."""

    REPLY: ClassVar[type[Message]] = RunInfo
    driver: int
    reload: bool = False
    """The trainer group was (re)loaded from a checkpoint: begin a new lineage."""
    loaded_step: int = -1
    """With `reload`, the checkpoint that was loaded, 0 for the initial model (-1: the newest one announced). When the
    journaled steps after it cannot be replayed, the run goes back to it: see the answer's `committed_step`."""


@message(42)
class StepBatch(Message, frozen=True, kw_only=True):
    """Answer to `NextBatch`: the tasks of `step`, journaled in this order before this message left.

    `scalars` as in `Complete`, in batch order. `dropped` counts what filtering and staleness took since the last step.
    """

    step: int
    batch: BatchMeta
    scalars: dict[str, Array]
    reward_mean_unfiltered: float = 0.0
    samples_failed: int = 0
    dropped: int = 0
    checkpoint_now: bool = False
    """Trained tasks fill the stores: save a checkpoint right after this step, or admission will stop."""


@message(43)
class NextBatch(Request, frozen=True, kw_only=True):
    """The driver asks for the batch of `step`. Held back until it is ready; asking again gives the same batch."""

    REPLY: ClassVar[type[Message]] = StepBatch
    driver: int
    step: int


@message(44)
class CommitStep(Request, frozen=True, kw_only=True):
    """The optimizer has taken step `step`: its tasks are TRAINED. `metrics` is the driver's part of the row."""

    REPLY: ClassVar[type[Message]] = Ack
    driver: int
    step: int
    metrics: dict[str, float]


@message(45)
class PublishWeights(Request, frozen=True, kw_only=True):
    """Version `ref.step` can be loaded from the stores. The scheduler frees it when nothing names it any more."""

    REPLY: ClassVar[type[Message]] = Ack
    driver: int
    ref: WeightsRef


@message(46)
class CheckpointSaved(Request, frozen=True, kw_only=True):
    """The checkpoint of `step` is complete, verified and durable: it covers the tasks trained up to there."""

    REPLY: ClassVar[type[Message]] = Ack
    driver: int
    step: int
    kept: list[int]
    """Steps of all checkpoints that exist now, this one included."""


@message(47)
class EvalsDone(Message, frozen=True, kw_only=True):
    """Answer to `WaitEvals`: mean score per evaluation set of that version."""

    step: int
    accuracy: dict[str, float]


@message(48)
class WaitEvals(Request, frozen=True, kw_only=True):
    """The driver waits for the evaluations of version `step` (held back until done)."""

    REPLY: ClassVar[type[Message]] = EvalsDone
    driver: int
    step: int


@message(49)
class FinishRun(Request, frozen=True, kw_only=True):
    """The driver has exported the model: the run is complete."""

    REPLY: ClassVar[type[Message]] = Ack
    driver: int


# ------------------------------------------------------------------------------------------------ batch store


class PutTask(Record, frozen=True, array_like=True):
    """One task in a put, under which fence."""

    task_id: str
    fence: int


@message(60)
class PutGrant(Message, frozen=True, kw_only=True):
    """Answer to `PutBegin`: write the file of SPEC section 9 at `path`, then seal it."""

    path: str


@message(61)
class PutBegin(Request, frozen=True, kw_only=True):
    """A producer asks for `nbytes` of room for one file with the shards of these tasks. Error: busy, collected.

    `put_id`: 32 hexadecimal digits chosen by the producer; a retry of the whole put uses the same one.
    """

    REPLY: ClassVar[type[Message]] = PutGrant
    put_id: str
    nbytes: int
    tasks: list[PutTask]


@message(62)
class PutSealed(Message, frozen=True, kw_only=True):
    """Answer to `PutSeal`: the shards survive the store's death from here on."""

    nbytes: int


@message(63)
class PutSeal(Request, frozen=True, kw_only=True):
    """The producer has written the file. Sealing twice is one seal; other bytes under a sealed id are a conflict."""

    REPLY: ClassVar[type[Message]] = PutSealed
    put_id: str


@message(64)
class Located(Message, frozen=True, kw_only=True):
    """Answer to `Locate`. `files[i]` is a path; `places[j]` lists indices into `files` that hold task `j`."""

    files: list[str]
    places: list[list[int]]


@message(65)
class Locate(Request, frozen=True, kw_only=True):
    """A reader asks which sealed files hold these tasks (with these fences). Error: missing, collected."""

    REPLY: ClassVar[type[Message]] = Located
    tasks: list[PutTask]


@message(66)
class Clear(Request, frozen=True, kw_only=True):
    """The scheduler tombstones each (task, fence): every shard of the task with that fence or a lower one goes.

    Idempotent. Later puts under a tombstoned fence are refused.
    """

    REPLY: ClassVar[type[Message]] = Ack
    tasks: list[PutTask]


@message(67)
class Inventory(Message, frozen=True, kw_only=True):
    """Answer to `GetInventory`: one page of what is sealed. `cursor` 0: this was the last page."""

    tasks: list[PutTask]
    cursor: int


@message(68)
class GetInventory(Request, frozen=True, kw_only=True):
    """The scheduler asks a store what it holds, page by page, to reconcile."""

    REPLY: ClassVar[type[Message]] = Inventory
    cursor: int = 0


@message(69)
class StoreStats(Message, frozen=True, kw_only=True):
    """Answer to `GetStoreStats`. `bytes` counts sealed and granted room, and unlinked files that are still mapped."""

    bytes: int
    limit_bytes: int
    shards: int
    tasks: int
    files: int
    zombie_bytes: int
    tombstones: int
    puts: int
    clears: int
    busy: int


@message(70)
class GetStoreStats(Request, frozen=True, kw_only=True):
    """Anyone asks a store for exact counts."""

    REPLY: ClassVar[type[Message]] = StoreStats


# -------------------------------------------------------------------------------- batch store, to other hosts


@message(71)
class StreamOpened(Message, frozen=True, kw_only=True):
    """Answer to `OpenStream`: ask for chunks at `endpoint` as SPEC section 11 says; the files stay until it is closed.

    What is streamed is one block file of `total_bytes` with exactly the shards asked for. Chunk i is its bytes from
    i * `chunk_bytes` on. `head_bytes`, `head_checksum` (xxh3-64) are those of its header and table: the same head
    means the same bytes. `secret` (64 hexadecimal digits; empty: frames travel in clear) is for one stream only.
    """

    stream_id: str
    """32 hexadecimal digits."""
    endpoint: str
    covered: int
    """So many of the tasks asked for, from the first on; open another stream for the rest."""
    total_bytes: int
    chunk_bytes: int
    head_bytes: int
    head_checksum: int
    secret: str = ""


@message(72)
class OpenStream(Request, frozen=True, kw_only=True):
    """A reader on another host asks for the shards `keys` (none: all) of these tasks. Error: missing, collected, busy.

    Tasks are taken as long as `max_bytes` are not passed; the first one always is.
    """

    REPLY: ClassVar[type[Message]] = StreamOpened
    tasks: list[PutTask]
    keys: list[str] = []
    max_bytes: int = 1 << 26


@message(73)
class Cleared(Message, frozen=True, kw_only=True):
    """Answer to `GetCleared`: what was cleared after `serial` of the request, and where the list stands now.

    `whole` false: the store does not know so far back (it restarted); drop every copy of its shards.
    """

    log: int
    serial: int
    whole: bool
    tasks: list[PutTask] = []
    more: bool = False
    """There is more than one answer holds: ask again."""


@message(74)
class GetCleared(Request, frozen=True, kw_only=True):
    """A reader that keeps copies asks which of them must go. `wait`: held back until something is cleared."""

    REPLY: ClassVar[type[Message]] = Cleared
    log: int = 0
    serial: int = 0
    wait: bool = False


@message(75)
class StorePlace(Message, frozen=True, kw_only=True):
    """Answer to `GetStorePlace`: who can read `token` in the file `path` shares memory with the store."""

    path: str
    token: str


@message(76)
class GetStorePlace(Request, frozen=True, kw_only=True):
    """A reader asks how to find out whether the store's files can be mapped from where it runs."""

    REPLY: ClassVar[type[Message]] = StorePlace


# ------------------------------------------------------------------------------------------- trainer workers


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The loss as named functions and numbers; workers apply it to every token. An option of 0 or "" is off.

    `name`: a builtin, or the import path that the topology names (workers take it from there). `anchor`: "rollout",
    "proximal", or "present": proximal, when the call's gradients make the step's only update. `ratio_mask`: "token",
    "sequence" or "geometric", within [mask_low, mask_high]. `clamp`: "upper" or "both" (cispo).
    """

    name: str
    clip_low: float
    clip_high: float
    anchor: str
    temperature: float
    tis_cap: float = 0.0
    kl_estimator: str = ""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    dual_clip: float = 0.0
    clamp: str = ""
    gate_positive: float = 0.0
    gate_negative: float = 0.0
    ratio_mask: str = ""
    mask_low: float = 0.0
    mask_high: float = 0.0


class WorkerRequest(Request, frozen=True, kw_only=True):
    """A call to the trainer's model: to one rank, or to a dispatch that speaks for all of them.

    `driver`: the caller's incarnation; `order`: calls run in this order, each once.
    """

    driver: int
    order: int


@message(80)
class WorkerReady(Message, frozen=True, kw_only=True):
    """Answer to `InitModel` and `LoadCheckpoint`: what the worker stands at."""

    step: int
    parameters: int


@message(81)
class InitModel(WorkerRequest, frozen=True, kw_only=True):
    """Load the model directory of the topology, step 0, fresh optimizer state."""

    REPLY: ClassVar[type[Message]] = WorkerReady


@message(82)
class ForwardDone(Message, frozen=True, kw_only=True):
    """Answer to `Forward`: one new part for the batch (put into stores under the tasks' fences), token count."""

    meta: BatchMeta
    seconds: float


@message(83)
class Forward(WorkerRequest, frozen=True, kw_only=True):
    """Run the model over `batch` at the training sampling's temperature, put what `keys` name as shards
    `<key>:<driver in hexadecimal>-<order>`. There is one key so far: `prox_logprobs`, per-token log-probs."""

    REPLY: ClassVar[type[Message]] = ForwardDone
    batch: BatchMeta
    keys: list[str]


@message(84)
class ForwardBackwardDone(Message, frozen=True, kw_only=True):
    """Answer to `ForwardBackward`. `sums`: additive over workers and calls (`loss`, `kl`, `clipped`, `tokens`, ...)."""

    sums: dict[str, float]
    seconds: float
    imbalance: float = 1.0
    """Tokens of the fullest rank over the mean of all."""


@message(85)
class ForwardBackward(WorkerRequest, frozen=True, kw_only=True):
    """Add the gradient of sum(W * loss) over `batch` to the accumulated one.

    `batch.scalars` holds `advantages` and `weights`, float32 [samples]; W of a token is its sample's weight times its
    mask.
    """

    REPLY: ClassVar[type[Message]] = ForwardBackwardDone
    batch: BatchMeta
    loss: LossSpec


@message(86)
class OptimStepDone(Message, frozen=True, kw_only=True):
    """Answer to `OptimStep`. `grad_norm`: before clipping, float."""

    grad_norm: float
    lr: float
    seconds: float


@message(87)
class OptimStep(WorkerRequest, frozen=True, kw_only=True):
    """Clip, step, zero the gradients. `step`: the training step this update belongs to; `last`: its last update."""

    REPLY: ClassVar[type[Message]] = OptimStepDone
    step: int
    last: bool


@message(88)
class Published(Message, frozen=True, kw_only=True):
    """Answer to `Publish`. `ref` comes from the rank that put the weights, the others have None."""

    ref: WeightsRef | None = None
    seconds: float


@message(89)
class Publish(WorkerRequest, frozen=True, kw_only=True):
    """Put the weights as shards of `weights/<lineage>/<step>` into `store` and compute the canary.

    `fence`: the first one to try; one that the store has collected (an earlier life put it and never announced it) is
    followed by the next.
    """

    REPLY: ClassVar[type[Message]] = Published
    lineage: int
    step: int
    store: str
    fence: int


@message(90)
class Saved(Message, frozen=True, kw_only=True):
    """Answer to `SaveCheckpoint` and `SaveModel`: durable and verified. `kept`: steps of all checkpoints there are."""

    path: str
    seconds: float
    kept: list[int] = []


@message(91)
class SaveCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Write a checkpoint of `step` under the run directory, keep the last `keep_last`."""

    REPLY: ClassVar[type[Message]] = Saved
    step: int
    keep_last: int


@message(92)
class LoadCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Load the checkpoint of `step`."""

    REPLY: ClassVar[type[Message]] = WorkerReady
    step: int


@message(93)
class SaveModel(WorkerRequest, frozen=True, kw_only=True):
    """Export a Hugging Face directory to `path` (atomically)."""

    REPLY: ClassVar[type[Message]] = Saved
    path: str


@message(94)
class WorkerState(Message, frozen=True, kw_only=True):
    """Answer to `GetWorkerState`. `step`: finished training steps; -1 before a model is loaded."""

    step: int
    driver: int
    order: int
    dirty: bool
    """Gradients are accumulated or a step is half taken: only a reload makes this state trustworthy."""


@message(95)
class GetWorkerState(Request, frozen=True, kw_only=True):
    """A new driver asks where a worker stands, and takes it over: calls of older drivers are refused."""

    REPLY: ClassVar[type[Message]] = WorkerState
    driver: int
    at_least: int = 0
    """Calls are numbered from above this (and above what the worker has done): all ranks of a group count alike."""


@message(96)
class Moved(Message, frozen=True, kw_only=True):
    """Answer to `Move`: bytes that changed place on this rank."""

    nbytes: int
    seconds: float


@message(97)
class Move(WorkerRequest, frozen=True, kw_only=True):
    """Take `parts` ("parameters", "gradients", "optimizer") off the device (`to` "host") or bring them back ("device").

    A later call that needs a part brings it back by itself.
    """

    REPLY: ClassVar[type[Message]] = Moved
    parts: list[str]
    to: str


@message(98)
class Met(Message, frozen=True, kw_only=True):
    """Answer to `Meet`: every rank came to the round, or one of them (`failures`) cannot: then nobody goes on."""

    generation: int
    failures: list[str] = []


@message(99)
class Meet(Request, frozen=True, kw_only=True):
    """A rank tells rank 0 that it is ready for collective `round` of group `generation`; held until all are.

    Round "join", generation 0: the group is formed, the answer names its generation. Round "end": held until the group
    has ended (error lost). `failure`: why this rank cannot go on; it may follow an earlier `Meet` of the same round.
    """

    REPLY: ClassVar[type[Message]] = Met
    generation: int
    round: str
    rank: int
    failure: str = ""


@message(109)
class SkipUpdate(WorkerRequest, frozen=True, kw_only=True):
    """In the place of an `OptimStep` that was refused: forget the gradient and change nothing, yet count the update.

    `step`, `last`: as there; with `last` the worker stands at `step`, with the weights that it had.
    """

    REPLY: ClassVar[type[Message]] = WorkerReady
    step: int
    last: bool


@message(108)
class ScoreTogether(Request, frozen=True, kw_only=True):
    """The rank of a reference that holds the lease tells the others that hold pieces of the same model to score `batch`
    with it: they fetch the shards of stage reference, stand at version `weights` (None: the model directory) and meet
    in round `score <number>` of group `generation`. Answered when they are done; they put nothing.
    """

    REPLY: ClassVar[type[Message]] = Ack
    generation: int
    number: int
    batch: BatchMeta
    weights: WeightsRef | None = None


# ------------------------------------------------------------------------------------ status and telemetry


class ServiceRow(Record, frozen=True, array_like=True):
    """One registered service as the scheduler sees it."""

    service: str
    instance: int
    state: str
    pid: int
    host: str
    incarnation: int
    heartbeat_age_s: float
    rss_bytes: int
    endpoint: str = ""


@message(100)
class Status(Message, frozen=True, kw_only=True):
    """Answer to `GetStatus`."""

    run: str
    step: int
    steps: int
    lineage: int
    version: int
    services: list[ServiceRow]
    tasks: dict[str, int]
    store_bytes: int
    store_limit_bytes: int
    store_shards: int
    last_row: dict[str, float]
    """Newest metrics row that was written."""


@message(101)
class GetStatus(Request, frozen=True, kw_only=True):
    """Operator or monitor to scheduler."""

    REPLY: ClassVar[type[Message]] = Status


@message(110)
class Telemetry(Message, frozen=True, kw_only=True):
    """One way, may drop: `values` of `topic` changed. `sequence` counts every message tried, `dropped` those lost."""

    service: str
    instance: int
    incarnation: int
    sequence: int
    dropped: int
    at: float
    topic: str
    values: dict[str, float | str]


class TopicRow(Record, frozen=True, array_like=True):
    """Last value of one topic of one service."""

    service: str
    instance: int
    topic: str
    at: float
    values: dict[str, float | str]


@message(111)
class Snapshot(Message, frozen=True, kw_only=True):
    """Answer to `GetSnapshot`: everything the monitor knows; the stream goes on after `sequence`."""

    sequence: int
    rows: list[TopicRow]
    dropped: int
    stream: str = ""
    """Where the updates can be had over the network; empty: on the monitor's host only."""


@message(112)
class GetSnapshot(Request, frozen=True, kw_only=True):
    """A subscriber asks for the present state (after it has subscribed, so that nothing falls in between)."""

    REPLY: ClassVar[type[Message]] = Snapshot


@message(113)
class Update(Message, frozen=True, kw_only=True):
    """One way, from the monitor's PUB socket: the change with this `sequence`."""

    sequence: int
    row: TopicRow
