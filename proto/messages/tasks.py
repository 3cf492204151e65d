"""Tasks, batches of their handles, weight versions, and the leasing and completion of tasks."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from proto.messages.common import Array
from proto.registry import Message, Record, Request, message


class TaskHandle(Record, frozen=True, array_like=True):
    """The facts that a process needs to fetch the shards of a task; no data.

    `stores[p]` is an index into `BatchMeta.stores`, naming the store of this task's part `p` of the batch.
    """

    task_id: str
    fence: int
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    stores: list[int] = []


class BatchPart(Record, frozen=True, array_like=True):
    """A group of keys that were made by the same stage."""

    stage: str
    keys: list[str]


class BatchMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The metadata of a distributed batch, the wire form of `shared.batch.Batch`. Empty fields are omitted."""

    tasks: list[TaskHandle]
    parts: list[BatchPart] = []
    stores: list[str] = []
    """Service names such as `batch-store/0`."""
    scalars: dict[str, Array] = {}
    """Values of the caller for each sample, such as `advantages` and `weights`: [samples] in the order of `tasks`."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """Proof of loading: a fixed sequence and the trainer's log-probs of its tokens.

    `token_ids` is int32 [T]; `logprobs` is float32 [T - 1], of tokens 1.. at temperature 1. The `quantile` of the
    absolute differences must be within `tolerance`. With a `floor`, the engine calibrates a narrower tolerance at its
    start, between `floor` and `tolerance`.
    `digests` are those of all weights (section 12), in the order of the sorted names. The list is empty if engines use
    the arrays themselves as their parameters.
    """

    token_ids: Array
    logprobs: Array
    tolerance: float
    digests: list[int] = []
    quantile: float = 1.0
    floor: float = 0.0


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """The place of policy version (lineage, step) and the means to prove that it was loaded.

    `drill` belongs to the start-up drill: the model directory's weights perturbed with `drill_seed`, the noise of each
    weight multiplied by its factor in `drill_factors` (in the order of the sorted names; empty: 1).
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
    drill_factors: list[float] = []


@message(30)
class LeaseGrant(Message, frozen=True, kw_only=True):
    """Answer to `LeaseRequest`: work on these tasks for `stage`. The lease ends if progress stops for `lease_s`.

    For the rollout stage, `split` names the data and sampling (`train` or an evaluation set) and `weights` is the
    version to sample with: load it if the engine holds an older one (`exact`: unless it holds this very one). For the
    reference stage, `weights` is the exact version to score with; None is the model with which the run began.
    `group_size` is the number of samples per task; `block_rows` is the fixed number of rows to run (including padding),
    or 0 for any number.
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


@message(31, reply=LeaseGrant)
class LeaseRequest(Request, frozen=True, kw_only=True):
    """A worker asks for work of `stage`. Deferred until there is some, or Error(not_ready) before the deadline."""

    stage: str
    service: str
    instance: int
    incarnation: int
    max_tasks: int
    holds_lineage: int = 0
    holds_step: int = -1


class Outcome(IntEnum):
    """The closed list of values of `TaskResult.outcome`."""

    DONE = 0
    RETRY = 1  # this attempt failed; another may succeed
    DROP = 2  # this task can never succeed (bad row, prompt too long, fewer than two samples left)


class DropReason(StrEnum):
    """Reasons for dropping a task. Readers count an unknown reason as OTHER."""

    TOO_LONG = "too_long"  # the prompt, or the answer of supervised fine-tuning, has more tokens than the limit
    NO_CHAT_TEMPLATE = "no_chat_template"  # the prompt consists of messages, and the tokenizer has no template for them
    BAD_ROW = "bad_row"  # the row cannot be read, or lacks a usable prompt or answer
    REWARD_FAILED = "reward_failed"  # too few samples are left, and reward functions lost the first of the others
    WORKFLOW_FAILED = "workflow_failed"  # too few samples are left, and the workflow lost the first of the others
    FILTERED = "filtered"  # all rewards of the group are equal (algorithm.filter_zero_variance)
    STALE = "stale"  # the version of the oldest token is too old (consume: completion)
    ATTEMPTS = "attempts"  # lease.attempts attempts failed
    WEIGHTS_LOST = "weights_lost"  # the version of an evaluation was lost with its store
    OTHER = "other"


class LossReason(StrEnum):
    """Reasons for which a sample has no reward and is left out of its group."""

    RAISED = "raised"  # the reward function raised
    ANSWER = "answer"  # the reward function did not return finite numbers
    TIMEOUT = "timeout"  # no answer within reward.timeout_s
    CRASHED = "crashed"  # the process of the reward function ended
    MEMORY = "memory"  # the call needs more than reward.memory
    JUDGE = "judge"  # the judge repeatedly refused this sample while it answered others
    WORKFLOW = "workflow"  # the workflow made no sample
    OTHER = "other"


class TaskResult(Record, frozen=True, array_like=True):
    """The end of one attempt at one task in one stage.

    `content_hash` is xxh3-64 over the checksums of its shards in the order of the stage's keys (SPEC section 8). `why`
    is a `DropReason` if the outcome is DROP. `lost` counts the lost samples among `samples_failed` by `LossReason`.
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
    why: str = ""
    lost: dict[str, int] = {}


class Refusal(Record, frozen=True, array_like=True):
    """The reason for not accepting a result, whose shards are garbage now."""

    task_id: str
    fence: int
    code: str
    message: str


@message(32)
class CompleteAck(Message, frozen=True, kw_only=True):
    """Answer to `Complete`: the refused results. All others are accepted and durable."""

    refused: list[Refusal] = []


@message(33, reply=CompleteAck)
class Complete(Request, frozen=True, kw_only=True):
    """A worker ends a lease or a part of it. Sealed shards become visible with the acceptance, not before.

    `scalars`: per-sample values (`reward` float32, `length` int32, `loss_tokens` int32, `truncated` uint8,
    `version_min` int32, `sync_error` float32, ...), each [sum of `samples` over the DONE results], in the order of
    `results`. Names with a slash are parts of dict rewards (`reward/part/<name>`) and metrics of workflows
    (`workflow/<name>`), float32, NaN for a sample that has no such value.
    `final`: the lease ends, and its tasks that are not in `results` are leased again. `untouched`: no work was done on
    those tasks, so it counts as no attempt.
    """

    lease_id: int
    stage: str
    incarnation: int
    results: list[TaskResult]
    scalars: dict[str, Array] = {}
    final: bool = True
    untouched: bool = False
