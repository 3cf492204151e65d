"""Tells, before a start, what the adapter of a run consists of and whether its learning rate is low, and plans the
memory of a run as if it trained an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.checks.findings import Findings
from shared.topology import Topology, lora_checks, memory_plan
from shared.topology.capacity import DTYPE_BYTES, parameter_counts
from shared.topology.memory_plan import Key, MemoryPlace, Use
from shared.topology.model_files import vocabulary
from shared.topology.models import FrozenModel, TrainedModel
from shared.topology.passes import Verdict

LOW_RATE = 2e-4
"""A learning rate below this is hinted at: on the recipe's task, an adapter reaches 0.80 of the best accuracy of all
weights with 1e-4, and 0.90 with 2e-4 (docs/lora.md)."""


def check_rate(topology: Topology, findings: Findings) -> None:
    """Warn about a learning rate that suits the training of all weights."""
    rate = topology.optimizer.lr
    if topology.policy.lora is not None and rate < LOW_RATE and not topology.run.evaluate:
        message = f"{rate:g} is low for an adapter, which needs about ten times the rate of all weights"
        findings.warn(f"optimizer.lr: {message}; docs/lora.md says what was measured")


def notes(topology: Topology, proof: Verdict, model: TrainedModel | FrozenModel) -> list[str]:
    """Return lines that tell what is trained, sent and left out, or [] for a model without an adapter. Raises the
    errors of `parameter_counts`."""
    if proof.adapter is None:
        return []
    lines = proof.adapter.lines(parameter_counts(topology)[model.name].base, DTYPE_BYTES[model.dtype])
    return [f"{'' if number else 'adapter':<15}{line}" for number, line in enumerate(lines)]


def instead(topology: Topology, gpus: Mapping[Key, str]) -> Mapping[MemoryPlace, Sequence[Use]]:
    """Return what each place would hold with the adapter `memory_plan.HINT` instead of the training of all weights, or
    {} if the policy has an adapter, or can have none. Raises the errors of `parameter_counts`."""
    policy = topology.policy
    adapted = topology.model_copy(update={"policy": policy.model_copy(update={"lora": memory_plan.HINT})})
    if policy.lora is not None or any(lora_checks.check(adapted)):
        return {}
    words = vocabulary(policy.model)
    return memory_plan.by_place(memory_plan.uses(adapted, parameter_counts(adapted), gpus, words))
