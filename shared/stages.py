"""The stages of a task, and the keys of the shards that each stage makes.

A key is declared here and nowhere else. The declarations determine the bytes reserved for a task
(`shared.topology.capacity`), what a rollout puts, the checks of shards and the keys that a worker fetches
(`services.policy_trainer.worker.samples`), the tensors that a loss sees (`TokenData.shards`), the columns that the
recorder writes, and the tables of stages and keys in proto/SPEC.md. A new key needs only its declaration, and a new
stage one more: its entry in `GRAPH`.

Shards are ragged and never padded: a task of S sequences has T tokens in total, prompts included. A key of `width` W
above 1 has shards of shape [T, W], not flat ones. Keys that only trained tokens have are [n, W], in the order of the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proto.messages import LossSpec
    from shared.topology.schema import Topology

_ITEM_BYTES = {"float32": 4, "int32": 4, "uint8": 1}

TRAIN = "train"
WEIGHTS = "weights"
"""Split name of weight shards. The task id is `weights/<lineage>/<step>`, with one key per parameter."""

TEXT = "text"
"""Key of the text of the samples of recorded tasks. It does not hold numbers per token, sequence or sample."""
TEXT_TOKEN_BYTES = 16
TEXT_SAMPLE_BYTES = 1024
"""The text of a recorded task may take up this many bytes per token and per sample."""

SCORE, REFERENCE_SCORE = "score", "reference_score"
"""Scalars that losses of pairs compare, float64: the sum of the model's outputs over the trained tokens of a sample, of
the policy and of the reference."""
API = "api"
"""Split name of the data of a server's clients. The task id is `api/<model>/<n>`, one for each datum."""

REFERENCE_SCALAR = "reference_step"
"""Scalar with the policy version of the reference, present with `algorithm.kl.refresh_every`."""


VALUE_LOSS = "value"
"""Name of the loss of a critic (`LossSpec.name`)."""
LINEAR_LOSS = "linear"
"""Name of the loss that is linear in the model's outputs. The driver computes its coefficients (losses of pairs)."""
GIVEN_ANCHOR = "given"
"""Anchor of the losses of clients' models (`LossSpec.anchor`): targets, weights, advantages and anchor are shards."""
GIVEN_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
"""Names of the losses of clients' models."""


class Per(StrEnum):
    """What the first dimension of a key's shards counts, with the letter by which SPEC.md calls its size."""

    TOKEN = "T"  # noqa: S105  # no secret
    SEQUENCE = "S"
    SAMPLE = "samples"
    TRAINED = "n"
    """Trained tokens, whose `loss_mask` is 1."""
    READ = "R"
    """Tokens of the texts that a reward model reads."""
    TARGET = "T K"
    """K targets of each token, one token after the other. Each task has a K of its own, 1 or more."""


@dataclass(frozen=True, slots=True)
class Key:
    """One array of a task. The stage that declares it makes it."""

    name: str
    dtype: str
    per: Per
    meaning: str
    """One sentence for proto/SPEC.md."""
    width: int = 1
    """Numbers of each, or 0 in the declaration of a key whose width the topology decides (`width_of`)."""
    width_of: Callable[[Topology], int] | None = None
    when: Callable[[Topology], bool] = lambda _: True
    """Whether the tasks of a run have this key."""
    in_loss: Callable[[LossSpec], bool] = lambda _: False
    """Whether a loss with this specification reads the key."""
    recorded: bool = False
    """Whether the recorder reads the key."""

    @property
    def row(self) -> tuple[int, ...]:
        """The dimensions of a shard after the first: () or (width,)."""
        return (self.width,) if self.width != 1 else ()

    @property
    def nbytes(self) -> int:
        """Bytes per token, sequence or sample."""
        return _ITEM_BYTES[self.dtype] * self.width


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a task. A task is ready for a stage when all keys that the stage needs have been accepted."""

    name: str
    service: str
    """The service that computes the stage."""
    needs: tuple[str, ...]
    keys: tuple[Key, ...]
    leased: bool = True
    """Whether the service leases tasks for the stage. The trainer does not: it has the tasks of its steps."""
    by_trainer: Callable[[Topology], bool] = lambda _: False
    """Whether the trainer runs a stage that is leased in other runs."""
    refreshed: bool = False
    """Whether `algorithm.kl.refresh_every` applies: the stage's model is then a version of the policy."""
    scalars: frozenset[str] = frozenset()
    """Per-sample scalars that the results of this stage may contain. The rollout stage may add any."""
    rewards: bool = False
    """Whether the stage contributes to rewards. These are the sums over such stages, and exist only after the last."""

    @property
    def makes(self) -> tuple[str, ...]:
        return tuple(key.name for key in self.keys)


def _is_given(loss: LossSpec) -> bool:
    return loss.anchor == GIVEN_ANCHOR


_model_input = partial(Key, in_loss=lambda _: True, recorded=True)
"""A key that every loss and the recorder read."""
_rolled_out = partial(Key, in_loss=lambda loss: not _is_given(loss), recorded=True)
"""A key that every loss of a training run and the recorder read."""
_sampled = partial(Key, in_loss=lambda loss: loss.name != VALUE_LOSS and not _is_given(loss), recorded=True)
"""A key that every loss of a training run's policy and the recorder read."""
_read = partial(Key, when=lambda topology: topology.reward_model is not None)
"""A key that only a reward model needs."""
REWARD = "reward"
"""Scalar with the reward of each sample."""
REWARD_PART = "reward/part/"
"""Prefix of the scalars with the parts of a reward that have names."""
_routes = partial(
    Key,
    dtype="uint8",
    per=Per.TOKEN,
    width=0,
    width_of=lambda topology: topology.route_bytes,
)
"""A key of the experts that a token uses in each layer, as bytes (`shared.model.routing.Routers.packed`)."""
ROUTES, PROX_ROUTES = "routes", "prox_routes"
ROLLOUT = Stage(
    "rollout",
    "rollout",
    needs=(),
    keys=(
        _model_input("token_ids", "int32", Per.TOKEN, "the sequences, one after the other"),
        _model_input("lengths", "int32", Per.SEQUENCE, "the number of tokens of each sequence"),
        _rolled_out("sample_index", "int32", Per.SEQUENCE, "the sample of each sequence, from 0, without failed ones"),
        _rolled_out("loss_mask", "uint8", Per.TOKEN, "1 where the policy sampled the token, also at an end"),
        _sampled("rollout_logprobs", "float32", Per.TOKEN, "the engine's log-prob of a sampled token, else 0"),
        _sampled("versions", "int32", Per.TOKEN, "the policy version that sampled the token, else -1"),
        Key(
            "turn_rewards",
            "float32",
            Per.TOKEN,
            "the reward of a turn, at its last sampled token, else 0",
            when=lambda topology: topology.algorithm.advantage.per_token,
        ),
        _read("read_ids", "int32", Per.READ, "the text of each sample, as tokens of the reward model"),
        _read("read_lengths", "int32", Per.SAMPLE, "the number of tokens of each text"),
        _routes(
            ROUTES,
            meaning="the experts with which the engine computed the token, 0 for the last one of a sequence",
            when=lambda topology: topology.algorithm.route_key == ROUTES,
            in_loss=lambda loss: loss.routes == ROUTES,
        ),
    ),
    rewards=True,
)
_MODEL_NEEDS = ("token_ids", "lengths", "loss_mask")
"""What a model needs to compute the log-probs of sampled tokens."""
REFERENCE = Stage(
    "reference",
    "reference",
    needs=_MODEL_NEEDS,
    keys=(
        Key(
            "ref_logprobs",
            "float32",
            Per.TOKEN,
            "the reference's log-prob from logits / temperature, 0 where `loss_mask` is 0",
            when=lambda topology: topology.needs_reference,
            in_loss=lambda loss: bool(loss.kl_estimator),
        ),
    ),
    by_trainer=lambda topology: topology.reference_by_trainer,
    refreshed=True,
    scalars=frozenset(["kl", REFERENCE_SCORE, REFERENCE_SCALAR]),
)
"""With an adapter and no service `reference`, the trainer runs this stage like `proximal`, with the adapter off.

Scalar `kl` exists only if the KL term is part of the reward. It is summed over the sample's tokens and computed from
`rollout_logprobs`. Scalar `reference_score` exists only for losses of pairs. Scalar `reference_step` exists only if the
reference is refreshed. It is the step of the version that scored the sample, or 0 for the initial model."""
_of_topk = partial(
    Key,
    per=Per.TRAINED,
    width=0,
    width_of=lambda topology: topology.algorithm.distilled_tokens,
    when=lambda topology: topology.teacher is not None and topology.algorithm.distilled_tokens > 0,
    in_loss=lambda loss: loss.distill_top_k > 0,
)
"""A key of `algorithm.distill.top_k` numbers for each trained token."""
TEACHER = Stage(
    "teacher",
    "teacher",
    needs=_MODEL_NEEDS,
    keys=(
        Key(
            "teacher_logprobs",
            "float32",
            Per.TOKEN,
            "the teacher's log-prob from logits / `teacher.temperature`, 0 where `loss_mask` is 0",
            when=lambda topology: topology.teacher is not None and not topology.algorithm.distilled_tokens,
            in_loss=lambda loss: loss.distill_coef > 0 and not loss.distill_top_k,
        ),
        _of_topk("teacher_ids", "int32", meaning="the ids of the teacher's likeliest tokens, the likeliest first"),
        _of_topk("teacher_topk", "float32", meaning="the teacher's log-probs of these ids"),
    ),
)
MODEL_PART = "reward_model"
"""Name of the reward model's score among the parts of a reward."""
REWARD_MODEL_PART = f"{REWARD_PART}{MODEL_PART}"
REWARD_MODEL = Stage(
    "reward-model",
    "reward-model",
    needs=("read_ids", "read_lengths"),
    keys=(_read("read_scores", "float32", Per.SAMPLE, "the reward model's score of each text"),),
    scalars=frozenset([REWARD, REWARD_MODEL_PART]),
    rewards=True,
)
"""Scalar `reward` is the score times its weight, which is added to the reward of the rollout stage."""
PROXIMAL = Stage(
    "proximal",
    "policy-trainer",
    needs=_MODEL_NEEDS,
    keys=(
        Key(
            "prox_logprobs",
            "float32",
            Per.TOKEN,
            "the trainer's log-prob at the start of the step, defined like `ref_logprobs`",
            when=lambda topology: topology.needs_proximal,
            in_loss=lambda loss: loss.anchor == "proximal",
        ),
        _routes(
            PROX_ROUTES,
            meaning="the experts of the token in the trainer at the start of the step, else 0",
            when=lambda topology: topology.algorithm.route_key == PROX_ROUTES,
            in_loss=lambda loss: loss.routes == PROX_ROUTES,
        ),
    ),
    leased=False,
)
"""Stage that the trainer runs itself once a task is BATCHED.

Its shards have the keys `<key>:<call>`. `<call>` is the driver's incarnation (hexadecimal), `-` and the number of its
`Forward`. A replayed step may produce different bits (different weights, a different number of ranks), but a shard
never changes, so each call has its own key. The call is a revision (proto/SPEC.md, names): the store deletes the shards
of the earlier call once those of the later call are sealed. A batch's part for this stage names the keys, including
their `<call>`.
"""
VALUE_AFTER = "value_after"
VALUES = Stage(
    "values",
    "critic",
    needs=_MODEL_NEEDS,
    keys=(
        Key(
            "values",
            "float32",
            Per.TOKEN,
            "the critic's value before the token, at the start of the step, 0 where `loss_mask` is 0",
            when=lambda topology: topology.critic is not None,
            in_loss=lambda loss: loss.name == VALUE_LOSS,
        ),
    ),
    leased=False,
    scalars=frozenset([VALUE_AFTER]),
)
"""Stage that the critic runs once a task is BATCHED. Its shards have a revision, like those of `proximal`.

Scalar `value_after` exists only if `Forward.ends` asks for it: the value after the last token of the sample."""
CREDIT = Stage(
    "credit",
    "policy-trainer",
    needs=("turn_rewards", "token_ids", "lengths", "sample_index", "loss_mask", "rollout_logprobs", "versions"),
    keys=(
        Key(
            "token_advantages",
            "float32",
            Per.TOKEN,
            "the advantage of a trained token before it is whitened, else 0",
            when=lambda topology: topology.algorithm.advantage.per_token,
            in_loss=lambda loss: _is_given(loss) and loss.name != "cross_entropy",
        ),
        Key(
            "returns",
            "float32",
            Per.TOKEN,
            "what the critic learns as the value of the state before a trained token, else 0",
            when=lambda topology: topology.critic is not None,
            in_loss=lambda loss: loss.name == VALUE_LOSS,
        ),
    ),
    leased=False,
)
"""Stage that the trainer runs itself once a task is BATCHED. Its shards have a revision, like those of `proximal`."""
RECORD = Stage(
    "record",
    "policy-trainer",
    needs=(),
    keys=(
        Key("sample_advantages", "float32", Per.SAMPLE, "the advantage of each sample", recorded=True),
        Key(
            "train_logprobs",
            "float32",
            Per.TOKEN,
            "the trainer's log-prob before its first update on the task, 0 where `loss_mask` is 0",
            recorded=True,
        ),
        Key(
            "train_advantages",
            "float32",
            Per.TOKEN,
            "the advantage with which the token is trained, 0 where it is not",
            when=lambda topology: topology.algorithm.advantage.per_token,
            recorded=True,
        ),
    ),
    leased=False,
)
"""What the trainer puts for the recorder, and only for the tasks whose samples are recorded."""
SAMPLE_ADVANTAGES, TRAIN_LOGPROBS, TRAIN_ADVANTAGES = RECORD.makes

GIVEN = Stage(
    "given",
    "policy-trainer",
    needs=(),
    keys=(
        Key("target_tokens", "int32", Per.TARGET, "what the token is to predict", in_loss=_is_given),
        Key(
            "token_weights",
            "float32",
            Per.TARGET,
            "the weight of the target's log-prob",
            in_loss=lambda loss: _is_given(loss) and loss.name == "cross_entropy",
        ),
        Key(
            "anchor_logprobs",
            "float32",
            Per.TARGET,
            "the log-prob with which the target was sampled",
            in_loss=lambda loss: _is_given(loss) and loss.name != "cross_entropy",
        ),
        Key("target_logprobs", "float32", Per.TARGET, "the trainer's log-prob of the target"),
    ),
    leased=False,
)
"""What a server puts for its clients, with `token_ids`, `lengths` and `token_advantages`: a task `api/<model>/<n>` is
one sequence. The workers add `target_logprobs`, with a revision like those of `proximal`. A loss other than
cross_entropy has one target per token."""
GIVEN_LOGPROBS = GIVEN.makes[-1]

GRAPH: tuple[Stage, ...] = (ROLLOUT, REFERENCE, TEACHER, REWARD_MODEL, VALUES, PROXIMAL, CREDIT)
"""The stages of a training task in topological order, with all keys that any topology has."""


def text_limit_bytes(tokens: int, samples: int) -> int:
    """Return the maximum bytes of the text of a task with `tokens` tokens (including prompts) and `samples` samples."""
    return TEXT_TOKEN_BYTES * tokens + TEXT_SAMPLE_BYTES * samples


def stage_named(name: str) -> Stage:
    """Return the stage of a training task with this name."""
    return next(stage for stage in GRAPH if stage.name == name)


def declared() -> dict[str, Key]:
    """Return every key by its name."""
    return {key.name: key for stage in (*GRAPH, RECORD, GIVEN) for key in stage.keys}


def loss_keys(spec: LossSpec) -> list[Key]:
    """Return the keys of the shards from which the loss of `spec` is computed."""
    return [key for key in declared().values() if key.in_loss(spec)]


def with_keys_of(stage: Stage, topology: Topology) -> Stage:
    """Return `stage` as the tasks of `topology` pass it: with the keys that they have, and leased or not."""
    keys = tuple(
        key if key.width_of is None else replace(key, width=key.width_of(topology))
        for key in stage.keys
        if key.when(topology)
    )
    return replace(stage, keys=keys, leased=stage.leased and not stage.by_trainer(topology))


def task_stages(topology: Topology) -> tuple[Stage, ...]:
    """Return the stages of a training task of `topology`, each with the keys that its tasks have."""
    stages = (with_keys_of(stage, topology) for stage in GRAPH)
    return tuple(stage for stage in stages if stage.keys)


def train_graph(topology: Topology) -> tuple[Stage, ...]:
    """Return the stages that a training task passes before it is READY."""
    return tuple(stage for stage in task_stages(topology) if stage.leased)
