"""`Score`: the reward of one sample, or the reason why it has none. The functions are pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proto.messages import LossReason

T = TypeVar("T")
TOTAL_KEY, TURNS_KEY = "reward", "turns"
INFO_CHARS = 1000
"""Maximum number of characters kept of a text in a dict reward."""
LIMIT = 3.4028234663852886e38
"""The largest float32, the type in which rewards are sent."""

RAISED, ANSWER, TIMEOUT, CRASHED = LossReason.RAISED, LossReason.ANSWER, LossReason.TIMEOUT, LossReason.CRASHED
MEMORY, JUDGE, WORKFLOW = LossReason.MEMORY, LossReason.JUDGE, LossReason.WORKFLOW


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one sample.

    If `value` is None, the sample failed: `failure` gives the reason and place in one line, and `kind` is a
    `LossReason`. `turns` holds the rewards of the assistant's turns, if the function gives them; `value` includes their
    sum. `parts` holds the numbers of a dict reward and, if the reward is a weighted sum, the value of each
    function (see `weighted`). `info` holds the texts of a dict reward. `trace` is the traceback of the user's code, if
    there is one. `retry_after_s` is the pause in seconds that the judge asks for (kind JUDGE).
    """

    value: float | None
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    kind: str = ""
    trace: str = ""
    retry_after_s: float = 0.0
    info: dict[str, str] = field(default_factory=dict)
    turns: list[float] = field(default_factory=list)


def failed(function: str, kind: str, why: str, *, at: str = "", trace: str = "", retry_after_s: float = 0.0) -> Score:
    """Return the score of a sample that `function` could not score. `at` is a line of user code (`file.py:12`)."""
    text = f"{function}: {why}"[:300] + (f" (at {at})" if at else "")
    return Score(None, text.replace("\n", " "), kind=kind, trace=trace, retry_after_s=retry_after_s)


def total(answer: Any) -> Score:
    """Return the score of one sample from the return value of a function.

    A number is the score itself. For a dict, the score is the value of key `reward` if there is one, else the sum of
    all numbers; texts are kept beside it. A list under the key `turns` holds the reward of each turn, which is added to
    the score. NaN, infinity, numbers outside the float32 range, a dict that has texts but no number, and other types
    yield a failed score.
    """
    info: dict[str, str] = {}
    turns: list[float] = []
    try:
        if isinstance(answer, dict):
            if isinstance(answer.get(TURNS_KEY), list | tuple):
                turns = [float(value) for value in answer[TURNS_KEY]]
                answer = {key: value for key, value in answer.items() if key != TURNS_KEY} or {TOTAL_KEY: 0.0}
            info = {str(key): _valid(value[:INFO_CHARS]) for key, value in answer.items() if isinstance(value, str)}
            parts = {str(key): float(value) for key, value in answer.items() if not isinstance(value, str)}
            if TOTAL_KEY in info or (info and not parts):
                raise TypeError(f"{TOTAL_KEY} is a text" if TOTAL_KEY in info else "it has only texts")
            value = parts[TOTAL_KEY] if TOTAL_KEY in parts else math.fsum(parts.values())
        else:
            parts, value = {}, float(answer)
        value = math.fsum([value, *turns])
    except (TypeError, ValueError, OverflowError) as error:
        return Score(None, f"returned {answer!r:.60}, not a number or a dict of numbers ({error})", kind=ANSWER)
    if not abs(value) <= LIMIT:
        return Score(None, f"returned {value}, which is not finite in float32 (at most {LIMIT:.1e})", kind=ANSWER)
    return Score(value, parts=parts, info=info, turns=turns)


def _valid(text: str) -> str:
    """Return the text with `?` in place of lone surrogates, which UTF-8 cannot represent."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def totals(function: str, answer: Any, samples: int, *, group: bool) -> list[Score]:
    """Return the scores of the `samples` samples in one call to `function`. For a group, `answer` lists one reward per
    sample."""
    if group and (not isinstance(answer, list | tuple) or len(answer) != samples):
        why = f"returned {answer!r:.60} for {samples} samples, not a list of as many rewards"
        return [failed(function, ANSWER, why)] * samples
    scores = [total(value) for value in (answer if group else [answer])]
    return [value if value.value is not None else failed(function, value.kind, value.failure) for value in scores]


def names_of(functions: Sequence[str]) -> list[str]:
    """Return a unique name for each function: the last part of its import path. If several functions share it, the
    second one is named `<name>-2`, and so on."""
    plain = [path.rpartition(":")[2] for path in functions]
    return [f"{name}-{plain[: at + 1].count(name)}" if name in plain[:at] else name for at, name in enumerate(plain)]


def weighted(scores: Sequence[Score], names: Sequence[str], weights: Sequence[float]) -> Score:
    """Return the weighted sum of the scores that the functions `names` gave to one sample.

    The parts of the sum are the value of each function, without its weight, by the function's name, and the parts of
    each score. If a part has the name of a function or of another function's part, it is named `<function>/<part>`.
    For a single function with weight 1, its score is the sum.

    If any score failed, the sum is the first one that did. A sum outside the float32 range also fails.
    """
    if len(scores) == 1 and weights[0] == 1:
        return scores[0]
    value = 0.0
    parts: dict[str, float] = {}
    for score, name, weight in zip(scores, names, weights, strict=True):
        if score.value is None:
            return score
        value += weight * score.value
        parts[name] = score.value
    turns: list[float] = []
    given = [(score.turns, weight) for score, weight in zip(scores, weights, strict=True) if score.turns]
    if given and len({len(numbers) for numbers, _ in given}) > 1:
        counts = " and ".join(str(len(numbers)) for numbers, _ in given)
        return Score(None, f"the functions returned rewards for {counts} turns of one sample", kind=ANSWER)
    if given:
        columns = zip(*(numbers for numbers, _ in given), strict=True)
        turns = [
            math.fsum(weight * number for number, (_, weight) in zip(column, given, strict=True)) for column in columns
        ]
    if not abs(value) <= LIMIT:
        return Score(
            None, f"the weighted rewards add up to {value}, but float32 holds at most {LIMIT:.1e}", kind=ANSWER
        )
    if any(score.parts for score in scores):
        parts |= _merged(names, [score.parts for score in scores], names)
    if any(score.info for score in scores):
        return Score(value, parts=parts, info=_merged(names, [score.info for score in scores], ()), turns=turns)
    return Score(value, parts=parts, turns=turns)


def _merged(names: Sequence[str], entries: Sequence[Mapping[str, T]], taken: Iterable[str]) -> dict[str, T]:
    """Return the entries of all functions in one dict. A key that occurs again or is in `taken` gets the function's
    name as a prefix."""
    counts = Counter([*taken, *(key for entry in entries for key in entry)])
    return {
        key if counts[key] == 1 else f"{name}/{key}": value
        for name, entry in zip(names, entries, strict=True)
        for key, value in entry.items()
    }
