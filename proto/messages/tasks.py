"""Messages for leasing and completing tasks, and descriptions of tasks, batches and weight versions."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from proto.messages.common import Ack, Array
from proto.messages.store import PutTask
from proto.registry import Message, Record, Request, message


class TaskHandle(Record, frozen=True, array_like=True):
    """The metadata that a process needs to fetch the shards of a task."""

    task_id: str
    fence: int
    samples: int = 0  # number of samples
    tokens: int = 0  # number of tokens in all sequences
    nbytes: int = 0  # size of all shards in bytes
    stores: list[int] = []  # for each part of the batch, the index into `BatchMeta.stores` of the store that has it


class BatchPart(Record, frozen=True, array_like=True):
    """A group of keys whose shards were produced by the same stage."""

    stage: str  # name of the stage
    keys: list[str]  # keys of the shards


class BatchMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The metadata of a distributed batch. Empty fields are omitted."""

    tasks: list[TaskHandle]  # the tasks, in order
    parts: list[BatchPart] = []  # the shards that exist, grouped by the stage that produced them
    stores: list[str] = []  # names of the stores that have the shards, such as `batch-store/0`
    scalars: dict[str, Array] = {}
    """The caller's values for each sample, such as `advantages` and `weights`: [samples] in the order of `tasks`."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """The means to prove that weights were loaded: a fixed sequence and the trainer's log-probs of its tokens."""

    token_ids: Array  # int32 [T]
    logprobs: Array  # float32 [T - 1], for tokens 1 to T - 1 at temperature 1
    tolerance: float  # bound on the `quantile` of the absolute log-prob differences
    digests: list[int] = []
    """Digests of all weights (section 12), in the order of the sorted names. Empty if engines use the arrays themselves
    as their parameters."""
    quantile: float = 1.0  # fraction of the tokens whose difference must be within the tolerance
    floor: float = 0.0
    """If above 0, the engine calibrates a narrower tolerance when it starts, between `floor` and `tolerance`."""


class WeightsKind(StrEnum):
    """The closed list of values of `WeightsRef.kind`."""

    FULL = "full"  # all weights of the model
    ADAPTER = "adapter"  # an adapter over other weights, which never change


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where the policy version of this lineage and step is stored, and the means to prove that it was loaded."""

    lineage: int
    step: int
    task_id: str  # `weights/<lineage>/<step>`
    fence: int
    store: str  # name of the store that holds the version
    nbytes: int  # size of all weights in bytes
    canary: Canary  # canary for this version; without tokens if no engine samples with it: it then has no weights
    drill: Canary  # canary for the start-up drill, which loads a perturbed copy of the model directory's weights
    drill_seed: int  # seed of that perturbation
    drill_factors: list[float] = []
    """Noise factor of each weight, in the order of the sorted names; empty: 1 for all."""
    kind: str = "full"  # a `WeightsKind`; an engine refuses a kind that it cannot load
    base: str = ""  # name of the weights over which an adapter lies; empty for kind `full`
    base_digests: list[int] = []
    """Digests of those weights, in the order of the sorted names; empty for kind `full`."""


@message(30)
class LeaseGrant(Message, frozen=True, kw_only=True):
    """A lease to work on these tasks."""

    lease_id: int
    stage: str  # the stage of the work
    split: str  # name of the data and its sampling: `train` or an evaluation set
    lease_s: float  # seconds without progress after which the lease ends
    batch: BatchMeta  # the tasks, and where their existing shards are
    min_step: int = 0  # oldest policy version that may sample them
    exact: bool = False  # true: exactly version `min_step`, and no newer version
    group_size: int = 1  # samples per task
    block_rows: int = 0  # fixed number of rows to run, including padding; 0: any number
    weights: WeightsRef | None = None
    """For stage rollout, the version to load if the engine holds an older one. For stage reference, the exact version
    to score with; nil means the model with which the run began."""


@message(31, reply=LeaseGrant)
class LeaseRequest(Request, frozen=True, kw_only=True):
    """A worker asks for work. The answer is deferred until there is some.

    Errors:
        bad_request: the stage is unknown, or `max_tasks` is below 1.
        lost: another incarnation of the instance is registered.
        not_ready: there was no work before the deadline.
    """

    stage: str  # the stage of the work
    service: str
    instance: int
    incarnation: int
    max_tasks: int  # maximum number of tasks in the lease, 1 or more
    holds_lineage: int = 0  # lineage of the version that the engine holds
    holds_step: int = -1  # policy version that the engine holds, -1 for none


class TaskState(StrEnum):
    """The states of a task, in the order of a task's life. A task leased for a stage after the rollout stays
    ROLLED_OUT."""

    PENDING = "PENDING"
    LEASED = "LEASED"
    ROLLED_OUT = "ROLLED_OUT"
    READY = "READY"
    BATCHED = "BATCHED"
    TRAINED = "TRAINED"
    SCORED = "SCORED"
    DROPPED = "DROPPED"
    COLLECTED = "COLLECTED"


class Outcome(IntEnum):
    """The closed list of values of `TaskResult.outcome`."""

    DONE = 0
    RETRY = 1  # this attempt failed; another may succeed
    DROP = 2  # this task can never succeed (bad row, prompt too long, fewer than two samples left)


class DropReason(StrEnum):
    """Reasons for dropping a task. Readers count an unknown reason as OTHER."""

    TOO_LONG = "too_long"  # the prompt, or the answer in supervised fine-tuning, has more tokens than the limit
    NO_CHAT_TEMPLATE = "no_chat_template"  # the prompt consists of messages, and the tokenizer has no template for them
    BAD_ROW = "bad_row"  # the row cannot be read, or lacks a usable prompt or answer
    REWARD_FAILED = "reward_failed"  # too few samples are left, and a reward function caused the first loss
    WORKFLOW_FAILED = "workflow_failed"  # too few samples are left, and the workflow caused the first loss
    FILTERED = "filtered"  # all rewards of the group are equal (algorithm.filter_zero_variance)
    STALE = "stale"  # the version of the oldest token is too old (consume: completion)
    ATTEMPTS = "attempts"  # lease.attempts attempts failed
    WEIGHTS_LOST = "weights_lost"  # the version being evaluated was lost with its store
    OTHER = "other"


class LossReason(StrEnum):
    """Reasons why a sample has no reward and is left out of its group."""

    RAISED = "raised"  # the reward function raised
    ANSWER = "answer"  # the reward function did not return finite numbers
    TIMEOUT = "timeout"  # no answer within reward.timeout_s
    CRASHED = "crashed"  # the reward function's process ended
    MEMORY = "memory"  # the call needs more memory than reward.memory allows
    JUDGE = "judge"  # the judge repeatedly refused this sample but answered for other samples
    WORKFLOW = "workflow"  # the workflow produced no sample
    UNREADABLE = "unreadable"  # its text is too long for the reward model, or its chat template refuses it
    OTHER = "other"


class TaskResult(Record, frozen=True, array_like=True):
    """The result of an attempt at a task in a stage."""

    task_id: str
    fence: int
    outcome: int  # an `Outcome`
    store: str = ""  # name of the store that has the shards (with outcome drop, only text), such as `batch-store/0`
    content_hash: int = 0  # content hash of the shards (section 8)
    samples: int = 0  # number of samples
    tokens: int = 0  # number of tokens in all sequences
    nbytes: int = 0  # size of all shards in bytes
    reason: str = ""  # the reason for an outcome other than done, in one human-readable line
    samples_failed: int = 0  # samples that are left out
    why: str = ""  # with outcome drop, a `DropReason`
    lost: dict[str, int] = {}  # the lost samples among `samples_failed`, counted by `LossReason`


class Refusal(Record, frozen=True, array_like=True):
    """A result that was not accepted, and the reason. Its shards are garbage now."""

    task_id: str
    fence: int
    code: str  # `collected`, `conflict` or `lost`, as in `Error`
    message: str  # one human-readable line


@message(32)
class CompleteAck(Message, frozen=True, kw_only=True):
    """All results but the refused ones are accepted and durable."""

    refused: list[Refusal] = []  # the refused results


@message(33, reply=CompleteAck)
class Complete(Request, frozen=True, kw_only=True):
    """A worker ends a lease or part of it. Sealed shards become visible when their result is accepted, not before.

    Errors:
        bad_request: the stage is unknown, or a scalar or number is invalid. In this case, no result is accepted.
    """

    lease_id: int
    stage: str  # the stage of the work
    incarnation: int
    results: list[TaskResult]  # the results of the tasks that have ended
    scalars: dict[str, Array] = {}
    """Values of the samples by name, each [sum of `samples` over the done results] in the order of `results`: `reward`
    float32, `length` int32, `loss_tokens` int32, `truncated` uint8, `version_min` int32, `sync_error` float32, and
    others. Names with a slash are parts of dict rewards (`reward/part/<name>`) and metrics of workflows
    (`workflow/<name>`): float32, NaN for a sample without the value."""
    final: bool = True  # the lease ends; its tasks without a result are leased again
    untouched: bool = False  # no work was done on those tasks, so this does not count as an attempt


@message(34, reply=Ack)
class ReportShards(Request, frozen=True, kw_only=True):
    """A reader could not read shards of these tasks: they are missing, or their checksums do not match.

    The store checks the shards first. When the scheduler answers, it has given a higher fence to the tasks whose shards
    are lost, or has arranged for their step to be repeated.

    Errors:
        not_ready: the store did not answer.
    """

    store: str  # the store from which they were read, such as `batch-store/0`
    tasks: list[PutTask]  # the tasks with the fences under which they were read
