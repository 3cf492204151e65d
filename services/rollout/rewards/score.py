"""`Score`: the reward of one sample, or the reason why it has none. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proto.messages import LossReason

TOTAL_KEY = "reward"
LIMIT = 3.4028234663852886e38
"""The largest float32, the type in which rewards are sent."""

RAISED, ANSWER, TIMEOUT, CRASHED = LossReason.RAISED, LossReason.ANSWER, LossReason.TIMEOUT, LossReason.CRASHED
MEMORY, JUDGE, WORKFLOW = LossReason.MEMORY, LossReason.JUDGE, LossReason.WORKFLOW


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one sample.

    If `value` is None, the sample failed: `failure` gives the reason and place in one line, and `kind` is a
    `LossReason`. `parts` holds the entries of a dict reward, and `trace` the traceback of the user's code, if there is
    one. `retry_after_s` is the pause in seconds that the judge asks for (kind JUDGE).
    """

    value: float | None
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    kind: str = ""
    trace: str = ""
    retry_after_s: float = 0.0


def failed(function: str, kind: str, why: str, *, at: str = "", trace: str = "", retry_after_s: float = 0.0) -> Score:
    """Return the score of a sample that `function` could not score. `at` is a line of user code (`file.py:12`)."""
    text = f"{function}: {why}"[:300] + (f" (at {at})" if at else "")
    return Score(None, text.replace("\n", " "), kind=kind, trace=trace, retry_after_s=retry_after_s)


def total(answer: Any) -> Score:
    """Return the score of one sample from the return value of a function.

    A number is the score itself. For a dict, the score is the value of key `reward` if there is one, else the sum of
    all values. NaN, infinity, numbers outside the float32 range and other types yield a failed score.
    """
    try:
        if isinstance(answer, dict):
            parts = {str(key): float(value) for key, value in answer.items()}
            value = parts[TOTAL_KEY] if TOTAL_KEY in parts else math.fsum(parts.values())
        else:
            parts, value = {}, float(answer)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(None, f"returned {answer!r:.60}, not a number or a dict of numbers ({error})", kind=ANSWER)
    if not abs(value) <= LIMIT:
        return Score(None, f"returned {value}, which is not finite in float32 (at most {LIMIT:.1e})", kind=ANSWER)
    return Score(value, parts=parts)


def totals(function: str, answer: Any, samples: int, *, group: bool) -> list[Score]:
    """Return the scores of the `samples` samples in one call to `function`. For a group, `answer` lists one reward per
    sample."""
    if group and (not isinstance(answer, list | tuple) or len(answer) != samples):
        why = f"returned {answer!r:.60} for {samples} samples, not a list of as many rewards"
        return [failed(function, ANSWER, why)] * samples
    scores = [total(each) for each in (answer if group else [answer])]
    return [each if each.value is not None else failed(function, each.kind, each.failure) for each in scores]


def add(left: Score, right: Score, weight: float) -> Score:
    """Return `left + weight * right`. A failed score stays failed, and a sum outside the float32 range fails."""
    if left.value is None:
        return left
    if right.value is None:
        return right
    value = left.value + weight * right.value
    if not abs(value) <= LIMIT:
        return Score(
            None, f"the weighted rewards add up to {value}, but float32 holds at most {LIMIT:.1e}", kind=ANSWER
        )
    return Score(value, parts={**left.parts, **right.parts})


def add_all(sums: list[Score], places: Sequence[int], scores: Sequence[Score], weight: float) -> None:
    """Add `scores` to `sums` at `places`."""
    for place, score in zip(places, scores, strict=True):
        sums[place] = add(sums[place], score, weight)
