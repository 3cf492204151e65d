"""Warns, before a start, about updates that a learning-rate schedule leaves without effect."""

from __future__ import annotations

from launch.checks.findings import Findings
from shared.topology import Topology
from shared.topology.models import POLICY


def check_schedule(topology: Topology, findings: Findings) -> None:
    """Warn about a schedule that reaches a learning rate of 0 before the last update."""
    for model in topology.trained:
        options = model.optimizer
        end, updated = options.decay_steps, topology.run.steps - model.frozen_steps
        if options.schedule == "constant" or options.min_lr or end is None or end >= updated or topology.run.evaluate:
            continue
        key = "optimizer" if model.name == POLICY else f"{model.name}.optimizer"
        message = f"{end} is below the {updated} steps that update the {model.name}, and the rest have a rate of 0"
        findings.warn(f"{key}.decay_steps: {message}; use {updated + 1}, or set {key}.min_lr")
