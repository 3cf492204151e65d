"""Finds the reward functions and the workflow that a topology names. Errors are one line long and are raised when the
run starts."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.rewards import builtin as rewards
from services.rollout.user_code.frames import Purpose
from services.rollout.user_code.trace import Home, home_of
from services.rollout.workflows import builtin as workflows
from shared.rpc.errors import BadInput
from shared.user_function import import_function

GROUP_PARAMETER = "samples"
_BUILTIN = "builtin"


@dataclass(frozen=True)
class UserFunction:
    """A loaded function. `group` means that it takes all samples of a task, `is_async` that it returns a coroutine."""

    name: str
    call: Callable[..., Any]
    params: dict[str, Any]
    group: bool
    is_async: bool
    home: Home


@dataclass(frozen=True)
class _FunctionKind:
    """The functions for one purpose: their name in errors, their arguments and the builtins."""

    what: str
    arguments: tuple[str, ...]
    builtins: Mapping[str, rewards.Builtin]
    must_be_async: bool = False


_KINDS = {
    Purpose.REWARD: _FunctionKind("reward function", ("sample",), rewards.BUILTINS),
    Purpose.WORKFLOW: _FunctionKind(
        "workflow",
        ("row", "llm", "ctx"),
        {name: rewards.Builtin(call) for name, call in workflows.BUILTINS.items()},
        must_be_async=True,
    ),
}


def is_inline(path: str) -> bool:
    """Return whether the reward function at this import path may run in the service itself, as some builtins may."""
    builtin = _builtin(Purpose.REWARD, path)
    return builtin is not None and builtin.inline


def load(purpose: Purpose, path: str, params: dict[str, Any]) -> UserFunction:
    """Return the function at `path`. Its module is searched for on Python's path, then in the current directory.

    A reward function whose first parameter is named `samples` scores a group at once. Raises BadInput if
    the path cannot be imported, is not a function (for a workflow: a coroutine function), or does not accept `params`.
    """
    kind = _KINDS[purpose]
    try:
        builtin = _builtin(purpose, path)
        call = import_function(path) if builtin is None else _checked(builtin, purpose, path, params)
    except ValueError as error:
        raise refused(purpose, path, str(error)) from error
    try:
        signature = inspect.signature(call)
        signature.bind(*[None] * len(kind.arguments), **params)
    except (TypeError, ValueError) as error:
        form = f"fn({', '.join(kind.arguments)}, **params)"
        raise refused(purpose, path, f"cannot be called as {form} with params {sorted(params)} ({error})") from None
    is_async = inspect.iscoroutinefunction(call)
    if kind.must_be_async and not is_async:
        raise refused(purpose, path, "is not a coroutine function; write it with async def")
    group = next(iter(signature.parameters), "") == GROUP_PARAMETER
    return UserFunction(path, call, dict(params), group, is_async, home_of(call))


def refused(purpose: Purpose, path: str, why: str) -> BadInput:
    """Return the one-line error for the function at `path`."""
    return BadInput(f"{_KINDS[purpose].what} {path!r}: {why}"[:600].replace("\n", " "))


def _builtin(purpose: Purpose, path: str) -> rewards.Builtin | None:
    """Return the builtin that `builtin:<name>` names, or None for other paths. Raises RpcError for unknown names."""
    module_name, _, name = path.partition(":")
    if module_name != _BUILTIN:
        return None
    builtins = _KINDS[purpose].builtins
    if name not in builtins:
        near = difflib.get_close_matches(name, builtins, n=1) or sorted(builtins)
        raise refused(purpose, path, f"names no builtin; use {_BUILTIN}:{near[0]}")
    return builtins[name]


def _checked(builtin: rewards.Builtin, purpose: Purpose, path: str, params: dict[str, Any]) -> Callable[..., Any]:
    """Import the optional modules of a builtin, so that the timeout of its first call does not include the imports.

    Raises BadInput if a module is not installed, or if no call with `params` can succeed.
    """
    for module in builtin.modules:
        if importlib.util.find_spec(module) is None:
            install = f"install it with: pip install 'rlbus[{builtin.extra}]'"
            raise refused(purpose, path, f"needs the package {module}; {install}")
        importlib.import_module(module)
    try:
        if builtin.check is not None:
            builtin.check(params)
    except (re.error, KeyError, TypeError) as error:
        raise refused(purpose, path, f"params {params!r:.100} cannot work ({type(error).__name__}: {error})") from None
    return builtin.call
