"""The reward functions and the workflow that are named `builtin:<name>`. Each is an ordinary function without access
to the service.

Functions that need an optional library import it when they are called; `load` checks at start-up that the library is
installed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shared.data.gym import GYM_KEY, PACKAGE, GymEntries
from shared.sample import Sample
from shared.workflow import LLM, Context, Message, Trajectory

_DOLLAR = re.compile(r"(?<!\\)\$")
"""Matches a dollar sign that is not escaped."""
_CURRENCY = re.compile(r"(?:\b[A-Z]{2,3})?\\?\$")
_EMPTY_SET = "\\varnothing", "\\emptyset"
"""A name of the empty set that the library does not know, and one that it knows."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MOST_CHARACTERS = 100
_FIELDS_CHARS = 200

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression of numbers with + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def exact_match(sample: Sample) -> float:
    """Return 1.0 if the stripped completion equals the row's `answer` as stripped text, else 0.0.

    Raises KeyError if the row has no `answer`.
    """
    return float(sample.completion.strip() == str(sample.row["answer"]).strip())


def none(sample: Sample) -> float:
    """Return 0.0, the reward in a run that learns from a teacher or from rows alone and names no reward function."""
    return 0.0


def reward_model(sample: Sample) -> float:
    """Return 0.0. The stage `reward-model` adds the score, which does not exist yet (`shared.stages`)."""
    return 0.0


def numeric(sample: Sample, *, tolerance: float = 1e-6, relative: float = 0.0) -> float:
    """Return 1.0 if the completion's last number is within `tolerance` + `relative` * |answer| of the row's `answer`.

    Returns 0.0 for a completion without a number. Raises ValueError if the answer is not a number.
    """
    answer = row_number(sample.row["answer"])
    numbers = _NUMBER.findall(sample.completion)
    return float(bool(numbers) and abs(row_number(numbers[-1]) - answer) <= tolerance + relative * abs(answer))


def regex(sample: Sample, *, pattern: str) -> float:
    """Return 1.0 if `pattern` is found in the completion, else 0.0.

    If the pattern has a group named `answer`, its last capture must also equal the row's `answer` (both stripped).
    """
    matches = list(re.finditer(pattern, sample.completion))
    if not matches:
        return 0.0
    if "answer" not in matches[-1].re.groupindex:
        return 1.0
    return float((matches[-1]["answer"] or "").strip() == str(sample.row["answer"]).strip())


def math_verify(sample: Sample) -> float:
    """Return 1.0 if the completion's last mathematical expression equals the row's `answer` (library math-verify)."""
    from math_verify import parse, verify

    # The library's own timeouts are off, because they use SIGALRM. A late process is killed from outside anyway.
    gold = parse(_as_latex(str(sample.row["answer"])).replace(*_EMPTY_SET), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"answer {sample.row['answer']!r:.60} is not a mathematical expression")
    # The library makes a set of several boxed answers; the last one counts.
    said = sample.completion[max(sample.completion.rfind("\\boxed"), 0) :].replace(*_EMPTY_SET)
    answer = parse(said, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def reasoning_gym(sample: Sample) -> float:
    """Return the score, from 0.0 to 1.0, that the row's reasoning-gym data set gives to the stripped completion.

    Raises KeyError for a row from another source, and ValueError if the data set generates a different question for it.
    """
    made = sample.row[GYM_KEY]
    entry = _entries(made["source"]).entry(made["index"])
    if entry["question"] != sample.row["prompt"]:
        raise ValueError(
            f"{made['source']} generates a different question {made['index']} here; is a different release installed?"
        )
    return float(_entries(made["source"]).score(sample.completion.strip(), entry))


@cache
def _entries(source: str) -> GymEntries:
    return GymEntries(source, where="reward")


def row_number(value: Any) -> float:
    """Return the number that `value` represents; `1,234.5` is accepted. Raises ValueError if it is not a number."""
    return float(str(value).strip().replace(",", ""))


def _as_latex(answer: str) -> str:
    """Return the answer as a formula. A dollar sign that delimits no formula is a currency and is left out."""
    dollars = len(_DOLLAR.findall(answer))
    if "\\boxed" in answer or (dollars and dollars % 2 == 0):
        return answer
    return f"${_CURRENCY.sub('', answer)}$"


def _check_regex(params: dict[str, Any]) -> None:
    re.compile(params["pattern"])


def _captures_answer(params: dict[str, Any]) -> bool:
    return "answer" in re.compile(params["pattern"]).groupindex


def _check_gym(made: Any) -> None:
    if not isinstance(made, dict) or not made.keys() >= {"source", "index"}:
        raise ValueError("it has no source and index")


async def calculator(row: dict[str, Any], llm: LLM, ctx: Context, *, max_turns: int = 2) -> Trajectory:
    """Let the policy answer in up to `max_turns` turns with a calculator.

    If an answer calls the calculator, the value of each expression is appended and the policy answers again. The
    workflow emits the metric `calculator_calls`.
    """
    prompt = row["prompt"]
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    calls = 0
    for turns_left in reversed(range(max_turns)):
        turn = await llm.chat(messages, tools=[CALCULATOR])
        if not turn.tool_calls or not turns_left:
            break
        calls += len(turn.tool_calls)
        values = [value_text(str(call.arguments.get("expression", ""))) for call in turn.tool_calls]
        messages = [*messages, turn.message, *({"role": "tool", "content": value} for value in values)]
    ctx.state["calculator_calls"] = calls
    return llm.trajectory(metrics={"calculator_calls": float(calls)})


def value_text(expression: str) -> str:
    """Return the value of an expression as the calculator shows it, or its error."""
    try:
        value = compute(expression)
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {error}"[:_MOST_CHARACTERS]
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def compute(expression: str) -> int | float:
    """Return the value of an expression of numbers, + - * / and parentheses. Raises ValueError for anything else."""
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters exceeds the limit of {_MOST_CHARACTERS}")
    return _value_of(ast.parse(expression.strip(), mode="eval").body)


def _value_of(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int | float = _OPERATORS[type(node.op)](_value_of(node.left), _value_of(node.right))
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    raise ValueError("only numbers, + - * / and parentheses")


@dataclass(frozen=True)
class RowField:
    """A field of the row without which a built-in reward cannot score any sample of the row.

    `holds` says what it contains. `check` raises ValueError for a value of another kind. If `only_if` is given, the
    field is needed only with params for which it is true; `condition` says this in words.
    """

    name: str
    holds: str = "text or a number"
    check: Callable[[Any], object] = str
    only_if: Callable[[dict[str, Any]], bool] | None = None
    condition: str = ""

    def problem(self, row: dict[str, Any]) -> str:
        """Return what is wrong with the field in `row`, or an empty string."""
        if self.name not in row:
            return f"has no field {self.name!r} (its fields: {', '.join(sorted(row))[:_FIELDS_CHARS]})"
        value = row[self.name]
        if value is None:
            return f"has null in the field {self.name!r}"
        try:
            self.check(value)
        except ValueError:
            return f"has the {self.name} {value!r:.60}, which is not {self.holds}"
        return ""


ANSWER = RowField("answer")


@dataclass(frozen=True)
class Builtin:
    """A built-in function.

    An `inline` function is called in the service itself, because it always terminates, and a call takes 3 µs compared
    with 80 to 110 µs through a process (measured). `modules` are the modules that the optional `extra` installs.
    `check` raises an exception if no call with the given params can succeed. `fields` are the row fields that it needs.
    """

    call: Callable[..., Any]
    fields: tuple[RowField, ...] = ()
    inline: bool = False
    modules: tuple[str, ...] = ()
    extra: str = ""
    check: Callable[[dict[str, Any]], None] | None = None


REWARDS = {
    "exact_match": Builtin(exact_match, (ANSWER,), inline=True),
    "none": Builtin(none, inline=True),
    "reward_model": Builtin(reward_model, inline=True),
    "numeric": Builtin(numeric, (replace(ANSWER, holds="a number", check=row_number),), inline=True),
    "regex": Builtin(
        regex,
        (replace(ANSWER, only_if=_captures_answer, condition="if the pattern has a group named `answer`"),),
        check=_check_regex,
    ),
    "math_verify": Builtin(math_verify, (ANSWER,), modules=("math_verify",), extra="rewards"),
    "reasoning_gym": Builtin(
        reasoning_gym,
        (RowField(GYM_KEY, "the place of a row in a `reasoning-gym:` source", _check_gym),),
        modules=(PACKAGE,),
        extra="rewards",
    ),
}
WORKFLOWS = {"calculator": Builtin(calculator)}
