"""Computes the numbers of an optimizer step, of which workers know nothing until it is sent."""

from __future__ import annotations

from pathlib import Path

from proto.messages import AdamW
from shared.runfiles.metrics import MetricsFollower
from shared.topology.algorithm import Optimizer


def optimizer_numbers(options: Optimizer, step: int) -> AdamW:
    """Return the numbers of an update of training step `step`, counted from 1.

    The learning rate rises linearly from lr / warmup_steps at step 1 to lr at warmup_steps, and is then constant.
    """
    warmup = min(1.0, step / options.warmup_steps) if options.warmup_steps else 1.0
    beta1, beta2 = options.betas
    return AdamW(
        lr=options.lr * warmup,
        beta1=beta1,
        beta2=beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
    )


def committed_rates(metrics: Path, *, after: int) -> dict[int, float]:
    """Return the learning rate of each committed step after step `after` whose row is in `metrics.jsonl` (steps without
    an update have none).

    The scheduler writes these rows from its journal. A step that is replayed repeats its rate, even if the run was
    resumed with another one.
    """
    follower, rates = MetricsFollower(metrics), dict[int, float]()
    while (page := follower.poll()).more:
        for row in page.rows:
            step, rate = row.get("step"), row.get("policy/lr")
            if step is not None and step > after and rate:
                rates[int(step)] = rate
    return rates
