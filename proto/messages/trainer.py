"""Messages from the driver to trainer workers, and among the workers' ranks."""

from __future__ import annotations

import msgspec

from proto.messages.common import Ack
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The loss as named functions and numbers, which workers apply to every token. An option of 0 or "" is off.

    `name` is a builtin, or the import path in the topology (from which workers take it). `anchor` is "rollout",
    "proximal", or "present": proximal if the call's gradients make the only update of the step. `ratio_mask` is
    "token", "sequence" or "geometric", within [mask_low, mask_high]. `clamp` is "upper" or "both" (cispo).
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
    """A call to the trainer's model, sent to one rank or to a dispatch that represents all ranks.

    `driver` is the caller's incarnation. Calls run in the order of `order`, each once.
    """

    driver: int
    order: int


@message(80)
class WorkerReady(Message, frozen=True, kw_only=True):
    """Answer to `InitModel` and `LoadCheckpoint`: the position of the worker."""

    step: int
    parameters: int


@message(81, reply=WorkerReady)
class InitModel(WorkerRequest, frozen=True, kw_only=True):
    """Load the model directory of the topology, at step 0 with fresh optimizer state."""


@message(82)
class ForwardDone(Message, frozen=True, kw_only=True):
    """Answer to `Forward`: one new part for the batch (put into stores under the tasks' fences), token count."""

    meta: BatchMeta
    seconds: float


@message(83, reply=ForwardDone)
class Forward(WorkerRequest, frozen=True, kw_only=True):
    """Run the model over `batch` at the temperature of training sampling and put the results named by `keys` as shards
    `<key>:<driver in hexadecimal>-<order>`. There is one key so far: `prox_logprobs`, per-token log-probs."""

    batch: BatchMeta
    keys: list[str]


@message(84)
class ForwardBackwardDone(Message, frozen=True, kw_only=True):
    """Answer to `ForwardBackward`. `sums`: additive over workers and calls (`loss`, `kl`, `clipped`, `tokens`, ...)."""

    sums: dict[str, float]
    seconds: float
    imbalance: float = 1.0
    """Tokens of the fullest rank divided by the mean of all ranks."""


@message(85, reply=ForwardBackwardDone)
class ForwardBackward(WorkerRequest, frozen=True, kw_only=True):
    """Add the gradient of sum(W * loss) over `batch` to the accumulated gradient.

    `batch.scalars` holds `advantages` and `weights`, float32 [samples]. W of a token is its sample's weight times the
    token's mask.
    """

    batch: BatchMeta
    loss: LossSpec


@message(86)
class OptimStepDone(Message, frozen=True, kw_only=True):
    """Answer to `OptimStep`. `grad_norm` is the norm before clipping."""

    grad_norm: float
    lr: float
    seconds: float


@message(87, reply=OptimStepDone)
class OptimStep(WorkerRequest, frozen=True, kw_only=True):
    """Clip, step, zero the gradients. `step` is the training step of this update; `last` marks its last update."""

    step: int
    last: bool


@message(88)
class Published(Message, frozen=True, kw_only=True):
    """Answer to `Publish`. The rank that put the weights returns `ref`; other ranks return None."""

    ref: WeightsRef | None = None
    seconds: float


@message(89, reply=Published)
class Publish(WorkerRequest, frozen=True, kw_only=True):
    """Put the weights as shards of `weights/<lineage>/<step>` into `store` and compute the canary.

    `fence` is the first one to try. If the store has collected it (an earlier life put it and never announced it), the
    next one is tried.
    """

    lineage: int
    step: int
    store: str
    fence: int


@message(90)
class Saved(Message, frozen=True, kw_only=True):
    """Answer to `SaveCheckpoint` and `SaveModel`: durable and verified. `kept`: steps of all present checkpoints."""

    path: str
    seconds: float
    kept: list[int] = []


@message(91, reply=Saved)
class SaveCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Write a checkpoint of `step` under the run directory and keep the last `keep_last`."""

    step: int
    keep_last: int
    at_stop: bool = False
    """It is saved because the run stops. It is kept in addition to `keep_last` and removed with the next checkpoint."""


@message(92, reply=WorkerReady)
class LoadCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Load the checkpoint of `step`."""

    step: int


@message(93, reply=Saved)
class SaveModel(WorkerRequest, frozen=True, kw_only=True):
    """Export the model to `path` as a Hugging Face directory (atomically)."""

    path: str


@message(94)
class WorkerState(Message, frozen=True, kw_only=True):
    """Answer to `GetWorkerState`. `step` counts finished training steps; -1 before a model is loaded."""

    step: int
    driver: int
    order: int
    dirty: bool
    """Gradients are accumulated or a step is incomplete. Only a reload makes this state trustworthy."""


@message(95, reply=WorkerState)
class GetWorkerState(Request, frozen=True, kw_only=True):
    """A new driver asks for the position of a worker and takes it over. Calls of older drivers are refused."""

    driver: int
    at_least: int = 0
    """Calls are numbered from above this and above what the worker has done, so that all ranks of a group agree."""


@message(96)
class Moved(Message, frozen=True, kw_only=True):
    """Answer to `Move`: the bytes moved on this rank."""

    nbytes: int
    seconds: float


@message(97, reply=Moved)
class Move(WorkerRequest, frozen=True, kw_only=True):
    """Move `parts` ("parameters", "gradients", "optimizer") off the device (`to` "host") or back to it ("device").

    A later call that needs a part moves it back by itself.
    """

    parts: list[str]
    to: str


@message(98)
class Met(Message, frozen=True, kw_only=True):
    """Answer to `Meet`: all ranks have joined the round, or one of them (`failures`) cannot, and none continues."""

    generation: int
    failures: list[str] = []


@message(99, reply=Met)
class Meet(Request, frozen=True, kw_only=True):
    """A rank tells rank 0 that it is ready for collective `round` of group `generation`. Deferred until all are.

    Round "join" of generation 0 forms the group, and the answer names its generation. Round "end" is deferred until the
    group has ended (error lost). `failure` is the reason why this rank cannot continue. It may follow an earlier `Meet`
    of the same round.
    """

    generation: int
    round: str
    rank: int
    failure: str = ""


@message(109, reply=WorkerReady)
class SkipUpdate(WorkerRequest, frozen=True, kw_only=True):
    """Replaces a refused `OptimStep`: discard the gradient and change nothing, but count the update.

    `step` and `last` are as there. With `last`, the worker is at `step` with unchanged weights.
    """

    step: int
    last: bool


@message(108, reply=Ack)
class ScoreTogether(Request, frozen=True, kw_only=True):
    """The rank of a reference that holds the lease tells the ranks with the other pieces of the same model to score
    `batch` together. They fetch the shards of stage reference, load version `weights` (None: the model directory) and
    meet in round `score <number>` of group `generation`. Answered when they are done. They put nothing.
    """

    generation: int
    number: int
    batch: BatchMeta
    weights: WeightsRef | None = None
