"""Messages from the driver to the scheduler: batches, commits, versions, checkpoints, evaluations."""

from __future__ import annotations

from proto.messages.common import Ack, Array
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


@message(40)
class RunInfo(Message, frozen=True, kw_only=True):
    """Answer to `GetRunInfo`: the position of the run according to the journal."""

    steps: int
    committed_step: int
    open_step: int
    """A step whose batch is journaled but not committed, or 0 if there is none."""
    lineage: int
    """The lineage under which this driver incarnation must publish."""
    checkpoint_step: int
    """Newest verified checkpoint, or -1 if there is none."""
    stopping: bool = False
    checkpoint_now: bool = False
    """As in `StepBatch`, for the steps trained so far: save one as soon as the workers are at the committed step."""
    reference_step: int = 0
    """The policy version of this step must be given to the reference (`algorithm.kl.refresh_every`), and no store holds
    it: publish it again from its checkpoint, unless the workers are at it anyway. 0: nothing is missing."""


@message(41, reply=RunInfo)
class GetRunInfo(Request, frozen=True, kw_only=True):
    """The driver's first call. From here on, older driver incarnations are refused."""

    driver: int
    reload: bool = False
    """The trainer group was (re)loaded from a checkpoint: begin a new lineage."""
    loaded_step: int = -1
    """With `reload`, the checkpoint that was loaded, or 0 for the initial model (-1: the newest one announced). If the
    journaled steps after it cannot be replayed, the run returns to it: see the answer's `committed_step`."""


@message(42)
class StepBatch(Message, frozen=True, kw_only=True):
    """Answer to `NextBatch`: the tasks of `step`, journaled in this order before the message was sent.

    `scalars` are as in `Complete`, in batch order. `dropped` counts tasks lost to filtering and staleness since the
    last step.
    """

    step: int
    batch: BatchMeta
    scalars: dict[str, Array]
    reward_mean_unfiltered: float = 0.0
    samples_failed: int = 0
    dropped: int = 0
    checkpoint_now: bool = False
    """Trained tasks fill the stores: save a checkpoint right after this step, or admission will stop."""
    drops: dict[str, int] = {}
    """The tasks in `dropped`, counted by `DropReason`."""
    lost: dict[str, int] = {}
    """Samples lost by tasks of this batch and by tasks dropped since the last one, counted by `LossReason`."""


@message(43, reply=StepBatch)
class NextBatch(Request, frozen=True, kw_only=True):
    """The driver asks for the batch of `step`. Deferred until it is ready. Asking again returns the same batch."""

    driver: int
    step: int


@message(44, reply=Ack)
class CommitStep(Request, frozen=True, kw_only=True):
    """The optimizer has taken step `step`: its tasks are TRAINED. `metrics` is the driver's part of the metrics row."""

    driver: int
    step: int
    metrics: dict[str, float]


@message(45, reply=Ack)
class PublishWeights(Request, frozen=True, kw_only=True):
    """Version `ref.step` can be loaded from the stores. The scheduler frees it once nothing names it."""

    driver: int
    ref: WeightsRef


@message(46, reply=Ack)
class CheckpointSaved(Request, frozen=True, kw_only=True):
    """The checkpoint of `step` is complete, verified and durable. It covers the tasks trained up to that step."""

    driver: int
    step: int
    kept: list[int]
    """Steps of all present checkpoints, including this one."""
    at_stop: bool = False
    """As in `SaveCheckpoint`: recovery may still fall back to as many other checkpoints as before."""


@message(47)
class EvalsDone(Message, frozen=True, kw_only=True):
    """Answer to `WaitEvals`: mean score of that version on each evaluation set."""

    step: int
    accuracy: dict[str, float]


@message(48, reply=EvalsDone)
class WaitEvals(Request, frozen=True, kw_only=True):
    """The driver waits for the evaluations of version `step`. Deferred until they are done."""

    driver: int
    step: int


@message(49, reply=Ack)
class FinishRun(Request, frozen=True, kw_only=True):
    """The driver has exported the model: the run is complete."""

    driver: int
