"""Messages from the driver to trainer workers, and among the workers' ranks."""

from __future__ import annotations

import msgspec

from proto.messages.common import Ack, Array
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The loss as named functions and numbers, which workers apply to every token. An option set to 0 or "" is off."""

    name: str
    """Name of a builtin loss of policies, the import path in the topology from which workers load one, "value", the
    loss of critics, which has no other options than those of the next three fields, or "linear", which has none: the
    loss of a token is its advantage times the negative output of the model. With anchor "given", a loss of clients:
    cross_entropy, importance_sampling, ppo, cispo or dro."""
    clip_low: float
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; with "value", the value to
    [old - clip_low, old + clip_high]; with anchor "given", the ratio to [clip_low, clip_high]."""
    clip_high: float  # as for `clip_low`
    anchor: str
    """"rollout", "proximal" or "present". The last replaces "proximal" in steps with a single update: the log-probs of
    the call itself are the anchor. With "value", "values": the old values are those at the start of the step. "given":
    the loss of a client's model. Its targets, their weights or advantages, and the anchor are shards, and no other
    option than `clip_low`, `clip_high`, `temperature` and `beta` applies."""
    temperature: float  # sampling temperature used in training; logits are divided by it
    tis_cap: float = 0.0  # cap of the truncated importance weight exp(prox - rollout)
    kl_estimator: str = ""  # "k1", "k2" or "k3"
    kl_coef: float = 0.0  # factor of the KL term
    distill_coef: float = 0.0  # factor of the difference to the teacher, by which advantages of tokens are lowered
    distill_top_k: int = 0  # above 0: factor of a term instead: the KL(teacher || policy) over the teacher's top k
    entropy_coef: float = 0.0  # factor of the entropy bonus
    dual_clip: float = 0.0  # bound on the ratio where the advantage is negative (ppo_clip)
    clamp: str = ""  # "upper" or "both": sides on which the ratio is clamped (cispo)
    gate_positive: float = 0.0  # gate temperature where the advantage is positive (sapo)
    gate_negative: float = 0.0  # gate temperature where it is negative (sapo)
    ratio_mask: str = ""  # "token", "sequence" or "geometric": level of the ratio mask
    mask_low: float = 0.0  # smallest exp(prox - rollout) that is trained on
    mask_high: float = 0.0  # largest exp(prox - rollout) that is trained on
    beta: float = 0.0  # factor of the squared log-ratio (dro)
    routes: str = ""  # key of the shards with the experts that each token must use; "": the routers choose
    balance_coef: float = 0.0  # factor of the loss that balances the load of experts


class CreditSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the rewards of a task become the advantages of its tokens, as a named function and numbers."""

    name: str  # name of a builtin estimator, or the import path in the topology from which workers load it
    gamma: float  # discount per trained token
    turn_scale: float = 1.0  # factor for the rewards of turns
    lam: float = 1.0  # weight of later temporal differences in the advantages (gae)
    lam_value: float = 1.0  # the same in the returns (gae)
    values: bool = False  # the estimator also reads the shards `values`, and returns what the critic learns
    bootstrap: bool = False  # what follows a truncated sample is its `value_after`, not 0 (gae)
    kl_estimator: str = ""  # "k1", "k2" or "k3": estimator of the KL in the rewards of tokens; "": no KL
    kl_coef: float = 0.0  # each trained token's reward is lowered by this times its KL
    distill_coef: float = 0.0  # and by this times rollout_logprobs - teacher_logprobs


class AdamW(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one optimizer step."""

    lr: float  # learning rate, 0 or more
    beta1: float  # decay of the mean of the gradients
    beta2: float  # decay of the mean of the squared gradients
    eps: float  # added to the denominator
    weight_decay: float  # decoupled weight decay, multiplied by `lr`
    clip_norm: float  # the gradient is scaled down to this norm if its own is larger; 0: it is not clipped


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a client's model. All adapters of a group of workers lie in slots of one larger rank.

    If the workers train all weights instead, the rank is 0, there are no groups, and a client's model is those weights.
    """

    rank: int  # columns of A and B, from 1 to the rank of the slots, or 0
    alpha: float  # the product B A is multiplied by alpha / rank
    seed: int  # from which A is drawn, with the name of each layer; B begins as zero
    groups: list[str]  # the groups of linear layers that get an adapter: some of "attention", "mlp" and "unembed"


class WorkerRequest(Request, frozen=True, kw_only=True):
    """A call to the trainer's model, sent to one rank, or to the dispatch, which represents all ranks.

    Any call can be answered with these errors:

    Errors:
        bad_data: shards or gradients (of the tasks in `names`) are not finite, or have wrong shapes.
        conflict: another driver has taken over, or `order` has already been used.
        lost: this incarnation of the worker has no driver yet, or an earlier call failed.
    """

    driver: int
    order: int  # number of the call; calls run in the order of their numbers, each once


@message(80)
class WorkerReady(Message, frozen=True, kw_only=True):
    """The worker is at this step."""

    step: int  # number of finished training steps
    parameters: int  # number of parameters of the model


@message(81, reply=WorkerReady)
class InitModel(WorkerRequest, frozen=True, kw_only=True):
    """Load the model directory that the topology names, at step 0 with fresh optimizer state."""


@message(82)
class ForwardDone(Message, frozen=True, kw_only=True):
    """The results are in the stores, under the fences of the tasks."""

    meta: BatchMeta
    """The tasks, with one new entry in `parts`, or none if `Forward.sums` is true. `scalars` holds `value_after` if
    `Forward.ends` is true, and `kl` if `Forward.kl_estimator` is not empty, both float32 [samples]; and if
    `Forward.sums` is true `score` and, of `ref_logprobs`, `reference_score`, float64 [samples]."""
    seconds: float


@message(83, reply=ForwardDone)
class Forward(WorkerRequest, frozen=True, kw_only=True):
    """Run the model over a batch, and put the results into the store on the worker's host as shards.

    The shards have the keys `<key>:<driver in hexadecimal>-<order>`.
    """

    batch: BatchMeta  # the tasks
    keys: list[str]
    """Names of the results. Of a policy `prox_logprobs`, log-probs per token, `prox_routes`, the experts that it
    chooses, and if it has an adapter also `ref_logprobs`, the same with the adapter off; of a critic `values`."""
    temperature: float  # logits are divided by it, as in `LossSpec`
    ends: bool = False
    """Also return the value after the last token of each sample, of which each must be one sequence. For critics."""
    kl_estimator: str = ""
    """Also return the KL to the reference of each sample with this estimator (k1, k2 or k3); empty: do not. It needs
    `ref_logprobs` among `keys`."""
    sums: bool = False
    """Return the sums of the results over the trained tokens of each sample, and put no shards."""
    routes: str = ""
    """Key of the shards with the experts that each token must use; empty: the routers choose. `ref_logprobs` and
    `values` are computed without them."""


@message(104)
class CreditDone(Message, frozen=True, kw_only=True):
    """The advantages of the tokens are in the stores, under the fences of the tasks."""

    meta: BatchMeta  # the tasks, with one new entry in `parts`
    statistics: dict[str, Array]
    """Statistics of the advantages of the trained tokens of each task, float64 [tasks], in the order of `meta.tasks`:
    `count`, `mean`, and `squares`, the sum of the squared deviations from this mean. If `CreditSpec.values` is true,
    also `return_mean` and `return_squares` of the returns, and `error_mean` and `error_squares` of the returns minus
    the values."""
    seconds: float


@message(105, reply=CreditDone)
class Credit(WorkerRequest, frozen=True, kw_only=True):
    """Compute an advantage for each token, and put the advantages into the store on the worker's host as shards.

    The shards have the keys `token_advantages:<driver in hexadecimal>-<order>` and, if `CreditSpec.values` is true,
    `returns:<driver in hexadecimal>-<order>`.
    """

    batch: BatchMeta
    """The tasks; `scalars` holds `shaped`, the shaped reward, float32 [samples]; `loss_tokens`, 0 for a sample that is
    not trained, int [samples]; `truncated`, uint8 [samples]; and, if `CreditSpec.bootstrap` is true, `value_after`,
    float32 [samples]."""
    credit: CreditSpec  # the estimator


@message(84)
class ForwardBackwardDone(Message, frozen=True, kw_only=True):
    """The gradient is accumulated."""

    sums: dict[str, float]  # additive across workers and calls: `loss`, `kl`, `clipped`, `tokens` and others
    seconds: float
    imbalance: float = 1.0  # number of tokens on the fullest rank divided by the mean over all ranks
    meta: BatchMeta | None = None
    """The tasks, with one new entry in `parts`, the log-probs of their targets, as the answer to
    `ForwardBackwardModel`; otherwise nil."""


@message(85, reply=ForwardBackwardDone)
class ForwardBackward(WorkerRequest, frozen=True, kw_only=True):
    """Add the gradient of sum(W * loss) over a batch to the accumulated gradient.

    The W of a token is the weight of its sample times the mask of the token.
    """

    batch: BatchMeta
    """The tasks; `scalars` holds `advantages` and `weights`, float32 [samples]. If it also holds `credit_scale` and
    `credit_shift`, float32 [samples], the advantage of a token is advantages + credit_scale * (token_advantages -
    credit_shift), with the shards that `Credit` has made."""
    loss: LossSpec  # the loss


@message(86)
class OptimStepDone(Message, frozen=True, kw_only=True):
    """The update is done."""

    grad_norm: float  # norm of the gradient before clipping
    lr: float  # learning rate of the update
    seconds: float
    snapshot_s: float = 0.0  # processor time of the snapshot, not included in `seconds`; 0: no snapshot was taken
    step: int = 0  # the step at which a client's model now is


@message(87, reply=OptimStepDone)
class OptimStep(WorkerRequest, frozen=True, kw_only=True):
    """Clip the gradients, take an optimizer step, and zero the gradients.

    Errors:
        bad_request: a number of `optimizer` is negative or not finite, or a beta is not below 1.
    """

    step: int  # the training step of this update
    last: bool  # this is the last update of the step
    optimizer: AdamW  # the numbers of this update
    snapshot_lineage: int = -1
    """If `last` is true: keep a snapshot of the state in shared memory under this lineage. -1: keep none."""


@message(88)
class Published(Message, frozen=True, kw_only=True):
    """The version is in the store."""

    ref: WeightsRef | None = None  # the version, from the rank that put it; nil from other ranks
    seconds: float


@message(89, reply=Published)
class Publish(WorkerRequest, frozen=True, kw_only=True):
    """Put the weights as shards of `weights/<lineage>/<step>` into a store and compute the canary."""

    lineage: int
    step: int  # the policy version
    store: str  # name of the store
    fence: int
    """The first fence to try. If the store has already collected a fence (an earlier incarnation put the version but
    never announced it, or no task needed the version), the next one is tried."""


@message(90)
class Saved(Message, frozen=True, kw_only=True):
    """The files are durable and verified."""

    path: str  # path of the folder
    seconds: float


@message(91, reply=Saved)
class SaveCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Write a checkpoint under the run directory. The caller removes old ones."""

    step: int
    at_stop: bool = False
    """The checkpoint is saved because the run is stopping, outside the regular interval. The checkpoint says so."""


@message(92, reply=WorkerReady)
class LoadCheckpoint(WorkerRequest, frozen=True, kw_only=True):
    """Load a checkpoint, or a snapshot in shared memory. Every other snapshot is discarded.

    Errors:
        conflict: the checkpoint or snapshot is damaged or belongs to another model. Nothing is changed.
        missing: no checkpoint or snapshot of this step exists.
    """

    step: int
    snapshot_lineage: int = -1  # the lineage of the snapshot; -1: load the checkpoint


@message(93, reply=Saved)
class SaveModel(WorkerRequest, frozen=True, kw_only=True):
    """Export the model as a Hugging Face directory, atomically."""

    path: str  # path of the directory


class HeldSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the training state that a rank holds in shared memory."""

    lineage: int  # lineage of the weights
    step: int  # number of finished training steps
    model: int = 0  # number of the client's model; 0: the model that the topology trains


@message(94)
class WorkerState(Message, frozen=True, kw_only=True):
    """The position of a worker."""

    step: int  # number of finished training steps; -1 before a model is loaded
    driver: int  # incarnation of the driver that it serves
    order: int  # number of the last call that it has started
    dirty: bool
    """Gradients are accumulated or a step is incomplete. Only a reload gives the worker a trustworthy state again."""
    snapshots: list[HeldSnapshot] = []  # the snapshots that can be loaded


@message(95, reply=WorkerState)
class GetWorkerState(Request, frozen=True, kw_only=True):
    """A new driver asks for a worker's position and takes the worker over. Calls from older drivers are refused.

    Errors:
        conflict: this driver has been replaced.
    """

    driver: int
    at_least: int = 0
    """Calls get numbers above this value and above the number of the worker's last call, so that all ranks of a group
    agree.
    """
    turn: int = 0
    """`RunInfo.drivers` of this driver. A takeover is refused if an earlier takeover had a higher turn, because it must
    then be a late message from a driver that has died."""


@message(96)
class Moved(Message, frozen=True, kw_only=True):
    """The parts are in the requested location."""

    nbytes: int  # bytes moved on this rank
    seconds: float


@message(97, reply=Moved)
class Move(WorkerRequest, frozen=True, kw_only=True):
    """Move parts off the device or back to it. A later call that needs a part moves it back automatically."""

    parts: list[str]  # some of "parameters", "gradients", "optimizer"
    to: str  # "host" or "device"


@message(98)
class Met(Message, frozen=True, kw_only=True):
    """All ranks have joined the round, or none continues because some rank cannot."""

    generation: int  # generation of the group
    failures: list[str] = []  # the ranks that cannot continue, each with its reason; empty: the round begins
    store: str = ""
    """For round "join" with ranks on several hosts: the address `HOST:PORT` of the process group's store on rank 0."""


@message(99, reply=Met)
class Meet(Request, frozen=True, kw_only=True):
    """A rank tells rank 0 that it is ready for a collective. The answer is deferred until all ranks are ready.

    Round "join" of generation 0 forms the group, and the answer names its generation. The answer to round "end" is
    deferred until the group has ended.

    Errors:
        bad_request: the group has no such rank, or the process that was asked is not rank 0.
        lost: the group has ended.
    """

    generation: int  # generation of the group
    round: str  # name of the collective
    rank: int  # number of the rank that asks
    failure: str = ""  # the reason why the rank cannot continue; may follow an earlier `Meet` of the same round


@message(109, reply=WorkerReady)
class SkipUpdate(WorkerRequest, frozen=True, kw_only=True):
    """Discard the gradient of a refused `OptimStep`, if any; count the update, but change nothing else."""

    step: int  # as in `OptimStep`
    last: bool  # as in `OptimStep`; the worker is then at `step` with unchanged weights
    snapshot_lineage: int = -1  # as in `OptimStep`


class ModelRequest(WorkerRequest, frozen=True, kw_only=True):
    """A call to the model of a server's client. Many such models share the workers.

    The state of the model is brought in before the call. A failed call refuses no call of another model, and of this
    one only as `OptimStepModel` says.

    Errors:
        conflict: also, the model is not open.
    """

    model: int  # number of the model, above 0


@message(123, reply=WorkerReady)
class OpenModel(ModelRequest, frozen=True, kw_only=True):
    """Give a client's model a state without a gradient: a new one, one that was saved, or a snapshot.

    A client's model is at step n after n changes of its weights, which are optimizer steps and loads. After each
    change, every rank keeps a snapshot in shared memory, which outlives the process. A model that was open before is
    replaced. After a takeover (`GetWorkerState`), no model is open, but the snapshots remain.

    Errors:
        bad_request: these workers are in training, or have no slots for this rank or group of layers.
        conflict: what was saved is damaged, or is another model, adapter or base.
        missing: there is no such folder or snapshot.
    """

    adapter: AdapterSpec  # the adapter
    folder: str = ""  # absolute path of what `SaveState` has written; empty: a new model or a snapshot
    with_optimizer: bool = False  # also load the moments in `folder`; otherwise they are zero
    snapshot: bool = False  # continue from the snapshot of `step`
    step: int = -1  # the step at which the model then is; -1: the one after its current step, or 0 if it is not open
    failed: str = ""
    """Why a `ForwardBackwardModel` since the last `OptimStepModel` has failed, as if it had failed now. Empty: none
    has."""


@message(128, reply=ForwardBackwardDone)
class ForwardBackwardModel(ModelRequest, frozen=True, kw_only=True):
    """Add the gradient of the loss, summed over all targets of a batch, to the accumulated gradient of a client's
    model. Put the log-probs of the targets into the store on the worker's host as shards.

    The shards have the keys `target_logprobs:<driver in hexadecimal>-<order>`. If the call fails, the accumulated
    gradient is dropped, unless `forward_only` is true.
    """

    batch: BatchMeta  # the tasks, each of which is one sequence
    loss: LossSpec  # the loss, whose anchor is "given"
    forward_only: bool = False  # run the same pass and compute the same numbers, but no gradient
    repeated: bool = False
    """A call with a known answer is repeated after a loss. Its log-probs are not put, because they would replace those
    that the answer names; `meta` is nil."""


@message(129, reply=OptimStepDone)
class OptimStepModel(ModelRequest, frozen=True, kw_only=True):
    """Clip the gradient of a client's model, take an optimizer step, zero the gradient, and keep a snapshot.

    If a `ForwardBackwardModel` has failed since the last call, or the gradient is not finite, no step is taken, and the
    gradient is zeroed.

    Errors:
        bad_data: no step was taken for one of these reasons.
        bad_request: a number of `optimizer` is negative or not finite, a beta is not below 1, or `eps` is 0. The
            gradient stays.
    """

    optimizer: AdamW  # the numbers of the update


@message(119, reply=Published)
class PublishModel(ModelRequest, frozen=True, kw_only=True):
    """Put a client's model as shards of `weights/<model>/<step>` into a store and compute the canary.

    The tensors of an adapter are those of whole slots, padded with zeros.
    """

    store: str  # name of the store
    fence: int  # as in `Publish`; higher in every life of the server and after every takeover


@message(124, reply=Saved)
class SaveState(ModelRequest, frozen=True, kw_only=True):
    """Save a client's model in a folder, atomically and with checksums: an adapter in the format of the library peft,
    all weights in that of transformers.

    The accumulated gradient is not saved.
    """

    path: str  # absolute path of the folder; a folder that is there is replaced
    with_optimizer: bool  # also save the moments, with which training continues with the same bits


@message(125, reply=Ack)
class CloseModel(ModelRequest, frozen=True, kw_only=True):
    """Forget a client's model and its snapshots. A model that is not open is no error."""


@message(108, reply=Ack)
class ScoreTogether(Request, frozen=True, kw_only=True):
    """The rank of a frozen model that holds the lease asks the ranks with the other parts of the same model to score a
    batch together. These ranks fetch the shards that the model's stage needs, load the version, and meet in round
    `score <number>`. The answer is deferred until they are done. They put no shards.
    """

    generation: int  # generation of the group (`Meet`)
    number: int  # number of the scoring
    batch: BatchMeta  # the tasks
    weights: WeightsRef | None = None  # the version to score with; nil: the model directory
