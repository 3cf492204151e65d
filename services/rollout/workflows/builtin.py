"""Workflows that are named `builtin:<name>`. Each is an ordinary workflow without access to the service."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from shared.data.source import content_text
from shared.workflow import LLM, Context, Message, Trajectory

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SUM = re.compile(r"[0-9(][0-9+\-*/(). ]*")
_MOST_CHARACTERS = 100

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


async def calculator(row: dict[str, Any], llm: LLM, ctx: Context, *, max_turns: int = 2) -> Trajectory:
    """Let the policy answer in up to `max_turns` turns with a calculator.

    If an answer calls the calculator, by a tool call or by ending in `=`, the value of the expression is appended and
    the policy answers again. The same happens if the answer differs from the value of the expression in the prompt. The
    workflow emits the metric `calculator_calls`.
    """
    prompt = row["prompt"]
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    asked = str(content_text(messages[-1]) or "")
    calls = 0
    for left in range(max_turns - 1, -1, -1):
        turn = await llm.chat(messages, tools=[CALCULATOR])
        expression = _expression_of(turn.text, [call.arguments for call in turn.tool_calls], asked)
        if expression is None or not left:
            break
        calls += 1
        messages = [*messages, turn.message, {"role": "tool", "content": f"{expression}={_value_text(expression)}"}]
    ctx.state["calculator_calls"] = calls
    return llm.trajectory(metrics={"calculator_calls": float(calls)})


def _expression_of(text: str, called: list[dict[str, Any]], asked: str) -> str | None:
    """Return the expression to compute, or None if the answer is final."""
    if called:
        return str(called[0].get("expression", ""))
    if text.strip().endswith("="):
        return text.strip().rstrip("=")
    match = _SUM.search(asked)
    if match is None:
        return None
    expression = match[0].strip()
    return None if text.strip() == _value_text(expression) else expression


def _value_text(expression: str) -> str:
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


BUILTINS = {"calculator": calculator}
