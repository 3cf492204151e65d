"""Messages from the driver to the scheduler: batches, commits, versions, checkpoints and evaluations."""

from __future__ import annotations

from proto.messages.common import Ack, Array
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


@message(40)
class RunInfo(Message, frozen=True, kw_only=True):
    """The position of the run according to the journal."""

    steps: int  # training steps of the run
    committed_step: int  # newest committed step, 0 before the first
    open_step: int  # a step whose batch is journaled but not committed, or 0 if there is none
    lineage: int  # the lineage under which this driver incarnation publishes
    checkpoint_step: int  # step of the newest verified checkpoint, or -1 if there is none
    stopping: bool = False  # the run is complete: nothing is left to do
    checkpoint_now: bool = False
    """As in `StepBatch`, but for the steps trained so far: save a checkpoint once the workers are at the committed
    step."""
    reference_step: int = 0
    """The reference needs the policy version of this step (`algorithm.kl.refresh_every`), but no store holds it:
    publish it again from its checkpoint, unless the workers hold it. 0 means that nothing is missing."""
    drivers: int = 0  # number of drivers that have taken over the run so far, including this one
    waiting_rates: dict[str, float] = {}
    """The learning rate of each committed step, by its number, whose row is not in `metrics.jsonl` yet, because it or
    an earlier row waits for an evaluation. Steps without an update have none."""


@message(41, reply=RunInfo)
class GetRunInfo(Request, frozen=True, kw_only=True):
    """The driver's first call. From then on, older driver incarnations are refused.

    Errors:
        conflict: a newer driver has taken over.
    """

    driver: int
    reload: bool = False
    """The trainer group was (re)loaded from a checkpoint: begin a new lineage."""
    loaded_step: int = -1
    """With `reload`, the step of the loaded checkpoint, or 0 for the initial model (-1: the newest announced
    checkpoint). If the journaled steps after it cannot be replayed, the run returns to it: see the answer's
    `committed_step`."""


@message(42)
class StepBatch(Message, frozen=True, kw_only=True):
    """The tasks of a step, journaled in this order before this answer was sent."""

    step: int
    batch: BatchMeta  # the tasks, and where their shards are
    scalars: dict[str, Array]  # as in `Complete`, in batch order
    reward_mean_unfiltered: float = 0.0  # mean reward, including the samples of filtered tasks
    samples_failed: int = 0  # number of samples that are left out of the groups of the batch
    dropped: int = 0  # number of tasks dropped since the last batch
    checkpoint_now: bool = False
    """Trained tasks fill the stores: save a checkpoint right after this step, or admission will stop."""
    drops: dict[str, int] = {}  # the tasks counted in `dropped`, by `DropReason`
    lost: dict[str, int] = {}
    """Samples lost from the tasks of this batch and from tasks dropped since the last batch, counted by
    `LossReason`."""


@message(43, reply=StepBatch)
class NextBatch(Request, frozen=True, kw_only=True):
    """The driver asks for a step's batch; the answer is sent once the batch is ready. Asking again returns the same
    batch.

    Errors:
        bad_data: too many tasks in a row were dropped, or a `Trouble` ended the run.
        bad_request: the run has no such step, or can no longer be bit-identical to an undisturbed run.
        conflict: a newer driver has taken over, the step is not the next one, or its tasks have been collected.
        missing: a store has lost a weight version. Send `GetRunInfo` and publish that version again.
        not_ready: the batch was not ready before the deadline.
    """

    driver: int
    step: int


@message(44, reply=Ack)
class CommitStep(Request, frozen=True, kw_only=True):
    """The optimizer has taken this step, so the tasks of the step count as trained. Committing again changes nothing.

    Errors:
        conflict: a newer driver has taken over, or the step is not the open one.
    """

    driver: int
    step: int
    metrics: dict[str, float]  # the part of the metrics row that comes from the driver


@message(45, reply=Ack)
class PublishWeights(Request, frozen=True, kw_only=True):
    """A weight version can be loaded from the stores. The scheduler frees it once nothing refers to it.

    Errors:
        bad_request: the name of the weights is wrong, or a number is out of range.
        conflict: a newer driver has taken over, or the lineage or the fence is not the current one.
    """

    driver: int
    ref: WeightsRef  # the version


@message(46, reply=Ack)
class CheckpointSaved(Request, frozen=True, kw_only=True):
    """A checkpoint is complete, verified and durable. It covers the tasks trained up to its step.

    Errors:
        conflict: a newer driver has taken over, or the step is not committed.
    """

    driver: int
    step: int
    kept: list[int]  # steps of all existing checkpoints, including this one
    at_stop: bool = False
    """As in `SaveCheckpoint`. Recovery may still fall back to the same number of earlier checkpoints as without this
    one."""


@message(47)
class EvalsDone(Message, frozen=True, kw_only=True):
    """The evaluations of a version are done."""

    step: int  # the policy version
    accuracy: dict[str, float]  # mean score on each evaluation set
    metrics: dict[str, float] = {}  # the part of the version's metrics row that comes from the evaluations


@message(48, reply=EvalsDone)
class WaitEvals(Request, frozen=True, kw_only=True):
    """The driver waits for the evaluations of a version. The answer is sent once these and all earlier evaluations are
    done.

    Errors:
        bad_data: a `Trouble` ended the run.
        conflict: a newer driver has taken over.
        missing: as for `NextBatch`.
        not_ready: the evaluations were not done before the deadline.
    """

    driver: int
    step: int  # the policy version


@message(49, reply=Ack)
class FinishRun(Request, frozen=True, kw_only=True):
    """The driver has exported the model, so the run is complete.

    Errors:
        conflict: a newer driver has taken over.
    """

    driver: int


@message(126, reply=Ack)
class HoldShards(Request, frozen=True, kw_only=True):
    """Keep the shards of tasks that the scheduler has not created, such as the data of a server's clients: the tasks
    `<split>/<epoch>/<first>` to `<split>/<epoch>/<first + count - 1>`.

    A server sends this before it puts the shards, because stores delete shards that nothing accounts for. The hold is
    journaled. The same hold again changes nothing.

    Errors:
        bad_request: no task id results, or the range overlaps with another one that is held.
        conflict: a newer driver has taken over.
    """

    driver: int
    split: str  # "api" for the data of clients, or "weights" for versions
    epoch: int  # number of the client's model
    first: int  # index of the first task
    count: int  # number of tasks


@message(127, reply=Ack)
class ReleaseShards(Request, frozen=True, kw_only=True):
    """End a hold and delete the shards of its tasks from all stores. Later puts of these tasks are refused.

    A range that is not held is no error, so that a driver may repeat the message.

    Errors:
        bad_request: a part of a range that is held.
        conflict: a newer driver has taken over.
    """

    driver: int
    split: str  # as in `HoldShards`
    epoch: int  # as in `HoldShards`
    first: int  # as in `HoldShards`
    count: int  # as in `HoldShards`
    fence: int = 1  # shards up to this fence are deleted
