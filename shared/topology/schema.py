"""`Topology` describes a whole run in one frozen object, with the values that were given and those derived from them.

Except for `dump_resolved`, it does not use files, processes or the network. A field's description is its documentation
and is appended to its error messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shared.topology import document
from shared.topology.algorithm import REFERENCED, Advantage, Algorithm, Critic, Loss, Optimizer, Teacher
from shared.topology.data import ChatTemplate, Data
from shared.topology.fields import Count, Dtype, Function, ModelFolder, Seconds, Section, Size, Strings
from shared.topology.lora import Lora
from shared.topology.model_files import read_config, route_bytes, vocabulary
from shared.topology.models import (
    CRITIC,
    DEVICE_SERVICE,
    POLICY,
    REFERENCE,
    REWARD_MODEL,
    REWARD_MODEL_SECTION,
    TEACHER,
    WORKERS,
    FrozenModel,
    Publication,
    TrainedModel,
)
from shared.topology.monitor import Monitor
from shared.topology.passes import Passes
from shared.topology.reward import MOST_TEXT_TOKENS, REWARD_MODEL_FUNCTION, Reward, RewardModel
from shared.topology.serve import Serve, without_training_run
from shared.topology.services import (
    GC,
    Checkpoint,
    LeaseSettings,
    Placed,
    Placement,
    Services,
    Transport,
)

TRAINER_STORE = "batch-store/0"
"""The store on the host of the trainer's rank 0 (see `Topology.store_hosts`), into which weights are put."""


class Run(Section):
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the run's folder: at most 64 letters, digits, dots, dashes and underscores",
    )
    steps: Count = Field(description="training steps, 1 or more")
    evaluate: bool = Field(
        default=False,
        description="only score the model on the evaluation sets, without training (the launcher's --evaluate)",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed for data order and sampling, from 0 to 2^63 - 1")
    deterministic: bool = Field(
        default=False, description="the same seed gives bit-identical results, even after processes are killed"
    )
    spares: bool = Field(
        default=True,
        description="start processes on each host that import the libraries of services; most services are forked from "
        "them, so they start and restart faster and share their memory",
    )
    start_limit_s: Seconds = Field(
        default=600.0,
        description="seconds within which a process must become READY, for example load its model; otherwise it is "
        "killed and started again; must be above 0",
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        default="stop",
        description="a step whose rewards, advantages, log-probs or gradient are not finite, or all of whose tasks are "
        "dropped (run.deterministic): stop the run, or skip the update and continue with unchanged weights",
    )

    @property
    def last_step(self) -> int:
        """The last training step, or 0 if nothing is trained."""
        return 0 if self.evaluate else self.steps


class Policy(Section):
    model: ModelFolder = Field(
        description="folder of the model, or its hub name `owner/name`, with `@revision` for a revision other than main"
    )
    distribute: bool = Field(
        default=False, description="other hosts fetch the files of the model and the data from the trainer's host"
    )
    dtype: Dtype = Field("float32", description="data type of the weights")
    head: Literal["language", "value"] = Field(
        default="language",
        description="output layer: that of a language model, or one number per sequence, as a reward model has (value; "
        "for loss bradley_terry)",
    )
    chat_template: ChatTemplate = Field(default_factory=ChatTemplate, description="how messages become a prompt")
    passes: Passes | None = Field(
        default=None,
        description="forward passes that compute log-probs; default: the fastest that are proved for the model before "
        "the run starts",
    )
    lora: Lora | None = Field(
        default=None, description="train an adapter instead of all weights; default: train all weights"
    )


class Workflow(Section):
    function: Function = Field(description="builtin:<name> or <module>:<function>, a coroutine function")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the function")
    timeout_s: Seconds = Field(
        default=120.0, description="maximum seconds for one sample, including waits for the engine; must be above 0"
    )
    max_tokens: Count = Field(
        default=2048,
        description="maximum tokens in one sample across all its sequences, including prompts and tool output; "
        "once they are used up, the model is not called again",
    )
    memory: Size = Field(
        default=4 * 1024**3,
        description="bytes that the samples in a workflow process may use together in addition to its libraries, "
        "such as 4GiB; a sample that needs more fails; each process that they start has a separate limit of the "
        "same size; shared mappings and /dev/shm are not counted",
    )
    processes: Count = Field(
        default=2, description="processes in each rollout instance that run the workflow, 1 or more"
    )


class Sampling(Section):
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="training temperature; must be above 0, because at 0 all samples in a group are identical",
    )
    max_new_tokens: Count = Field(description="maximum tokens in a completion, 1 or more")
    stop: Strings = Field(default=(), description="texts that end a completion")


@dataclass(frozen=True)
class ServiceSpec:
    """A process `service/instance` of a run, and its host in `placement.hosts` (None: where the run is started)."""

    service: str
    instance: int
    host: str | None = None

    @property
    def name(self) -> str:
        return f"{self.service}/{self.instance}"


class Topology(Section):
    run: Run = Field(description="name and length of the run")
    policy: Policy = Field(description="the trained model")
    data: Data = Field(description="training and evaluation sets")
    reward: Reward = Field(
        description="how samples are scored; may be left out with advantage none and with losses that learn from the "
        "rows' answers (then all rewards are 0)"
    )
    reward_model: RewardModel | None = Field(
        default=None, description="the model whose score is the reward function builtin:reward_model; default: none"
    )
    workflow: Workflow | None = Field(
        default=None, description="how a sample is produced; default: one answer to the prompt"
    )
    sampling: Sampling = Field(description="how training samples are drawn")
    staleness: int = Field(
        default=1, ge=0, description="maximum number of versions between sampling and training, 0 or more"
    )
    consume: Literal["order", "completion"] = Field(
        default="order", description="order in which a step takes its tasks"
    )
    algorithm: Algorithm = Field(description="what a training step computes")
    optimizer: Optimizer = Field(description="how the weights are updated")
    critic: Critic | None = Field(default=None, description="the model that estimates values; default: none")
    teacher: Teacher | None = Field(default=None, description="the model that is distilled; default: none")
    services: Services = Field(default_factory=Services, description="the processes of the run")
    monitor: Monitor = Field(
        default_factory=Monitor, description="what is recorded about the run, and where it is shown"
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="when the state is saved")
    gc: GC = Field(default_factory=GC, description="when trained tasks are collected")
    serve: Serve | None = Field(
        default=None, description="serve clients over HTTP instead of training; default: a training run"
    )
    placement: Placement = Field(default_factory=Placement, description="what starts processes, and where")
    lease: LeaseSettings = Field(default_factory=LeaseSettings, description="how long work may make no progress")
    transport: Transport = Field(default_factory=Transport, description="how hosts communicate")

    @property
    def last_step(self) -> int:
        """The last training step, or 0 if the run itself trains nothing."""
        return 0 if self.serve is not None else self.run.last_step

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward has a KL term, or the loss compares log-probs with the reference's. Otherwise,
        no reference is started."""
        kl = self.algorithm.kl
        compares = self.algorithm.loss.name in REFERENCED and not self.run.evaluate
        return (kl is not None and kl.coef > 0) or compares

    @property
    def reference_by_trainer(self) -> bool:
        """Whether the trainer computes the reference's log-probs: with an adapter, the reference is the base, which the
        trainer holds. `services.reference` starts processes for it instead."""
        return self.needs_reference and self.policy.lora is not None and self.services.reference is None

    @property
    def samples(self) -> bool:
        """Whether engines sample. They do not if the loss learns from the rows' answers and nothing is evaluated: then
        no engine is started, and no weights are published."""
        return bool(self.data.eval) or not self.algorithm.loss.from_rows

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer computes log-probs in a separate pass and puts them into the store.

        A step with a single update gets them from its only pass.
        """
        return self.algorithm.loss.anchor == "proximal" and not self.algorithm.ratio_is_one

    @property
    def route_bytes(self) -> int:
        """Number of bytes that name the experts which the policy uses for a token."""
        return route_bytes(self.policy.model)

    @property
    def schedules_follow_length(self) -> bool:
        """Whether a learning rate of the run depends on `run.steps`."""
        options = [self.optimizer, *([] if self.critic is None else [self.critic.optimizer])]
        return any(one.follows_length for one in options)

    @property
    def trained(self) -> tuple[TrainedModel, ...]:
        """The models that the run trains."""
        rollout, service = self.services.rollout, WORKERS[POLICY]
        publication = Publication(
            route=rollout.weights,
            transfer_s=rollout.transfer_s,
            mapped=rollout.engine == "transformers" and rollout.device == "cpu" and rollout.weights == "shards",
            earlier=self.staleness if self.run.deterministic else 0,
            sampled=self.samples,
        )
        frozen = 0 if self.critic is None else self.critic.warmup_steps
        policy = TrainedModel(
            name=POLICY,
            service=service,
            settings=self.services.policy_trainer,
            folder=Path(self.policy.model),
            dtype=self.policy.dtype,
            passes=self.policy.passes,
            head=self.policy.head,
            lora=self.policy.lora,
            optimizer=self.optimizer.over(self.run.steps - frozen),
            loss=self.algorithm.loss,
            advantage=self.algorithm.advantage,
            mini_batch_tasks=self.algorithm.mini_batch_tasks,
            num_iterations=self.algorithm.num_iterations,
            frozen_steps=frozen,
            publishes=publication,
            seed=self.run.seed,
            deterministic=self.run.deterministic,
            snapshots=self.checkpoint.memory_every is not None,
            shares_devices=service in self.colocated_services,
        )
        critic, settings = self.critic, self.services.critic
        if critic is None or settings is None:
            return (policy,)
        service = WORKERS[CRITIC]
        model, own = Path(critic.model or self.policy.model), critic.dtype or self.policy.dtype
        return (
            policy,
            replace(
                policy,
                name=CRITIC,
                service=service,
                settings=settings,
                folder=model,
                dtype=own,
                passes=critic.passes,
                head="value",
                lora=None,
                optimizer=critic.optimizer.over(self.run.steps),
                loss=Loss(),
                advantage=Advantage(),
                mini_batch_tasks=critic.mini_batch_tasks or policy.mini_batch_tasks,
                num_iterations=critic.num_iterations or policy.num_iterations,
                frozen_steps=0,
                publishes=None,
                shares_devices=service in self.colocated_services,
            ),
        )

    @property
    def policy_model(self) -> TrainedModel:
        """The trained model that samples."""
        return next(model for model in self.trained if model.name == POLICY)

    def model_folders(self) -> dict[str, list[str]]:
        """Return the folders of the models, the policy's first, each with the sections whose models begin with its
        weights."""
        folders: dict[str, list[str]] = {}
        for model in self.trained:
            folders.setdefault(str(model.folder), []).append(model.name)
        others = {TEACHER: self.teacher, REWARD_MODEL_SECTION: self.reward_model}
        for section, other in others.items():
            if other is not None:
                folders.setdefault(other.model, []).append(section)
        return folders

    @property
    def read_tokens(self) -> int:
        """Maximum number of tokens of a text that the reward model reads, or 0 without one."""
        if self.reward_model is None:
            return 0
        positions = read_config(self.reward_model.model).get("max_position_embeddings")
        most = min(MOST_TEXT_TOKENS, positions) if isinstance(positions, int) else MOST_TEXT_TOKENS
        return self.reward_model.max_tokens or most

    @property
    def frozen(self) -> tuple[FrozenModel, ...]:
        """The models of the run that only score."""
        kl, reward_kl, teacher, services = self.algorithm.kl, self.algorithm.reward_kl, self.teacher, self.services
        refreshed = kl is not None and kl.refresh_every is not None
        models: list[FrozenModel] = []
        if REFERENCE in services.frozen:
            reference = replace(
                self._frozen(REFERENCE, POLICY, self.policy),
                temperature=self.sampling.temperature,
                refreshed=refreshed,
                lora=self.policy.lora if refreshed else None,
                reward_kl="" if reward_kl is None else reward_kl.estimator,
                sums=self.algorithm.loss.compares,
            )
            models.append(reference)
        if teacher is not None and services.teacher is not None:
            distilled = replace(
                self._frozen(TEACHER, TEACHER, teacher),
                temperature=teacher.temperature or self.sampling.temperature,
                top_k=self.algorithm.distilled_tokens,
                server=services.teacher.server,
                readable=vocabulary(self.policy.model) or sys.maxsize,
            )
            models.append(distilled)
        if self.reward_model is not None and REWARD_MODEL in services.frozen:
            terms = (term for term in self.reward.terms if term.function == REWARD_MODEL_FUNCTION)
            scorer = replace(
                self._frozen(REWARD_MODEL, REWARD_MODEL_SECTION, self.reward_model),
                head="value",
                weight=sum(term.weight for term in terms),
                apart=self.algorithm.filter_zero_variance is not None,
            )
            models.append(scorer)
        return tuple(models)

    def _frozen(self, name: str, section: str, model: Policy | Teacher | RewardModel) -> FrozenModel:
        """Return what all frozen models have in common, given the section with the model."""
        service = DEVICE_SERVICE[name]
        return FrozenModel(
            name=name,
            service=service,
            settings=self.services.frozen[name],
            section=section,
            folder=Path(model.model),
            dtype=model.dtype or self.policy.dtype,
            passes=model.passes,
            stage=name,
            seed=self.run.seed,
            deterministic=self.run.deterministic,
            shares_devices=service in self.colocated_services,
        )

    @property
    def own_models(self) -> tuple[TrainedModel | FrozenModel, ...]:
        """The models that have a section of their own."""
        return (*self.trained, *(model for model in self.frozen if model.section != POLICY))

    @property
    def ranks(self) -> dict[str, int]:
        """The number of processes that together hold one model, by service."""
        frozen = {model.service: model.settings.parallel.model_ranks for model in self.frozen}
        return {model.service: model.settings.world_size for model in self.trained} | frozen

    @property
    def colocated_services(self) -> frozenset[str]:
        """The services whose processes take turns on the same devices (`placement.colocate`)."""
        return frozenset(DEVICE_SERVICE[name] for name in self.placement.colocate if name in DEVICE_SERVICE)

    @property
    def home(self) -> str | None:
        """The host on which the run is started and the trainer's first ranks run, or None if it has no name."""
        return self.services.policy_trainer.host[0] if self.services.policy_trainer.host else None

    def hosts_of(self, service: Placed, copies: int, ranks: int = 1) -> list[str | None]:
        """Return the host of each process of `service`, which runs `copies` copies of a model on `ranks` ranks each.

        Copies are distributed among the hosts in turn. With more hosts than copies, each copy is divided among an equal
        number of hosts, in blocks of consecutive ranks.
        """
        hosts = service.host or (self.home,)
        spread = min(max(len(hosts) // copies, 1), ranks)
        blocks = [copy * spread + rank * spread // ranks for copy in range(copies) for rank in range(ranks)]
        return [hosts[block % len(hosts)] for block in blocks]

    def store_hosts(self) -> list[str | None]:
        """Return the host of each batch-store. Every host has one store. The trainer's host comes first, because the
        trainer puts its shards into `TRAINER_STORE`, which is store 0."""
        named = {host for service in self.services.placed.values() for host in service.host or ()}
        return [self.home, *sorted({*named, *self.placement.hosts} - {self.home})]

    def services_plan(self) -> list[ServiceSpec]:
        """Return every process of the run, each after the processes that it needs in order to start."""
        rollout, home = self.services.rollout, self.home
        plan = [ServiceSpec("scheduler", 0, home)]
        plan += [ServiceSpec("batch-store", i, host) for i, host in enumerate(self.store_hosts())]
        plan += [ServiceSpec("monitor", 0, home)]
        if self.monitor.samples is not None:
            plan += [ServiceSpec("recorder", 0, home)]
        if self.monitor.web is not None:
            plan += [ServiceSpec("web", 0, home)]
        if self.monitor.exports:
            plan += [ServiceSpec("exporter", 0, home)]
        if self.monitor.trackers:
            plan += [ServiceSpec("tracker", 0, home)]
        for model in self.trained:
            workers = self.hosts_of(model.settings, 1, model.settings.world_size)
            plan += [ServiceSpec(model.service, i, host) for i, host in enumerate(workers)]
        plan += [ServiceSpec("policy-trainer", 0, home)]
        for frozen in self.frozen:
            scorers = self.hosts_of(frozen.settings, max(frozen.settings.dp, 1), frozen.settings.parallel.model_ranks)
            plan += [ServiceSpec(frozen.service, i, host) for i, host in enumerate(scorers)]
        plan += [ServiceSpec("rollout", i, host) for i, host in enumerate(self.hosts_of(rollout, rollout.instances))]
        return plan

    def away_plan(self) -> list[ServiceSpec]:
        """Return the processes on hosts other than the one on which the run is started."""
        return [spec for spec in self.services_plan() if spec.host != self.home]

    def with_passes(self, passes: Mapping[str, Passes]) -> Topology:
        """Return this topology with `passes` for its models, by section."""
        sections: dict[str, Policy | Critic | Teacher | RewardModel | None] = {
            POLICY: self.policy,
            CRITIC: self.critic,
            TEACHER: self.teacher,
            REWARD_MODEL_SECTION: self.reward_model,
        }
        changed = {
            name: section.model_copy(update={"passes": passes[name]})
            for name, section in sections.items()
            if section is not None and name in passes
        }
        return self.model_copy(update=changed)

    def document(self) -> dict[str, Any]:
        """Return the resolved topology as plain data, with the keys that users write and every default."""
        plain: dict[str, Any] = _listed(self.model_dump(by_alias=True))
        return plain if self.serve is None else without_training_run(plain)

    def to_yaml(self) -> str:
        """Return the resolved topology as YAML, from which `load` recreates an equal Topology in any folder."""
        return document.dump(self.document())

    def dump_resolved(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml()` to `path` atomically, so that no reader sees a partial file. Raises OSError."""
        target = os.fspath(path)
        partial = f"{target}.partial"
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(self.to_yaml())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, target)


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
