"""Tests that `--set KEY=null` removes the value of every key that may be null."""

from __future__ import annotations

import shutil
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from shared.topology import Topology, load
from shared.topology.fields import Section
from shared.topology.load import value_at
from tests.unit.shared.topology.small_topology import BASE, write
from tests.unit.shared.topology.test_lora import adapter

VLLM = "services.rollout.engine=vllm"
HOSTS = ("placement.hosts={a: {}, b: {}}", "transport.listen=10.0.0.1")
TWICE = "algorithm.num_iterations=2"
KL = "algorithm.kl={coef: 0.1, refresh_every: 5}"
SPILL = "services.batch-store={memory: 8MiB, spill: ./spill, spill_limit: 1GiB}"
PASSES = "policy.passes={sequences: packed, head: blocks, decoder: modules}"
SOURCES = (
    "data.train={max_prompt_tokens: 32, sources: {held: {source: 'builtin:addition', system: s, max_prompt_tokens: 9}}}"
)
CRITIC = ("critic={optimizer: {lr: 1.0e-3}}", "algorithm.advantage={name: gae}")
PAIRS = ("algorithm={tasks_per_step: 6, loss: {name: simpo}}", "services.rollout.partial_s=null")
TEACHER = ("teacher={model: ./other}", "algorithm.distill={}")
REWARD_MODEL = ("reward={function: builtin:reward_model, model: ./other}",)
SERVED = (
    "teacher={}",
    "algorithm.distill={}",
    "services.teacher={backend: server, server: {base_url: 'http://t', model: m, api_key_env: KEY}}",
)
WEB = "monitor.web={token: ./token, operator_token: ./other}"

RUN_OFF = tuple(f"{name}=null" for name in ("data", "reward", "sampling", "algorithm", "optimizer", "run.steps"))
SERVE = (*RUN_OFF, "serve={models: {a: policy}, keys: ./keys}")
RUN_ON = (
    "data={train: {source: 'builtin:addition', max_prompt_tokens: 32}}",
    "reward={function: 'builtin:exact_match'}",
    "sampling={max_new_tokens: 8}",
    "algorithm={tasks_per_step: 6, group_size: 4, loss: {aggregation: token_mean}}",
    "optimizer={lr: 1.0e-3}",
    "run.steps=3",
)
GIVEN: dict[str, tuple[str, ...]] = {
    "serve": SERVE,
    "serve.keys": SERVE,
    "policy.passes": (PASSES,),
    "policy.lora": ("policy.lora={rank: 8}",),
    "policy.lora.adapter_path": ("policy.lora={rank: 8, adapter_path: ./adapter}",),
    "data.train.source": (),
    "data.train.sources.*.system": (SOURCES,),
    "data.train.sources.*.max_prompt_tokens": (SOURCES,),
    "data.train.max_prompt_tokens": (),
    "data.eval.*.max_new_tokens": ("data.eval.held.max_new_tokens=5",),
    "data.eval.*.rows": ("data.eval.held.rows=2",),
    "reward.function": (),
    "workflow": ("workflow={function: 'builtin:calculator'}", "services.rollout.partial_s=null"),
    "algorithm.advantage.scale": ("algorithm.advantage.scale=none",),
    "algorithm.advantage.std_epsilon": ("algorithm.advantage.std_epsilon=0.1",),
    "algorithm.advantage.per": ("algorithm.advantage={name: 'a:b', per: token}",),
    "algorithm.advantage.gamma": ("algorithm.advantage={name: reinforce, gamma: 0.5}",),
    "algorithm.advantage.lam": (*CRITIC, "algorithm.advantage.lam=0.5"),
    "algorithm.advantage.lam_value": (*CRITIC, "algorithm.advantage.lam_value=0.5"),
    "algorithm.advantage.truncated": (*CRITIC, "algorithm.advantage.truncated=bootstrap"),
    "algorithm.advantage.whiten": ("algorithm.advantage={name: reinforce, whiten: none}",),
    "algorithm.loss.beta": (*PAIRS, "algorithm.loss.beta=0.5"),
    "algorithm.loss.margin": (*PAIRS, "algorithm.loss.margin=0.25"),
    "algorithm.loss.clip": (TWICE, "algorithm.loss.clip=[0.1, 0.1]"),
    "algorithm.loss.dual_clip": (TWICE, "algorithm.loss.dual_clip=3.0"),
    "algorithm.loss.clamp": (TWICE, "algorithm.loss.name=cispo", "algorithm.loss.clamp=both"),
    "algorithm.loss.temperatures": (TWICE, "algorithm.loss.name=sapo", "algorithm.loss.temperatures=[2.0, 3.0]"),
    "algorithm.loss.tis_cap": ("algorithm.loss.tis_cap=1.5",),
    "algorithm.loss.ratio_mask": ("algorithm.loss.ratio_mask={low: 0.4}",),
    "algorithm.kl": (),
    "algorithm.kl.refresh_every": (KL, "checkpoint.every=5", "run.steps=20"),
    "algorithm.distill": TEACHER,
    "algorithm.distill.top_k": (TEACHER[0], "algorithm.distill={kl: forward, top_k: 3}"),
    "algorithm.filter_zero_variance": ("algorithm.filter_zero_variance={}",),
    "algorithm.overlong_penalty": ("algorithm.overlong_penalty={tokens: 4}",),
    "optimizer.decay_steps": ("optimizer={lr: 1.0e-3, schedule: linear, decay_steps: 9}",),
    "critic.optimizer.decay_steps": (
        "critic={optimizer: {lr: 1.0e-3, schedule: linear, decay_steps: 9}}",
        CRITIC[1],
    ),
    "critic": CRITIC,
    "critic.model": (*CRITIC, "critic.model=./other"),
    "critic.dtype": (*CRITIC, "critic.dtype=float32"),
    "critic.passes": (*CRITIC, "critic.passes={}"),
    "critic.value_clip": CRITIC,
    "critic.mini_batch_tasks": (*CRITIC, "critic.mini_batch_tasks=3"),
    "critic.num_iterations": (*CRITIC, "critic.num_iterations=2"),
    "teacher": TEACHER,
    "teacher.dtype": (*TEACHER, "teacher.dtype=float32"),
    "teacher.passes": (*TEACHER, "teacher.passes={}"),
    "teacher.temperature": (*TEACHER, "teacher.temperature=2.0"),
    "reward.model": REWARD_MODEL,
    "reward_model": REWARD_MODEL,
    "reward_model.dtype": (*REWARD_MODEL, "reward_model.dtype=float32"),
    "reward_model.passes": (*REWARD_MODEL, "reward_model.passes={}"),
    "reward_model.max_tokens": (*REWARD_MODEL, "reward_model.max_tokens=9"),
    "services.reward-model": REWARD_MODEL,
    "services.reward-model.host": (
        *REWARD_MODEL,
        *HOSTS,
        "services.policy-trainer.host=a",
        "services.reward-model.host=b",
    ),
    "services.reward-model.threads": (*REWARD_MODEL, "services.reward-model.threads=2"),
    "services.teacher": TEACHER,
    "services.teacher.server": SERVED,
    "services.teacher.server.model": SERVED,
    "services.teacher.server.api_key_env": SERVED,
    "services.teacher.host": (*TEACHER, *HOSTS, "services.policy-trainer.host=a", "services.teacher.host=b"),
    "services.teacher.threads": (*TEACHER, "services.teacher.threads=2"),
    "services.critic": CRITIC,
    "services.critic.host": (*CRITIC, *HOSTS, "services.policy-trainer.host=a", "services.critic.host=a"),
    "services.critic.threads": (*CRITIC, "services.critic.threads=2"),
    "services.critic.workers": (*CRITIC, "services.critic.workers=2"),
    "services.policy-trainer.host": (*HOSTS, "services.policy-trainer.host=a"),
    "services.policy-trainer.threads": ("services.policy-trainer.threads=2",),
    "services.policy-trainer.workers": ("services.policy-trainer.workers=2",),
    "services.reference": (),
    "services.reference.host": (*HOSTS, "services.policy-trainer.host=a", "services.reference.host=b"),
    "services.reference.threads": ("services.reference.threads=2",),
    "services.rollout.host": (*HOSTS, "services.policy-trainer.host=a", "services.rollout.host=b"),
    "services.rollout.threads": ("services.rollout.threads=2",),
    "services.rollout.partial_s": ("services.rollout.partial_s=3.0",),
    "services.rollout.transfer_s": ("services.rollout.weights=gloo", "services.rollout.transfer_s=3.0"),
    "services.batch-store.spill": (SPILL,),
    "services.batch-store.spill_limit": (SPILL,),
    "services.batch-store.directory": ("services.batch-store.directory=./shards",),
    "monitor.samples": (),
    "monitor.wandb": ("monitor.wandb={project: p}",),
    "monitor.wandb.entity": ("monitor.wandb={project: p, entity: e}",),
    "monitor.tensorboard": ("monitor.tensorboard={}",),
    "monitor.tensorboard.directory": ("monitor.tensorboard={directory: ./t}",),
    "monitor.mlflow": ("monitor.mlflow={uri: 'http://m'}",),
    "monitor.trackio": ("monitor.trackio={project: p}",),
    "monitor.trackio.url": ("monitor.trackio={project: p, url: 'http://t'}",),
    "monitor.web": (WEB,),
    "monitor.web.token": (WEB,),
    "monitor.web.operator_token": (WEB,),
    "monitor.prometheus": ("monitor.prometheus={token: ./token}",),
    "monitor.prometheus.token": ("monitor.prometheus={token: ./token}",),
    "monitor.traces": ("monitor.traces={otlp: 'http://o'}",),
    "monitor.traces.otlp": ("monitor.traces={otlp: 'http://o'}",),
    "checkpoint.keep_every": ("checkpoint.keep_every=20",),
    "checkpoint.keep_best": ("checkpoint.keep_best=eval/held/accuracy",),
    "checkpoint.memory_every": (),
    "placement.hosts.*.address": (
        "placement.hosts={held: {address: 10.0.0.2}}",
        "transport.listen=10.0.0.1",
    ),
    "transport.listen": ("transport.listen=10.0.0.1",),
}
"""For each key that may be null, what gives it a value in BASE."""
BESIDE: dict[str, tuple[str, ...]] = {
    "serve": RUN_ON,
    "data.train.source": ("data.train.sources={a: {source: 'builtin:addition'}}",),
    "reward.function": ("reward.functions=[{function: 'builtin:numeric'}]",),
    "algorithm.advantage.per": ("algorithm.advantage.whiten=null",),
    "algorithm.loss.clamp": ("algorithm.loss.clip=null",),
    "algorithm.kl": ("services.reference=null",),
    "algorithm.distill": ("teacher=null", "services.teacher=null"),
    "services.teacher.server": ("services.teacher.backend=torch",),
    "teacher": ("algorithm.distill=null", "services.teacher=null"),
    "reward_model": ("reward={function: builtin:exact_match}", "services.reward-model=null"),
    "critic": ("services.critic=null", "algorithm.advantage={name: reinforce}"),
    "services.critic.host": ("services.policy-trainer.host=null", "placement.hosts={}"),
    "services.policy-trainer.host": ("placement.hosts={}",),
    "services.batch-store.spill": ("services.batch-store.spill_limit=null",),
    "services.batch-store.spill_limit": ("services.batch-store.spill=null",),
}
"""Other keys that must change with a key, because they have no effect, or none alone, without it."""
REFILLED = frozenset(
    {
        "algorithm.advantage.scale",
        "algorithm.advantage.std_epsilon",
        "algorithm.advantage.gamma",
        "algorithm.advantage.lam",
        "algorithm.advantage.lam_value",
        "algorithm.advantage.truncated",
        "algorithm.advantage.whiten",
        "algorithm.loss.beta",
        "algorithm.loss.margin",
        "algorithm.loss.clip",
        "algorithm.loss.clamp",
        "algorithm.loss.temperatures",
        "algorithm.loss.tis_cap",
        "critic.model",
        "critic.dtype",
        "critic.mini_batch_tasks",
        "critic.num_iterations",
        "teacher.dtype",
        "teacher.temperature",
        "algorithm.distill.top_k",
        "services.critic",
        "services.reference",
        "services.teacher",
        "services.reward-model",
        "services.rollout.transfer_s",
    }
)
"""Keys whose default under these topologies is another value, which null restores."""


def nullable(section: type[Section] = Topology, above: str = "") -> Iterator[str]:
    """Yield every key that may be null; `*` is any name."""
    hints = typing.get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        key = f"{above}{field.alias or name}"
        hint = hints[name]
        if type(None) in typing.get_args(hint):
            yield key
        below, several = nested(hint)
        if below is not None:
            yield from nullable(below, f"{key}.*." if several else f"{key}.")


def nested(hint: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that a field of this type holds, and whether it holds several by name or number."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint, False
    if origin in (dict, tuple):
        return nested(inside[1 if origin is dict else 0])[0], True
    if origin is Annotated or origin in (typing.Union, types.UnionType):
        return next((each for each in map(nested, inside) if each[0] is not None), (None, False))
    return None, False


def test_every_key_that_may_be_null_is_listed() -> None:
    assert sorted(GIVEN) == sorted(nullable())


@pytest.mark.parametrize("key", GIVEN)
def test_null_removes_the_value_that_a_resolved_topology_gives(key: str, folder: Path) -> None:
    path = write(folder, BASE.replace("memory: 1MiB", "memory: 16MiB"))
    shutil.copytree(folder / "model", folder / "other")
    adapter(folder, r=8)
    given = load(path, GIVEN[key])
    place = (*key.replace("*", "held").split("."),)
    assert value_at(given.document(), place) is not None
    given.dump_resolved(path)
    after = load(path, [*BESIDE.get(key, ()), f"{'.'.join(place)}=null"])
    value = value_at(after.document(), place)
    if key in REFILLED:
        assert value is not None
        assert value != value_at(given.document(), place) or key in (
            "services.critic",
            "services.reference",
            "services.teacher",
            "services.reward-model",
        )
    else:
        assert value is None
