"""The sections that define which processes run, where, and within which limits, but not what they compute."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shared.topology.fields import Count, LocalPath, Seconds, Section, Size, Strings

Backend = Literal["torch", "megatron"]
WeightsRoute = Literal["shards", "gloo", "nccl", "ipc"]


class Parallel(Section):
    tp: Count = Field(
        default=1, description="tensor-parallel ranks, 1 or more; data-parallel ranks are derived from gpus"
    )
    pp: Count = Field(default=1, description="pipeline-parallel ranks, 1 or more")
    cp: Count = Field(default=1, description="context-parallel ranks, 1 or more")

    @property
    def model_ranks(self) -> int:
        """Number of ranks per copy of the model."""
        return self.tp * self.pp * self.cp


class TrainerParallel(Parallel):
    ep: Count = Field(
        default=1,
        description="expert-parallel ranks, 1 or more: data-parallel ranks that share the experts of a mixture "
        "(backend megatron)",
    )


Recompute = Literal["none", "layers", "selective"]


class Placed(Section):
    host: Strings | None = Field(
        default=None,
        description="a host of placement.hosts, or several: copies of the model are placed on them in turn, and if "
        "there are fewer copies than hosts, the ranks of a copy are divided among several; the trainer's first host is "
        "the one on which the run is started; default: that host",
    )
    gpus: int = Field(default=0, ge=0, description="total GPUs (rollout: per instance); 0: compute on the CPU")
    threads: Count | None = Field(default=None, description="CPU threads of each process; default 1")
    parallel: Parallel = Field(default_factory=Parallel, description="how a copy of the model is split")

    @property
    def world_size(self) -> int:
        """Total number of ranks. On the CPU, they hold exactly one copy of the model."""
        return self.gpus or self.parallel.model_ranks

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which is always derived."""
        return self.world_size // self.parallel.model_ranks

    @property
    def device(self) -> str:
        """Kind of compute device, as torch names it. A process uses the GPUs that it sees."""
        return "cuda" if self.gpus else "cpu"


class ScorerSettings(Placed):
    backend: Backend = Field(default="torch", description="library that runs the model")
    max_tokens_per_micro_batch: Count = Field(
        default=16384, description="tokens in one forward pass; at least as many as in the longest sample"
    )
    collective_s: Seconds = Field(
        default=300.0,
        description="seconds that a rank waits for another before the group is formed again; must be above 0",
    )


class TrainerSettings(ScorerSettings):
    workers: Count | None = Field(
        default=None,
        description="number of ranks on the CPU, one process each; must be a multiple of tp*pp*cp; default: one copy "
        "of the model, or ep ranks",
    )
    parallel: TrainerParallel = Field(default_factory=TrainerParallel, description="how a copy of the model is split")
    recompute: Recompute = Field(
        default="none",
        description="layers: keep only the input of each layer and recompute the layer in the backward pass; selective "
        "(backend torch): also keep the results of linear layers and attention, and recompute the rest",
    )

    @property
    def world_size(self) -> int:
        """Total number of ranks: one per GPU, or, on the CPU, the number in `workers`."""
        return self.gpus or self.workers or self.parallel.model_ranks * self.parallel.ep


class FrozenSettings(ScorerSettings):
    """A frozen model. Every rank is an instance, and the ranks that hold pieces of one copy are consecutive."""


class TeacherServer(Section):
    base_url: str = Field(description="address of a server with OpenAI's completions interface, such as vLLM's")
    model: str | None = Field(default=None, description="the model's name there; default: the server's only model")
    api_key_env: str | None = Field(default=None, description="environment variable with the API key; default: no key")


class TeacherSettings(FrozenSettings):
    backend: Literal["torch", "megatron", "server"] = Field(  # type: ignore[assignment]  # one more than others have
        default="torch", description="library that runs the model, or server"
    )
    server: TeacherServer | None = Field(default=None, description="the server that runs the model (backend server)")


class Rollout(Placed):
    instances: Count = Field(default=1, description="engines, 1 or more")
    engine: Literal["transformers", "vllm", "openai"] = Field(default="transformers", description="inference engine")
    in_flight: Literal["wait", "keep", "recompute"] = Field(
        default="wait",
        description="if newer weights arrive while a block is being sampled: wait for the end of the block; or "
        "continue with the newer weights and either keep the cached keys and values or recompute them",
    )
    partial_s: Seconds | None = Field(
        default=None,
        description="seconds between saves of unfinished samples, which a restarted engine continues; must be above 0; "
        "default 10 for single answers from transformers, and from vllm without stop texts; otherwise, and with null, "
        "unfinished samples start over",
    )
    weights: WeightsRoute = Field(
        default="shards",
        description="how versions reach the engine: as shards in the store; from the trainer over gloo (CPU) or NCCL; "
        "or read from the trainer's memory on the same GPU (ipc)",
    )
    transfer_s: Seconds | None = Field(
        default=None,
        description="maximum seconds for a weight transfer; must be less than lease.lease_s; "
        "default: two thirds of lease.lease_s; with shards there is no limit",
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="arguments handed to the engine")
    block_tasks: Count = Field(
        default=1,
        description="tasks per lease; must divide tasks_per_step; default: enough for 256 samples, for 512 with engine "
        "transformers and no workflow, or the share of a step for vllm in placement.colocate",
    )


class BatchStore(Section):
    memory: Size = Field(default=1024**3, description="bytes of shared memory, such as 64GiB")
    spill: LocalPath | None = Field(
        default=None, description="folder on disk for shards that do not fit; hosts may share it; default: no spill"
    )
    spill_limit: Size | None = Field(
        default=None, description="maximum bytes in the spill folder, such as 500GiB; required with spill"
    )
    directory: LocalPath | None = Field(default=None, description="folder for the shards instead of /dev/shm")


class Services(Section):
    policy_trainer: TrainerSettings = Field(
        default_factory=TrainerSettings, alias="policy-trainer", description="the training service"
    )
    critic: TrainerSettings | None = Field(
        default=None,
        description="the training service of the critic, if there is one; each key that is left out has the value "
        "given for policy-trainer",
    )
    reference: FrozenSettings | None = Field(
        default=None,
        description="the frozen model; started if algorithm.kl.coef is above 0, and for losses dpo and ipo",
    )
    teacher: TeacherSettings | None = Field(
        default=None, description="the model that is distilled; started if there is a section teacher"
    )
    reward_model: FrozenSettings | None = Field(
        default=None,
        alias="reward-model",
        description="the model that scores samples; started if there is a section reward_model",
    )
    rollout: Rollout = Field(default_factory=Rollout, description="the sampling engines")
    batch_store: BatchStore = Field(default_factory=BatchStore, alias="batch-store", description="limits of the store")

    @property
    def trainers(self) -> dict[str, TrainerSettings]:
        """The services of the run that train a model, by key."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"policy-trainer": self.policy_trainer, **critic}

    @property
    def scorers(self) -> dict[str, ScorerSettings]:
        """The services of the run that score given tokens, by key."""
        return {**self.trainers, **self.frozen}

    @property
    def frozen(self) -> dict[str, FrozenSettings]:
        """The services of the run whose models are never trained, by key."""
        settings = {"reference": self.reference, "teacher": self.teacher, "reward-model": self.reward_model}
        return {name: section for name, section in settings.items() if section is not None}

    @property
    def placed(self) -> dict[str, Placed]:
        """The services of the run that compute with the model, by key."""
        return {**self.scorers, "rollout": self.rollout}


class Checkpoint(Section):
    every: Count = Field(default=20, description="steps between checkpoints, 1 or more")
    keep_last: Count = Field(
        default=2, description="number of newest checkpoints to keep, 1 or more; recovery may fall back to these"
    )
    keep_every: Count | None = Field(
        default=None, description="also keep every checkpoint whose step is a multiple of this"
    )
    keep_best: str | None = Field(
        default=None,
        description="also keep the checkpoint with the highest value of this metric of an evaluation set, such as "
        "eval/heldout/accuracy, and export it to export-best; versions that are evaluated on the set are saved, too",
    )
    memory_every: Count | None = Field(
        default=1,
        description="minimum steps between snapshots of the trainer in shared memory, to which it returns if it is "
        "killed; they take at most 1 % of its time; null: none, so it returns to its checkpoint",
    )
    memory: Size = Field(
        default=4 * 1024**3,
        description="maximum bytes of shared memory for the two snapshots of every rank, such as 64GiB; if they need "
        "more, none are kept",
    )


class GC(Section):
    after: Literal["checkpoint", "commit"] = Field(
        default="checkpoint",
        description="a trained task is collected once a checkpoint covers it, or at once (no replay)",
    )


Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
# Part of folder names and of Ray node labels.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class HostSettings(Section):
    gpus: int = Field(default=0, ge=0, description="GPUs of this host, 0 or more")
    address: Address | None = Field(
        default=None, description="address at which other hosts reach this one; default: that of its route to home"
    )


class Placement(Section):
    engine: Literal["local", "ray"] = Field(
        default="local",
        description="what starts the agents of other hosts: a person or a job script (`python -m launch.host`), or Ray",
    )
    hosts: dict[HostName, HostSettings] = Field(
        default_factory=dict,
        description="hosts by name; those that no service names are spares; default: this machine",
    )
    colocate: Strings = Field(
        default=(), description="services that take turns on the same GPUs, or in host memory if they have no GPUs"
    )


class Transport(Section):
    listen: Address | None = Field(
        default=None,
        description="address at which other hosts reach this machine, such as 10.0.0.1; default: this machine only",
    )
    scheduler_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7747, description="TCP port (1 to 65535) of the scheduler, where other hosts join"
    )
    supervisor_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7748, description="TCP port (1 to 65535) of the supervisor, for launch.ctl --access"
    )
    monitor_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7749, description="TCP port (1 to 65535) of the monitor, for launch.monitor --access"
    )
    encrypt_bulk: bool = Field(
        default=True, description="encrypt shards between hosts; control messages are always encrypted"
    )


class LeaseSettings(Section):
    lease_s: Seconds = Field(
        default=30.0, description="seconds without progress after which a lease is lost; must be above 0"
    )
    attempts: Count = Field(default=3, description="leases that a task gets before it is dropped as failed, 1 or more")
