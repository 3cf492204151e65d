"""Checks every key in the section `algorithm`: under many settings, a change to the key is either refused at load time
or has an effect on training.

Training runs the driver's own step and the workers' own loss over a policy that is a table of logits, so a key that has
no effect anywhere along the way is found. A new schema key must be added here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from msgspec import structs

from proto.messages import (
    AdamW,
    BatchMeta,
    BatchPart,
    CreditDone,
    CreditSpec,
    ForwardBackwardDone,
    ForwardDone,
    LossSpec,
    OptimStepDone,
    StepBatch,
    TaskHandle,
)
from proto.tensors import Array
from services.policy_trainer.driver import Driver
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import StepTasks
from services.policy_trainer.worker import credit as credits
from services.policy_trainer.worker.loss import TokenData, check, linear_token_loss, token_loss, value_token_loss
from services.policy_trainer.worker.losses.policy import own_policy_loss
from services.policy_trainer.worker.samples import BatchTokens
from services.scheduler.planning import make_plan
from shared.batch import Batch
from shared.credit import kl_sums
from shared.stages import CREDIT, LINEAR_LOSS, PROXIMAL, REFERENCE_SCORE, ROLLOUT, SCORE, VALUES
from shared.topology import Topology, TopologyError, load
from shared.topology.algorithm import ADVANTAGES, LOSSES, REFERENCED, Algorithm
from shared.topology.fields import Section
from shared.topology.models import CRITIC, POLICY
from tests.keys import SAMPLED
from tests.unit.policy_trainer.training import token_data
from tests.unit.shared.topology.small_topology import make, write

pytestmark = pytest.mark.slow

STORE = "batch-store/0"
LONGEST, VOCABULARY, STEP_SIZE = 8, 5, 40.0
OWN = """
def advantage(given, groups=None, loss_tokens=None, *, shift=0.0):
    if groups is None:  # `given` is a task, and each of its tokens gets an advantage
        made = given.token_rewards ** 3 + shift * given.mask.cumsum()
        return made if given.values is None else (made - given.values, given.token_rewards)
    return given ** 3 - 1.0 + shift * loss_tokens

def loss(cur, anchor, tokens, *, factor=1.0):
    return -factor * tokens.advantages * (cur - 0.5 * anchor)
"""

SUPERVISED, REWARD_MODEL, GAE, NONE = "cross_entropy", "bradley_terry", "gae", "none"
"""Losses and advantages that cannot be selected by one key alone, because the first loss needs a group of one, which
the default advantage refuses, the second one needs a value head, and the advantages need a critic or a teacher."""
CHANGES: dict[str, tuple[str, ...]] = {
    "tasks_per_step": ("8",),
    "group_size": ("3",),
    "mini_batch_tasks": ("1", "2"),
    "num_iterations": ("3",),
    "advantage.name": (*(name for name in ADVANTAGES if name != GAE), "'own_functions:advantage'"),
    "advantage.scale": ("std", "none"),
    "advantage.std_epsilon": ("0.01",),
    "advantage.per": ("token",),
    "advantage.gamma": ("0.5",),
    "advantage.lam": ("0.5",),
    "advantage.lam_value": ("0.25",),
    "advantage.truncated": ("bootstrap",),
    "advantage.whiten": ("mini_batch", "none"),
    "advantage.params": ("{shift: 0.5}",),
    "loss.name": (*(name for name in LOSSES if name not in (SUPERVISED, REWARD_MODEL)), "'own_functions:loss'"),
    "loss.beta": ("0.5",),
    "loss.margin": ("0.25",),
    "loss.clip": ("[0.1, 0.15]", "[1.0, 0.15]"),
    "loss.dual_clip": ("1.25",),
    "loss.clamp": ("upper", "both"),
    "loss.temperatures": ("[2.0, 3.0]",),
    "loss.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"),
    "loss.anchor": ("proximal", "rollout"),
    "loss.tis_cap": ("1.1", "1.5"),
    "loss.ratio_mask.level": ("token", "sequence", "geometric"),
    "loss.ratio_mask.low": ("0.9",),
    "loss.ratio_mask.high": ("1.1",),
    "loss.params": ("{factor: 2.0}",),
    "kl.estimator": ("k1", "k2", "k3"),
    "kl.in": ("loss", "reward"),
    "kl.coef": ("0.3",),
    "kl.refresh_every": ("20",),
    "distill.kl": ("forward",),
    "distill.coef": ("0.3",),
    "distill.top_k": ("1",),
    "filter_zero_variance.max_refill": ("2",),
    "entropy_coef": ("0.1",),
    "overlong": ("mask",),
    "overlong_penalty.tokens": ("3",),
    "overlong_penalty.factor": ("0.5",),
    "normalise_rewards": ("batch",),
}
KL = ("algorithm.kl={coef: 0.1}",)
KL_IN_REWARD = ("algorithm.kl={coef: 0.1, estimator: k1, in: reward}",)
TWICE = ("algorithm.num_iterations=2",)
ON_ROLLOUT = ("algorithm.loss.anchor=rollout",)
DISTILLED = ("teacher={model: ./model}", "algorithm.distill={}")
CRITIC_OF_ONE = ("critic={optimizer: {lr: 1.0e-3}, num_iterations: 2}", "algorithm.advantage.name=gae")
SETTINGS: dict[str, tuple[str, ...]] = {
    "one update": (),
    "one update of gspo": ("algorithm.loss={name: gspo, aggregation: seq_mean_token_mean}",),
    "on the engine's log-probs": ON_ROLLOUT,
    "masked": ("algorithm.loss.ratio_mask={level: token, low: 0.5, high: 2.0}", *TWICE, *KL),
    "masked by sequence": ("algorithm.loss.ratio_mask={level: sequence, low: 0.3, high: 3.0}", *KL_IN_REWARD),
    "shaped": ("algorithm.overlong_penalty={tokens: 4}", "algorithm.kl={coef: 0.1, estimator: k2, in: reward}"),
    "by sequence": (
        "algorithm.loss.aggregation=seq_mean_token_mean",
        "algorithm.overlong=mask",
        "algorithm.num_iterations=4",
    ),
    "normalised": ("algorithm.normalise_rewards=batch", "algorithm.advantage.name=rloo", *ON_ROLLOUT),
    "filtered": ("algorithm.filter_zero_variance={}", "algorithm.advantage.scale=none", *TWICE),
    "refreshed": ("algorithm.kl={coef: 0.1, refresh_every: 40}",),
    **{
        f"advantage {name}": (f"algorithm.advantage.name={name}", *ON_ROLLOUT)
        for name in ADVANTAGES
        if name not in (GAE, NONE)
    },
    "advantage gae": (*CRITIC_OF_ONE, *ON_ROLLOUT),
    "advantage with values of one's own": (
        CRITIC_OF_ONE[0],
        "algorithm.advantage={name: 'own_functions:advantage', per: token}",
    ),
    "per token": ("algorithm.advantage.name=reinforce", "algorithm.mini_batch_tasks=2", *KL_IN_REWARD),
    "per token of one's own": ("algorithm.advantage={name: 'own_functions:advantage', per: token}", *ON_ROLLOUT),
    "advantage of one's own": ("algorithm.advantage.name='own_functions:advantage'", *ON_ROLLOUT),
    **{f"loss {name}": (f"algorithm.loss.name={name}", *TWICE) for name in ("ppo_clip", "cispo", "sapo")},
    "loss cispo on both sides": ("algorithm.loss={name: cispo, clamp: both}", *TWICE),
    "loss gspo": ("algorithm.loss={name: gspo, aggregation: seq_mean_token_mean}", *TWICE),
    "loss importance_sampling": ("algorithm.loss.name=importance_sampling", *TWICE),
    "loss of one's own": ("algorithm.loss.name='own_functions:loss'", *TWICE),
    "distilled": (*DISTILLED, *TWICE),
    "distilled by forward KL": ("teacher={model: ./model}", "algorithm.distill={kl: forward, top_k: 2}"),
    "distilled in the rewards of tokens": (*DISTILLED, "algorithm.advantage.name=reinforce"),
    "distilled without rewards": (*DISTILLED, "algorithm.advantage.name=none"),
    "adapter": ("policy.lora={rank: 4}", *KL),
    "adapter with a KL in the reward": ("policy.lora={rank: 4}", *KL_IN_REWARD, *TWICE),
    **{
        f"pairs by {name}": (f"algorithm.loss.name={name}", "algorithm.group_size=2")
        for name in ("dpo", "ipo", "simpo")
    },
    "supervised": (f"algorithm.loss.name={SUPERVISED}", "algorithm.group_size=1", *KL),
}
TOPOLOGY = """\
run: {name: keys, steps: 60}
policy: {model: ./model}
data: {train: {source: "jsonl:rows.jsonl", max_prompt_tokens: 8}}
reward: {function: "a:b"}
sampling: {max_new_tokens: 8}
algorithm: {tasks_per_step: 4, group_size: 4}
optimizer: {lr: 1.0e-3}
services: {batch-store: {memory: 64MiB}}
"""


def leaves(section: type[Section], above: str = "") -> set[str]:
    """Return the paths of all keys that hold a value rather than a section."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        path = above + (field.alias or name)
        kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        found |= leaves(below[0], f"{path}.") if below else {path}
    return found


class Table:
    """A policy with one row of logits per token, which takes the place of the workers. `optim_step` performs
    gradient descent."""

    def __init__(self, topology: Topology) -> None:
        algorithm = topology.algorithm
        self.own = own_policy_loss(algorithm.loss)
        self.own_credit = credits.own_credit(algorithm.advantage)
        rng = np.random.default_rng(5)
        samples = algorithm.tasks_per_step * algorithm.group_size
        self.lengths = rng.integers(1, LONGEST + 1, size=samples)
        tokens = int(self.lengths.sum())
        self.logits = torch.from_numpy(rng.normal(scale=0.5, size=(tokens, VOCABULARY))).requires_grad_()
        self.shift = torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True)
        """Parameter that all tokens share, so that a ratio can rise where the advantage is negative."""
        self.rollout, self.ref, self.teacher = (
            self.scores()[0].detach() + 0.4 * torch.randn(tokens, generator=_seeded(i)) for i in (1, 2, 3)
        )
        self.first = {f"train/0/{task}": task * algorithm.group_size for task in range(algorithm.tasks_per_step)}
        self.topk = torch.from_numpy(rng.normal(size=(tokens, VOCABULARY))).log_softmax(-1)
        self.prox = torch.zeros(tokens)
        self.token_advantages = torch.zeros(tokens)
        self.sums: list[dict[str, float]] = []
        self.critic = ValueTable(self, torch.from_numpy(rng.normal(scale=0.5, size=tokens)))

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = (self.logits + self.shift).log_softmax(-1)
        return logprobs[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def batch(self, topology: Topology) -> StepBatch:
        algorithm, kl = topology.algorithm, topology.algorithm.kl
        samples = len(self.lengths)
        tasks = [TaskHandle(name, 1, algorithm.group_size, 0, 0, [0]) for name in self.first]
        rewards = np.random.default_rng(6).choice([0.0, 0.25, 1.0], size=samples) + 0.3 * self.lengths
        scalars = {
            "reward": rewards.astype(np.float32),
            "length": self.lengths.astype(np.int32),
            "loss_tokens": self.lengths.astype(np.int32),
            "truncated": (self.lengths == LONGEST).astype(np.uint8),
            "version_min": np.zeros(samples, np.int32),
        }
        if kl is not None and kl.place == "reward" and topology.services.reference is not None:
            scalars |= self.kls(kl.estimator)
        if topology.algorithm.loss.name in REFERENCED:
            scalars[REFERENCE_SCORE] = self.sums_of(self.ref)
        meta = BatchMeta(tasks=tasks, parts=[BatchPart(ROLLOUT.name, list(SAMPLED))], stores=[STORE])
        return StepBatch(step=1, batch=meta, scalars=scalars, reward_mean_unfiltered=0.0)

    def begin_step(self, updates: int, *, snapshot_lineage: int) -> None:
        self.sums.append({"updates": float(updates)})

    async def go_on(self, _: int) -> None:
        """Nothing has been refused."""

    async def skip_update(self) -> None:
        self.sums.append({"skipped": 1.0})

    def kls(self, estimator: str) -> dict[str, Array]:
        """Return the scalar for a KL in the reward, if there is an `estimator`."""
        shards = {
            "rollout_logprobs": self.rollout.numpy(),
            "sample_index": np.arange(len(self.lengths)),
            "lengths": self.lengths,
            "loss_mask": np.ones(len(self.rollout)),
        }
        return {"kl": kl_sums(estimator, shards, self.ref.numpy(), len(self.lengths))} if estimator else {}

    def sums_of(self, logprobs: torch.Tensor) -> Array:
        return np.array([part.sum() for part in np.split(logprobs.numpy(), np.cumsum(self.lengths)[:-1])], np.float64)

    async def forward(
        self, batch: Batch, keys: Sequence[str], _: float, *, kl_estimator: str, sums: bool, routes: str
    ) -> ForwardDone:
        assert not routes  # the models of these tests are dense
        self.prox = self.scores()[0].detach()
        if sums:
            scores = {SCORE: self.sums_of(self.prox)}
            return ForwardDone(meta=BatchMeta(tasks=batch.meta.tasks, scalars=scores), seconds=0.0)
        part = BatchPart(PROXIMAL.name, [f"{key}:1-1" for key in keys])
        meta = BatchMeta(tasks=batch.meta.tasks, parts=[part], stores=[STORE], scalars=self.kls(kl_estimator))
        return ForwardDone(meta=meta, seconds=0.0)

    async def credit(self, batch: Batch, spec: CreditSpec) -> CreditDone:
        of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        samples = len(self.lengths) // len(batch.tasks)
        keys = {
            "lengths": self.lengths,
            "sample_index": np.arange(len(self.lengths)) % samples,
            "loss_mask": np.ones(len(of_token), np.uint8),
            "token_ids": of_token,
            "rollout_logprobs": self.rollout.numpy(),
            "ref_logprobs": self.ref.numpy(),
            "teacher_logprobs": self.teacher.numpy(),
            "versions": np.zeros(len(of_token)),
            "turn_rewards": np.where(of_token % 3 == 0, 0.25, 0.0),
            "values": self.critic.first.numpy(),
        }
        sequences = np.full(len(batch.tasks), samples)
        tokens = BatchTokens(keys, self.lengths.reshape(-1, samples).sum(axis=1), sequences)
        tasks = credits.tasks_of(batch.tasks, tokens, batch.scalars, spec)
        made, statistics = credits.assign(tasks, credits.check(spec, self.own_credit), spec)
        self.token_advantages = torch.from_numpy(np.concatenate([arrays["token_advantages"] for arrays in made]))
        if spec.values:
            self.critic.returns = torch.from_numpy(np.concatenate([arrays["returns"] for arrays in made]))
        meta = BatchMeta(
            tasks=batch.meta.tasks, parts=[BatchPart(CREDIT.name, [f"{key}:1-1" for key in made[0]])], stores=[STORE]
        )
        return CreditDone(meta=meta, statistics=statistics, seconds=0.0)

    def tokens_of(self, batch: Batch) -> tuple[Array, torch.Tensor]:
        """Return the indices of the samples of a batch, and those of their tokens."""
        samples = np.concatenate([self.first[task.task_id] + np.arange(task.samples) for task in batch.tasks])
        inside = np.isin(np.repeat(np.arange(len(self.lengths)), self.lengths), samples)
        return samples, torch.from_numpy(inside).nonzero()[:, 0]

    async def forward_backward(self, batch: Batch, loss: LossSpec) -> ForwardBackwardDone:
        samples, at = self.tokens_of(batch)
        lengths = self.lengths[samples]

        def spread(name: str) -> torch.Tensor:
            return torch.from_numpy(np.repeat(batch.scalars[name].astype(np.float64), lengths))

        advantages = spread("advantages")
        if "credit_scale" in batch.scalars:
            advantages = (self.token_advantages[at] - spread("credit_shift")) * spread("credit_scale")
        data = token_data(
            rollout=self.rollout[at],
            advantages=advantages,
            weights=spread("weights"),
            versions=torch.zeros(len(at)),
            prox=self.prox[at] if loss.anchor == "proximal" else None,
            ref=self.ref[at] if loss.kl_estimator else None,
            teacher=self.teacher[at] if loss.distill_coef and not loss.distill_top_k else None,
            topk=self.topk[at, : loss.distill_top_k] if loss.distill_top_k else None,
            sequences=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            sequence_count=len(lengths),
        )
        cur, entropy = self.scores()
        others = (self.logits + self.shift).log_softmax(-1)[at, : loss.distill_top_k] if loss.distill_top_k else None
        if loss.name == LINEAR_LOSS:
            total, sums = linear_token_loss(cur[at], data)
        else:
            total, sums = token_loss(loss, cur[at], data, entropy[at], check(loss, self.own), others=others)
        total.backward()  # type: ignore[no-untyped-call]
        self.sums.append({name: float(value) for name, value in sums.items()})
        return ForwardBackwardDone(sums=self.sums[-1], seconds=0.0)

    async def optim_step(self, _: AdamW) -> OptimStepDone:
        with torch.no_grad():
            for each in (self.logits, self.shift):
                assert each.grad is not None
                each -= STEP_SIZE * each.grad
                each.grad = None
        return OptimStepDone(grad_norm=0.0, lr=0.0, seconds=0.0)


class ValueTable:
    """A critic with one value per token of the policy `table`, and one that follows every sample."""

    def __init__(self, table: Table, values: torch.Tensor) -> None:
        self.table = table
        self.first = values.clone()
        self.values = values.requires_grad_()
        self.returns = torch.zeros(len(values))
        self.sums: list[Any] = []

    def begin_step(self, updates: int, *, snapshot_lineage: int) -> None:
        self.sums.append({"updates": float(updates)})

    async def forward(self, batch: Batch, keys: list[str], *, ends: bool) -> ForwardDone:
        after = {"value_after": np.full(len(self.table.lengths), 0.75, np.float32)} if ends else {}
        part = BatchPart(VALUES.name, [f"{key}:1-1" for key in keys])
        meta = BatchMeta(tasks=batch.meta.tasks, parts=[part], stores=[STORE], scalars=after)
        return ForwardDone(meta=meta, seconds=0.0)

    async def forward_backward(self, batch: Batch, loss: LossSpec) -> ForwardBackwardDone:
        samples, at = self.table.tokens_of(batch)
        weights = torch.from_numpy(np.repeat(batch.scalars["weights"], self.table.lengths[samples]))
        shards = {"returns": self.returns[at], "values": self.first[at]}
        data = TokenData(shards, torch.zeros(len(at)), weights, torch.zeros(len(at), dtype=torch.long), 1)
        total, sums = value_token_loss(loss, self.values[at], data)
        total.backward()  # type: ignore[no-untyped-call]
        self.sums.append({name: float(value) for name, value in sums.items()})
        return ForwardBackwardDone(sums=self.sums[-1], seconds=0.0)

    async def optim_step(self, numbers: AdamW) -> OptimStepDone:
        self.sums.append(structs.asdict(numbers))
        with torch.no_grad():
            assert self.values.grad is not None
            self.values -= STEP_SIZE * self.values.grad
            self.values.grad = None
        return OptimStepDone(grad_norm=0.0, lr=0.0, seconds=0.0)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trained(topology: Topology, folder: Path) -> list[Any]:
    """Return the values that a step derives from the topology: the scheduler's plan, the sums of each update, and the
    final policy."""
    table: Any = Table(topology)
    nothing: Any = None
    models: Any = {POLICY: table, CRITIC: table.critic}
    driver = Driver(topology, nothing, models, nothing, ResumePoint(0, 0, 0, -1, False), nothing, exports=nothing)
    asyncio.run(driver.step(StepTasks.of(table.batch(topology)), StepMetrics(step=1)))
    plan, _ = make_plan(topology, folder)
    scheduling = (plan.tasks_per_step, plan.group_size, plan.filter_limit, plan.reference_every, plan.stages)
    return [scheduling, table.sums, table.logits.tolist(), table.critic.sums, table.critic.values.tolist()]


def changes(setting: str) -> Iterator[tuple[str, str]]:
    """Yield keys and values to try, but no loss or KL keys under advantage settings and no advantage keys under loss
    settings."""
    skipped = {"advantage": ("loss.", "kl."), "loss": ("advantage.",)}.get(setting.partition(" ")[0], ())
    for key, values in CHANGES.items():
        if not key.startswith(tuple(skipped)):
            yield from ((key, value) for value in values)


def another_name(first: Topology, second: Topology) -> bool:
    """Return whether the two topologies are known to be equivalent."""
    one, other = first.algorithm, second.algorithm
    undivided = all(each.advantage.name == "dr_grpo" or each.advantage.scale == "none" for each in (one, other))
    # At a ratio of 1, every loss has the plain policy gradient.
    gradient = one.ratio_is_one and other.ratio_is_one and one.loss.name != other.loss.name
    return undivided or gradient


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_functions.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make(tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because with tensors of a hundred numbers, several threads would only wait for one
    another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_key_of_the_schema_is_listed() -> None:
    assert leaves(Algorithm) == CHANGES.keys() | OF_EXPERTS


@pytest.mark.usefixtures("one_thread")
def test_every_key_has_an_effect_under_every_setting_or_is_refused(folder: Path) -> None:
    acted: set[str] = set()
    silent: list[str] = []
    for setting, overrides in SETTINGS.items():
        path = write(folder, TOPOLOGY)
        base = load(path, list(overrides))
        expected = trained(base, folder)
        for key, value in changes(setting):
            try:
                changed = load(path, [*overrides, f"algorithm.{key}={value}"])
            except TopologyError:
                continue
            if changed == base:
                continue
            if trained(changed, folder) != expected:
                acted.add(f"{key}={value}")
            elif not another_name(base, changed):
                silent.append(f"{setting}: {key}={value}")
    assert not silent
    assert acted == {f"{key}={value}" for key, values in CHANGES.items() for value in values}


OF_EXPERTS = {"router_replay", "load_balance.coef"}
"""Keys that only a mixture of experts may have. `tests/unit/shared/topology/test_expert_checks.py` tests them."""
CRITIC_CHANGES: dict[str, tuple[str, ...]] = {
    "value_clip": ("0.01", "null"),
    "mini_batch_tasks": ("2",),
    "num_iterations": ("3",),
    "warmup_steps": ("1",),
    "optimizer.lr": ("2.0e-3",),
    "optimizer.betas": ("[0.5, 0.9]",),
    "optimizer.eps": ("1.0e-2",),
    "optimizer.weight_decay": ("0.5",),
    "optimizer.clip_norm": ("0.5",),
    "optimizer.warmup_steps": ("10",),
    "optimizer.schedule": ("linear", "cosine"),
    "optimizer.min_lr": ("5.0e-4",),
    "optimizer.decay_steps": ("7",),
}
"""Other values for the keys of a critic that a training step uses."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("key", CRITIC_CHANGES)
def test_every_key_of_a_critic_has_an_effect(key: str, folder: Path) -> None:
    path = write(folder, TOPOLOGY)
    falling = ["critic.optimizer.schedule=linear"] if key in ("optimizer.min_lr", "optimizer.decay_steps") else []
    base = [*CRITIC_OF_ONE, *falling]
    expected = trained(load(path, base), folder)
    assert expected == trained(load(path, base), folder)
    for value in CRITIC_CHANGES[key]:
        changed = trained(load(path, [*base, f"critic.{key}={value}"]), folder)
        assert changed[3:] != expected[3:] if key != "warmup_steps" else changed[1:3] != expected[1:3]
