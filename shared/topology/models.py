"""Describes the models of a run, one record each. A process that runs a model gets its record instead of the topology.

`Topology.trained` and `Topology.frozen` derive the records. The module imports neither torch nor the whole topology.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from shared.topology.algorithm import Advantage, Loss, Optimizer
from shared.topology.lora import Lora
from shared.topology.passes import Passes
from shared.topology.services import FrozenSettings, TeacherServer, TrainerSettings, WeightsRoute

Head = Literal["language", "value"]
"""What a model computes for each token: the log-prob of the token (`language`), or the value of the state before it
(`value`)."""
POLICY, CRITIC, REFERENCE, TEACHER = "policy", "critic", "reference", "teacher"
REWARD_MODEL, REWARD_MODEL_SECTION = "reward-model", "reward_model"
"""The name of the reward model, and that of its section."""
POLICY_WORKER = "policy-trainer-worker"
WORKERS: Mapping[str, str] = MappingProxyType({POLICY: POLICY_WORKER, CRITIC: CRITIC})
"""For each trained model, by name, the service whose processes are its ranks."""
FROZEN = (REFERENCE, TEACHER, REWARD_MODEL)
"""The names of the models that only score. Each has a service and a stage of the same name."""
DEVICE_SERVICE: Mapping[str, str] = MappingProxyType(
    {"policy-trainer": POLICY_WORKER, "critic": CRITIC, **{name: name for name in FROZEN}, "rollout": "rollout"}
)
"""Services that can be colocated, each with the service whose processes hold its devices."""


@dataclass(frozen=True)
class Publication:
    """How engines get the versions of a trained model."""

    route: WeightsRoute
    transfer_s: float | None
    """Maximum seconds for a transfer from the trainer, or None if engines read the versions from a store."""
    mapped: bool
    """Whether engines compute with the arrays in the store, and can prove without digests that they do."""
    earlier: int
    """Number of versions before the newest one that must be published again after a rollback."""
    sampled: bool
    """Whether engines sample with the versions. Otherwise, a version is a number without weights."""


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, and everything that its ranks and the driver need to know about it."""

    name: str
    service: str
    """The service whose processes are the model's ranks."""
    settings: TrainerSettings
    folder: Path
    """Folder of the model at version 0, in the format of Hugging Face."""
    dtype: str
    passes: Passes | None
    head: Head
    lora: Lora | None
    """The adapter that is trained, or None if all weights are."""
    optimizer: Optimizer
    loss: Loss
    advantage: Advantage
    mini_batch_tasks: int
    """Tasks of one optimizer step."""
    num_iterations: int
    """Passes over the tasks of a training step."""
    frozen_steps: int
    """Number of first training steps in which the model is not updated."""
    publishes: Publication | None
    """How its versions are published, or None if no process but its ranks needs them."""
    seed: int
    deterministic: bool
    snapshots: bool
    """Whether its ranks keep snapshots of their state in shared memory."""
    shares_devices: bool
    """Whether its ranks take turns on their devices with other services."""

    @property
    def earlier(self) -> int:
        """Number of versions before the newest one that its ranks keep and save."""
        return self.publishes.earlier if self.publishes is not None and self.publishes.sampled else 0

    @property
    def section(self) -> str:
        """Name of the section of the topology whose `model` it is."""
        return self.name

    def checkpoints(self, folder: Path) -> Path:
        """Return the folder of its checkpoints. `folder` holds those of all models; the policy's are at the top."""
        return folder if self.name == POLICY else folder / self.name

    def exported(self, run: Path) -> Path:
        """Return the folder to which it is exported at the end. `run` is the run directory."""
        return run / ("export" if self.name == POLICY else f"export-{self.name}")

    def snapshots_in(self, shm: Path) -> Path:
        """Return the folder of its snapshots. `shm` is the run's folder in the shared memory of this host."""
        return shm / "trainer" / self.name

    def clients_in(self, shm: Path) -> Path:
        """Return the folder of the snapshots of clients' models, each in a folder of its number. `shm` is as above."""
        return shm / "trainer" / "models"

    def offloaded(self, run: Path, rank: int) -> Path:
        """Return the folder of the parts of `rank` that have left its device. `run` is the run directory."""
        return run / "offloaded" / self.name / f"rank-{rank}"


@dataclass(frozen=True)
class FrozenModel:
    """A model that only scores, and everything that its ranks need to know about it."""

    name: str
    service: str
    """The service whose processes are the model's ranks."""
    settings: FrozenSettings
    section: str
    """Name of the section of the topology whose `model` it is: that of the policy, or its own."""
    folder: Path
    """Folder of the model at version 0, in the format of Hugging Face."""
    dtype: str
    passes: Passes | None
    stage: str
    """Name of the stage whose shards it makes (`shared.stages`)."""
    seed: int
    """The run's seed."""
    deterministic: bool
    shares_devices: bool
    """Whether its ranks take turns on their devices with other services."""
    temperature: float = 1.0
    """The logits are divided by this."""
    refreshed: bool = False
    """Whether later versions of the policy take its place during the run."""
    lora: Lora | None = None
    """The adapter that these versions are, or None if they are whole models or never come."""
    reward_kl: str = ""
    """Estimator of the KL term in the reward, or "" if the reward has none."""
    sums: bool = False
    """Whether it also returns the sum of the log-probs of each sample."""
    top_k: int = 0
    """Number of tokens of the vocabulary with the largest log-probs that it scores in place of each token, or 0."""
    server: TeacherServer | None = None
    """The server that runs the model, or None."""
    readable: int = sys.maxsize
    """Number of the policy's token ids. No others are among the top k."""
    head: Head = "language"
    """Whether it computes the log-probs of tokens, or, as a reward model, the value of each text."""
    weight: float = 1.0
    """Factor of these values in the reward."""
    apart: bool = False
    """Whether the shards of each task are in a file of their own, because the scheduler may drop single tasks."""

    def offloaded(self, run: Path, instance: int) -> Path:
        """Return the file with the weights of an instance that have left its device. `run` is the run directory."""
        return run / "offloaded" / self.name / f"{instance}.bin"
