"""The GSM8K reward: the number after `####` in the answer must be the last number of the completion."""

from __future__ import annotations

import re

from shared.sample import Sample

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(sample: Sample) -> float:
    """Return 1.0 if the last number of the completion is the number that ends the row's `answer`, else 0.0."""
    wanted = _NUMBER.findall(str(sample.row["answer"]))
    numbers = _NUMBER.findall(sample.completion)
    return float(bool(numbers) and _value(numbers[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
