"""Reward functions by the name `builtin:<name>`. Each is an ordinary reward function: no access to the service.

Functions that need a library import it when they are called: the name of an optional extra is checked at start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared.data.gym import GYM_KEY, PACKAGE, GymEntries
from shared.sample import Sample

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(sample: Sample) -> float:
    """1.0 when the completion, stripped, is the row's `answer` as text, stripped; else 0.0. KeyError without one."""
    return float(sample.completion.strip() == str(sample.row["answer"]).strip())


def numeric(sample: Sample, *, tolerance: float = 1e-6, relative: float = 0.0) -> float:
    """1.0 when the last number of the completion is within `tolerance` + `relative` * |answer| of the row's `answer`.

    0.0 for a completion without a number; ValueError for an answer that is none.
    """
    answer = row_number(sample.row["answer"])
    found = _NUMBER.findall(sample.completion)
    return float(bool(found) and abs(row_number(found[-1]) - answer) <= tolerance + relative * abs(answer))


def regex(sample: Sample, *, pattern: str) -> float:
    """1.0 when `pattern` is found in the completion; if it has a group named `answer`, the last such capture must
    also be the row's `answer` (both stripped)."""
    found = list(re.finditer(pattern, sample.completion))
    if not found:
        return 0.0
    if "answer" not in found[-1].re.groupindex:
        return 1.0
    return float((found[-1]["answer"] or "").strip() == str(sample.row["answer"]).strip())


def math_verify(sample: Sample) -> float:
    """1.0 when the last mathematical expression of the completion equals the row's `answer` (library math-verify)."""
    from math_verify import parse, verify

    # Without timeouts of its own: those use SIGALRM, and this process is ended from outside when it is late.
    gold = parse(_as_latex(str(sample.row["answer"])), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"answer {sample.row['answer']!r:.60} is no mathematical expression")
    answer = parse(sample.completion, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def reasoning_gym(sample: Sample) -> float:
    """The score that the row's own reasoning-gym data set gives to the completion, stripped, from 0.0 to 1.0.

    KeyError for a row of another source.
    """
    made = sample.row[GYM_KEY]
    entry = _entries(made["source"]).entry(made["index"])
    if entry["question"] != sample.row["prompt"]:
        raise ValueError(f"{made['source']} makes another question {made['index']} here; is it of another release?")
    return float(_entries(made["source"]).score(sample.completion.strip(), entry))


@cache
def _entries(source: str) -> GymEntries:
    return GymEntries(source, where="reward")


def row_number(value: Any) -> float:
    """A number as it stands in data: `1,234.5` too. ValueError for what is none."""
    return float(str(value).strip().replace(",", ""))


def _as_latex(answer: str) -> str:
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def _check_regex(params: dict[str, Any]) -> None:
    re.compile(params["pattern"])


@dataclass(frozen=True)
class Builtin:
    """`inline`: so short and so sure to end that a process would cost more than it guards (3 µs against 80 to 110 µs
    a call, measured). `modules` come with the optional `extra`. `check` raises for params that can never work."""

    call: Callable[..., Any]
    inline: bool = False
    modules: tuple[str, ...] = ()
    extra: str = ""
    check: Callable[[dict[str, Any]], None] | None = None


BUILTINS = {
    "exact_match": Builtin(exact_match, inline=True),
    "numeric": Builtin(numeric, inline=True),
    "regex": Builtin(regex, check=_check_regex),
    "math_verify": Builtin(math_verify, modules=("math_verify",), extra="rewards"),
    "reasoning_gym": Builtin(reasoning_gym, modules=(PACKAGE,), extra="rewards"),
}
