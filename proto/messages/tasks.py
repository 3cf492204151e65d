"""Tasks, batches of their handles, weight versions; leases of them and their completion."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from proto.messages.common import Array
from proto.registry import Message, Record, Request, message


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

    `token_ids` int32 [T]; `logprobs` float32 [T - 1] of tokens 1.. at temperature 1. The `quantile` of the absolute
    differences must be within `tolerance`. With a `floor` the engine calibrates a narrower one at its start: from there
    up to `tolerance`.
    `digests`: of every weight (section 12), in the order of their sorted names; empty where engines take the arrays
    themselves as their parameters.
    """

    token_ids: Array
    logprobs: Array
    tolerance: float
    digests: list[int] = []
    quantile: float = 1.0
    floor: float = 0.0


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where policy version (lineage, step) lies and how to prove that it was loaded.

    `drill` belongs to the start-up drill: the model directory's weights perturbed with `drill_seed`, the noise of each
    weight times its number in `drill_factors` (in the order of their sorted names; empty: 1).
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


class DropReason(StrEnum):
    """Why a task was dropped. A reader counts a reason that it does not know as OTHER."""

    TOO_LONG = "too_long"  # the prompt, or the answer of supervised fine-tuning, has more tokens than the limit
    NO_CHAT_TEMPLATE = "no_chat_template"  # a prompt of messages, and the tokenizer has no template for them
    BAD_ROW = "bad_row"  # the row cannot be read, or has no usable prompt or answer
    REWARD_FAILED = "reward_failed"  # too few samples are left, and reward functions lost the first of the others
    WORKFLOW_FAILED = "workflow_failed"  # too few samples are left, and the workflow lost the first of the others
    FILTERED = "filtered"  # all rewards of the group are equal (algorithm.filter_zero_variance)
    STALE = "stale"  # the oldest token is of too old a version (consume: completion)
    ATTEMPTS = "attempts"  # lease.attempts attempts failed
    WEIGHTS_LOST = "weights_lost"  # an evaluation whose version was lost with its store
    OTHER = "other"


class LossReason(StrEnum):
    """Why a sample has no reward and is left out of its group."""

    RAISED = "raised"  # the reward function raised
    ANSWER = "answer"  # the reward function returned something other than finite numbers
    TIMEOUT = "timeout"  # no answer within reward.timeout_s
    CRASHED = "crashed"  # the process of the reward function ended
    MEMORY = "memory"  # the call needs more than reward.memory
    JUDGE = "judge"  # the judge refused this sample again and again, and answered others meanwhile
    WORKFLOW = "workflow"  # the workflow made no sample
    OTHER = "other"


class TaskResult(Record, frozen=True, array_like=True):
    """The end of one attempt at one task in one stage.

    `content_hash`: xxh3-64 over the checksums of its shards in the order of the stage's keys (SPEC section 8). `why`: a
    `DropReason`, when the outcome is DROP. `lost`: how many of the `samples_failed` were lost for which `LossReason`.
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
    `results`. Names with a slash are parts of dict rewards (`reward/part/<name>`) and metrics of workflows
    (`workflow/<name>`), float32, NaN for a sample that has no such value.
    `final`: the lease ends; tasks of it not in `results` go back to be leased again. `untouched`: nothing was made of
    those, which counts as no attempt of theirs.
    """

    REPLY: ClassVar[type[Message]] = CompleteAck
    lease_id: int
    stage: str
    incarnation: int
    results: list[TaskResult]
    scalars: dict[str, Array] = {}
    final: bool = True
    untouched: bool = False
