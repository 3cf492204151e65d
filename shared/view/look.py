"""How work and metrics look, wherever a run is shown: one colour for each kind of work, and axes for curves of zeros.

The page, its saved form and the terminal interface take their colours from this table. A metric has the colour of the
work that it measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from shared.topology.models import CRITIC, FROZEN, POLICY_WORKER, WORKERS


class WorkKind(StrEnum):
    """The kinds of work, and waiting."""

    GENERATE = "generate"
    REWARD = "reward"
    REFERENCE = "reference"
    CRITIC = "critic"
    TRAIN = "forward and backward"
    OPTIMIZER = "optimizer"
    WEIGHTS = "weights"
    CHECKPOINT = "checkpoint"
    STEP = "step"
    IDLE = "waiting"
    OTHER = "other"


@dataclass(frozen=True)
class Look:
    """The colour of a kind of work, and what is drawn in it."""

    color: str
    """Its contrast with the backgrounds of the light and the dark theme is at least 3:1 (WCAG 2.2, 1.4.11)."""
    spans: tuple[str, ...] = ()
    """The names of its spans on the timeline."""
    services: tuple[str, ...] = ()
    """The services that mostly do this work."""
    metrics: tuple[str, ...] = ()
    """First parts of the names of metrics. The longest one that fits a name decides."""


LOOKS: Mapping[WorkKind, Look] = MappingProxyType(
    {
        WorkKind.GENERATE: Look("#2f7ed8", ("generate", "evaluate"), ("rollout",), ("rollout/", "policy/entropy")),
        WorkKind.REWARD: Look("#2e8b3d", ("reward",), (), ("reward/", "eval/", "workflow/")),
        WorkKind.REFERENCE: Look("#a855f7", ("score",), FROZEN, ("reference/", "teacher/", "loss/kl", "reward/kl")),
        WorkKind.CRITIC: Look("#6b8e00", (), (WORKERS[CRITIC],), ("critic/", "time/values", "time/critic")),
        WorkKind.TRAIN: Look(
            "#d9512c",
            ("Forward", "Credit", "ForwardBackward", "ForwardBackwardModel"),
            (POLICY_WORKER,),
            (
                "loss/",
                "policy/",
                "advantage/",
                "preference/",
                "moe/",
                "dispatch/",
                "time/credit",
                "time/forward_backward",
            ),
        ),
        WorkKind.OPTIMIZER: Look(
            "#a07500",
            ("OptimStep", "OptimStepModel", "SkipUpdate"),
            (),
            ("policy/grad_norm", "policy/lr", "policy/updates_skipped", "time/optim"),
        ),
        WorkKind.WEIGHTS: Look(
            "#0e8a9a",
            ("InitModel", "OpenModel", "CloseModel", "Publish", "PublishModel", "Move"),
            ("batch-store",),
            ("policy/version", "sync/", "store/", "gc/", "time/publish", "time/sync"),
        ),
        WorkKind.CHECKPOINT: Look(
            "#de3d88",
            ("SaveCheckpoint", "LoadCheckpoint", "SaveModel", "SaveState"),
            (),
            ("time/checkpoint", "time/snapshot"),
        ),
        WorkKind.STEP: Look("#6366f1", ("step",), ("policy-trainer", "scheduler"), ("time/step", "throughput/")),
        WorkKind.IDLE: Look("#6b7280", (), (), ("time/wait_",)),
        WorkKind.OTHER: Look("#8d6e55"),
    }
)
SIGNED = ("loss/", "reward/", "advantage/", "critic/", "teacher/kl", "preference/margin", "rollout/kl", "workflow/")
"""First parts of the names of metrics that can be negative."""


def _by(field: str) -> dict[str, WorkKind]:
    return {name: kind for kind, look in LOOKS.items() for name in getattr(look, field)}


_SPANS, _SERVICES, _METRICS = _by("spans"), _by("services"), _by("metrics")


def of_span(what: str, *, waits: bool) -> WorkKind:
    """Return the kind of work of a span of the timeline. All waits are one kind."""
    return WorkKind.IDLE if waits else _SPANS.get(what, WorkKind.OTHER)


def of_service(name: str) -> WorkKind:
    """Return the kind of work that a process (`rollout/0`) mostly does."""
    return _SERVICES.get(name.partition("/")[0], WorkKind.OTHER)


def of_metric(name: str) -> WorkKind:
    """Return the kind of work that a metric measures."""
    fitting = [part for part in _METRICS if name.startswith(part)]
    return _METRICS[max(fitting, key=len)] if fitting else WorkKind.OTHER


def limits(low: float, high: float, *, signed: bool) -> tuple[float, float]:
    """Return the ends of the vertical axis for values from `low` to `high`. A constant curve gets space around it:
    zeros get 0 to 1, or −1 to 1 if the metric can be negative."""
    if low != high:
        return low, high
    if low == 0:
        return -1.0 if signed else 0.0, 1.0
    return low - abs(low) / 10, high + abs(high) / 10


def document() -> dict[str, Any]:
    """Return the tables for the page's scripts, which apply them as the functions above do."""
    return {
        "colors": {kind: look.color for kind, look in LOOKS.items()},
        "spans": _SPANS,
        "services": _SERVICES,
        "metrics": _METRICS,
        "signed": SIGNED,
    }
