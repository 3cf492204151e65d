"""The section `services.monitor.warnings`, and the kinds of warnings that a run may issue."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from shared.topology.fields import Section, Strings


class WarningKind(StrEnum):
    """What a warning is about. docs/warnings.md explains each kind."""

    ZERO_VARIANCE = "zero-variance"
    REWARD_FLAT = "reward-flat"
    REWARD_FALLING = "reward-falling"
    ENTROPY_COLLAPSE = "entropy-collapse"
    KL_BLOW_UP = "kl-blow-up"
    MISMATCH = "mismatch"
    TRUNCATION = "truncation"
    LENGTH_HACKING = "length-hacking"
    GRADIENT = "gradient"
    LEARNING_RATE = "learning-rate"
    OVERFITTING = "overfitting"
    STALENESS = "staleness"
    TRAINER_STARVED = "trainer-starved"
    ROLLOUTS_STARVED = "rollouts-starved"
    STORE_FULL = "store-full"
    MEMORY_TREND = "memory-trend"
    REWARD_SLOW = "reward-slow"
    REWARD_FAILING = "reward-failing"


def _known(kinds: tuple[str, ...]) -> tuple[str, ...]:
    names = [str(kind) for kind in WarningKind]
    for kind in kinds:
        if kind not in names:
            near = difflib.get_close_matches(kind, names, n=1)
            nearest = f", nearest {near[0]!r}" if near else ""
            raise ValueError(f"{kind!r} is not one of {', '.join(names)}{nearest}")
    return kinds


class Warnings(Section):
    off: Annotated[Strings, AfterValidator(_known)] = Field(
        default=(), description="kinds of warnings that are not issued, such as trainer-starved (see docs/warnings.md)"
    )
