"""Finds the workflow that a topology names. Errors are one line, and are raised at the start of a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from services.rollout.user_code import builtin_name, find_function, refused
from services.rollout.workflows.builtin import BUILTINS
from shared.workflow import LLM, Context, Trajectory

WHAT = "workflow"
Workflow = Callable[[dict[str, Any], LLM, Context], Awaitable[Trajectory]]


def load_workflow(function: str, params: dict[str, Any]) -> Workflow:
    """Return the coroutine function at the import path `function`, with `params` bound.

    Raises RpcError(bad_request) if it cannot be imported, is not a coroutine function, or does not accept `params`.
    """
    name = builtin_name(function, BUILTINS, WHAT)
    call = find_function(function, WHAT) if name is None else BUILTINS[name]
    try:
        inspect.signature(call).bind(None, None, None, **params)
    except (TypeError, ValueError) as error:
        raise refused(
            WHAT, function, f"cannot be called as fn(row, llm, ctx, **params) with params {sorted(params)} ({error})"
        ) from None
    if not inspect.iscoroutinefunction(call):
        raise refused(WHAT, function, "is no coroutine function; write it with async def")
    return functools.partial(call, **params)
