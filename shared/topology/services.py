"""The sections that define which processes run, where, and within which limits, but not what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.topology.fields import Count, LocalPath, Seconds, Section, Size, Strings

ServiceName = Literal["policy-trainer", "reference", "rollout", "batch-store", "monitor", "scheduler"]
Backend = Literal["torch", "megatron"]
WeightsRoute = Literal["shards", "gloo", "nccl", "ipc"]
DEVICE_SERVICE: Mapping[str, str] = MappingProxyType(
    {"policy-trainer": "policy-trainer-worker", "reference": "reference", "rollout": "rollout"}
)
"""Services that can be colocated, each with the service whose processes hold its devices."""


class Parallel(Section):
    tp: Count = Field(
        default=1, description="tensor-parallel ranks, 1 or more; data-parallel ranks are derived from gpus"
    )
    pp: Count = Field(default=1, description="pipeline-parallel ranks, 1 or more")
    cp: Count = Field(default=1, description="context-parallel ranks, 1 or more")

    @property
    def model_ranks(self) -> int:
        """Ranks of one copy of the model."""
        return self.tp * self.pp * self.cp


class Placed(Section):
    host: str | None = Field(default=None, description="a host of placement.hosts; left out: this machine")
    gpus: int = Field(default=0, ge=0, description="GPUs in all, for rollout of each instance; 0: it computes on CPU")
    threads: Count | None = Field(
        default=None, description="CPU threads of each process; left out: the launcher's share"
    )
    parallel: Parallel = Field(default_factory=Parallel, description="how a copy of the model is split")

    @property
    def world_size(self) -> int:
        """Number of all ranks; on CPU exactly one copy of the model."""
        return self.gpus or self.parallel.model_ranks

    @property
    def dp(self) -> int:
        """Data-parallel ranks, which are always derived."""
        return self.world_size // self.parallel.model_ranks

    @property
    def device(self) -> str:
        """Kind of the compute device, as torch names it. A process uses those GPUs that it sees."""
        return "cuda" if self.gpus else "cpu"


class Scorer(Placed):
    backend: Backend = Field(default="torch", description="library that runs the model")
    max_tokens_per_micro_batch: Count = Field(
        default=16384, description="tokens of one forward pass; at least the longest sample"
    )
    collective_s: Seconds = Field(
        default=300.0, description="seconds that one rank waits for another before the group is formed anew, above 0"
    )


class PolicyTrainer(Scorer):
    workers: Count | None = Field(
        default=None,
        description="ranks on CPU, a process each, a multiple of tp*pp*cp; left out: one copy of the model",
    )
    recompute: Literal["none", "layers"] = Field(
        default="none", description="layers: keep only each layer's input for the backward pass and run it again there"
    )

    @property
    def world_size(self) -> int:
        """Number of all ranks: one per GPU, or on CPU the number in `workers`."""
        return self.gpus or self.workers or self.parallel.model_ranks


class Reference(Scorer):
    """The frozen model. Every rank is an instance, and the ranks that hold pieces of one copy are consecutive."""


class Rollout(Placed):
    instances: Count = Field(default=1, description="engines, 1 or more")
    engine: Literal["transformers", "vllm", "openai"] = Field(default="transformers", description="inference engine")
    in_flight: Literal["wait", "keep", "recompute"] = Field(
        default="wait",
        description="newer weights while a block is sampled: wait for its end; keep its tokens and cached keys and "
        "values and go on with them; or keep its tokens and recompute what was cached",
    )
    partial_s: Seconds | None = Field(
        default=None,
        description="seconds between notes of unfinished samples, which a restarted engine goes on with, above 0; "
        "default 10 for single answers of transformers, and of vllm without stop texts; otherwise, and with null, they "
        "begin anew",
    )
    weights: WeightsRoute = Field(
        default="shards",
        description="how versions reach the engine: shards of the store; sent by the trainer over gloo (CPU) or NCCL; "
        "or taken from its memory on the same GPU (ipc)",
    )
    transfer_s: Seconds | None = Field(
        default=None,
        description="seconds after which a weight transfer that is not over is given up, less than lease.lease_s; "
        "default two thirds of that, with shards none",
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="arguments handed to the engine")
    block_tasks: Count = Field(
        default=1,
        description="tasks of one lease, must divide tasks_per_step; default as many as make 256 samples",
    )


class BatchStore(Section):
    memory: Size = Field(default=1024**3, description="bytes of shared memory, as 64GiB")
    spill: LocalPath | None = Field(
        default=None, description="folder on disk for what does not fit, which hosts may share; left out: no spill"
    )
    spill_limit: Size | None = Field(
        default=None, description="bytes of the spill folder, as 500GiB; needed with spill"
    )
    directory: LocalPath | None = Field(default=None, description="folder for the shards instead of /dev/shm")


class Wandb(Section):
    project: str = Field(min_length=1, description="Weights & Biases project")
    entity: str | None = Field(default=None, description="Weights & Biases team or user")


class Monitor(Section):
    wandb: Wandb | None = Field(default=None, description="also report to Weights & Biases")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="TCP port (1 to 65535) of the web page and Prometheus; left out: a free one"
    )


class Services(Section):
    policy_trainer: PolicyTrainer = Field(
        default_factory=PolicyTrainer, alias="policy-trainer", description="the training service"
    )
    reference: Reference | None = Field(
        default=None, description="the frozen model; started if algorithm.kl.coef is above 0"
    )
    rollout: Rollout = Field(default_factory=Rollout, description="the sampling engines")
    batch_store: BatchStore = Field(default_factory=BatchStore, alias="batch-store", description="limits of the store")
    monitor: Monitor = Field(default_factory=Monitor, description="telemetry")


class Checkpoint(Section):
    every: Count = Field(default=20, description="steps between checkpoints, 1 or more")
    keep_last: Count = Field(
        default=2, description="newest checkpoints kept, 1 or more; recovery may fall back to these"
    )
    keep_every: Count | None = Field(
        default=None, description="also keep each checkpoint of a multiple of this many steps"
    )


class GC(Section):
    after: Literal["checkpoint", "commit"] = Field(
        default="checkpoint",
        description="a trained task is collected once a checkpoint covers it, or at once (no replay)",
    )


class Host(Section):
    gpus: int = Field(default=0, ge=0, description="GPUs of this host, 0 or more")


class Placement(Section):
    engine: Literal["local", "ray"] = Field(default="local", description="who starts the processes")
    hosts: dict[str, Host] = Field(default_factory=dict, description="hosts by name; left out: this machine")
    colocate: Strings = Field(
        default=(), description="services that take turns on the same GPUs (without any: host memory)"
    )


class Transport(Section):
    listen: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")] | None = Field(
        default=None,
        description="address of this machine that other hosts reach, as 10.0.0.1; left out: this machine only",
    )
    scheduler_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7747, description="TCP port (1 to 65535) of the scheduler, which other hosts join at"
    )
    supervisor_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7748, description="TCP port (1 to 65535) of the supervisor, which launch.ctl --access asks"
    )
    monitor_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=7749, description="TCP port (1 to 65535) of the monitor, which launch.monitor --access asks"
    )
    encrypt_bulk: bool = Field(default=True, description="encrypt shards between hosts; control messages always are")


class Lease(Section):
    lease_s: Seconds = Field(default=30.0, description="seconds without progress after which a lease is lost, above 0")
    attempts: Count = Field(default=3, description="leases of a task before it is dropped as failed, 1 or more")
