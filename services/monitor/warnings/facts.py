"""Collects the facts about a run that detectors know before the run starts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.topology import Topology
from shared.topology.algorithm import GROUP_ADVANTAGES


@dataclass(frozen=True)
class Facts:
    """The parts of a topology on which bounds and remedies depend."""

    steps: int = 200
    sampled: bool = True
    """Whether the policy is trained on its own samples, which is not the case in supervised fine-tuning."""
    rewarded: bool = True
    """Whether the policy learns from rewards, which is not the case if it only learns from a teacher."""
    groups: bool = True
    """Whether advantages compare the samples of a group, so that equal rewards teach nothing."""
    filters: bool = False
    """Whether groups with equal rewards are replaced (`algorithm.filter_zero_variance`)."""
    kl_coef: float = 0.0
    clip_norm: float = 1.0
    lr: float = 3e-4
    warmup_steps: int = 0
    critic_lr: float = 0.0
    """Learning rate of the critic, or 0 without a critic."""
    critic_warmup_steps: int = 0
    """Number of first steps in which only the critic learns."""
    clips_tokens: bool = True
    """Whether the clip fraction counts tokens whose ratio moved by about 0.2."""
    max_new_tokens: int = 8
    staleness: int = 1
    by_completion: bool = False
    alternates: bool = False
    """Whether trainer and rollouts take turns, so that one waits while the other works."""
    instances: int = 1
    reward_processes: int = 2
    local: frozenset[str] = frozenset()
    """Names of the services on the monitor's machine."""

    @classmethod
    def of(cls, topology: Topology) -> Facts:
        algorithm, services = topology.algorithm, topology.services
        advantage, critic = algorithm.advantage.name, topology.critic
        return cls(
            steps=topology.run.steps,
            sampled=not algorithm.loss.from_rows,
            rewarded=advantage != "none",
            groups=algorithm.group_size > 1 and advantage in GROUP_ADVANTAGES,
            filters=algorithm.filter_zero_variance is not None,
            kl_coef=algorithm.kl.coef if algorithm.kl is not None else 0.0,
            clip_norm=topology.optimizer.clip_norm,
            lr=topology.optimizer.lr,
            warmup_steps=topology.optimizer.warmup_steps,
            critic_lr=critic.optimizer.lr if critic is not None else 0.0,
            critic_warmup_steps=critic.warmup_steps if critic is not None else 0,
            clips_tokens=algorithm.loss.name == "ppo_clip",
            max_new_tokens=topology.sampling.max_new_tokens,
            staleness=topology.staleness,
            by_completion=topology.consume == "completion",
            alternates=topology.staleness == 0 or bool(topology.placement.colocate),
            instances=services.rollout.instances,
            reward_processes=topology.reward.processes,
            local=frozenset(spec.name for spec in topology.services_plan() if spec.host == topology.home),
        )
