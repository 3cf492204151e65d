"""What the driver asks of trainer workers, and what their ranks say to each other."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from proto.messages.common import Ack
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


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
    at_stop: bool = False
    """It is made because the run stops: it counts beside `keep_last`, and goes with the next checkpoint."""


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
