"""Names of the metrics of an evaluation set, without the part `eval/<set>/`."""

from __future__ import annotations

REWARD, ACCURACY = "reward", "accuracy"
"""The mean reward, and the same number if every reward is 0 or 1."""
PART = "part/"
"""Begins the mean of a named reward."""


def draws(samples: int) -> list[int]:
    """Return each k for which `samples` samples of a row give a pass@k: the powers of two up to their number, and their
    number. A single sample has none, because pass@1 would be its reward."""
    powers = (1 << exponent for exponent in range(samples.bit_length()))
    return sorted({*powers, samples}) if samples > 1 else []


def scores(samples: int) -> list[str]:
    """Return the metrics for which a higher value is better, with `samples` samples of each row, but not those of named
    rewards."""
    several = [f"avg@{samples}"] if samples > 1 else []
    return [ACCURACY, REWARD, *several, *(f"pass@{k}" for k in draws(samples))]
