"""The driver's side of the scheduler: batches, commits, versions, checkpoints, evaluations."""

from __future__ import annotations

from typing import ClassVar

from proto.messages.common import Ack, Array
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


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
    drops: dict[str, int] = {}
    """Tasks of `dropped` by `DropReason`."""
    lost: dict[str, int] = {}
    """Samples by `LossReason` that tasks of this batch, and tasks dropped since the last one, have lost."""


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
    at_stop: bool = False
    """As in `SaveCheckpoint`: recovery may still fall back to as many others as before."""


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
