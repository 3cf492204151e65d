"""`Score`: what one sample is worth, or why it has none. Pure functions, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOTAL_KEY = "reward"
LIMIT = 3.4028234663852886e38
"""The largest float32: what rewards travel as."""

RAISED = "raised"
ANSWER = "answer"
TIMEOUT = "timeout"
CRASHED = "crashed"
MEMORY = "memory"
WORKFLOW = "workflow"
KINDS = (RAISED, ANSWER, TIMEOUT, CRASHED, MEMORY, WORKFLOW)
"""Why a sample failed: the function raised, answered no number, was late, took its process down, took too much
memory; or there was nothing to score because its workflow failed."""


@dataclass(frozen=True, slots=True)
class Score:
    """`value` None: the sample failed, `failure` says why in one line and `kind` in one word of KINDS. `parts`: what
    a dict reward named."""

    value: float | None
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    kind: str = ""


def failed(function: str, kind: str, why: str) -> Score:
    """The score of a sample that `function` could not score."""
    return Score(None, f"{function}: {why}"[:300].replace("\n", " "), kind=kind)


def total(answer: Any) -> Score:
    """The score of one sample from what a function returned.

    A number counts as it is; of a dict its key `reward` if there is one, else the sum of its values. Fails for NaN,
    infinity, what float32 does not hold, and everything else.
    """
    try:
        if isinstance(answer, dict):
            parts = {str(key): float(value) for key, value in answer.items()}
            value = parts[TOTAL_KEY] if TOTAL_KEY in parts else math.fsum(parts.values())
        else:
            parts, value = {}, float(answer)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(None, f"answered {answer!r:.60}, must be a number or a dict of numbers ({error})", kind=ANSWER)
    if not abs(value) <= LIMIT:
        return Score(None, f"answered {value}, must be finite in float32: {LIMIT:.1e} at most", kind=ANSWER)
    return Score(value, parts=parts)


def totals(function: str, answer: Any, samples: int, *, group: bool) -> list[Score]:
    """Scores of the `samples` of one call of `function`; a group's answer is a list of as many rewards."""
    if group and (not isinstance(answer, list | tuple) or len(answer) != samples):
        why = f"answered {answer!r:.60} for {samples} samples, must be a list of as many rewards"
        return [failed(function, ANSWER, why)] * samples
    scores = [total(each) for each in (answer if group else [answer])]
    return [each if each.value is not None else failed(function, each.kind, each.failure) for each in scores]


def add(left: Score, right: Score, weight: float) -> Score:
    """`left + weight * right`; a sample that fails in one function fails, and so does one whose sum is too large."""
    if left.value is None:
        return left
    if right.value is None:
        return right
    value = left.value + weight * right.value
    if not abs(value) <= LIMIT:
        return Score(None, f"the weighted rewards add up to {value}, float32 holds {LIMIT:.1e} at most", kind=ANSWER)
    return Score(value, parts={**left.parts, **right.parts})


def add_all(sums: list[Score], places: Sequence[int], scores: Sequence[Score], weight: float) -> None:
    """Add `scores` to `sums` at `places`."""
    for place, score in zip(places, scores, strict=True):
        sums[place] = add(sums[place], score, weight)
