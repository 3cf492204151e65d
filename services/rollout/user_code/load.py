"""Finds the reward functions and the workflow that a topology names. Errors are one line long and are raised when the
run starts.

`python -m services.rollout.user_code.load FD` checks all functions that a topology names. This process imports users'
modules, so its parent must be able to kill it. It runs none of the functions. FD is a socket. The process reads a JSON
list of `Wanted` up to the end of the stream and answers with one JSON line for each: its error, or "" for a function
that a run could use.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.rollout.user_code.builtin import REWARDS, WORKFLOWS, Builtin, RowField
from services.rollout.user_code.confined import confine
from services.rollout.user_code.frames import Purpose
from services.rollout.user_code.trace import Home, home_of
from shared.rpc.errors import BadInput, RpcError
from shared.user_function import find_function, import_function

GROUP_PARAMETER = "samples"
_BUILTIN = "builtin"
ARGUMENTS = {"advantage": 3, "token advantage": 1, "loss": 3}
"""Number of positional arguments: (rewards, groups, loss_tokens), (task) and (cur, anchor, tokens)."""


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
    builtins: Mapping[str, Builtin]
    must_be_async: bool = False


_KINDS = {
    Purpose.REWARD: _FunctionKind("reward function", ("sample",), REWARDS),
    Purpose.WORKFLOW: _FunctionKind(
        "workflow",
        ("row", "llm", "ctx"),
        WORKFLOWS,
        must_be_async=True,
    ),
}


def is_inline(path: str) -> bool:
    """Return whether the reward function at this import path may run in the service itself, as some builtins may."""
    builtin = _builtin(Purpose.REWARD, path)
    return builtin is not None and builtin.inline


def needed_fields(path: str, params: dict[str, Any]) -> list[RowField]:
    """Return the row fields that the reward function at this import path declares to need, as built-in ones do.

    `params` must be usable (`load`). Raises RpcError for an unknown builtin.
    """
    builtin = _builtin(Purpose.REWARD, path)
    fields = builtin.fields if builtin is not None else ()
    return [field for field in fields if field.only_if is None or field.only_if(params)]


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


def _builtin(purpose: Purpose, path: str) -> Builtin | None:
    """Return the builtin that `builtin:<name>` names, or None for other paths. Raises RpcError for unknown names."""
    module_name, _, name = path.partition(":")
    if module_name != _BUILTIN:
        return None
    builtins = _KINDS[purpose].builtins
    if name not in builtins:
        near = difflib.get_close_matches(name, builtins, n=1) or sorted(builtins)
        raise refused(purpose, path, f"names no builtin; use {_BUILTIN}:{near[0]}")
    return builtins[name]


def _checked(builtin: Builtin, purpose: Purpose, path: str, params: dict[str, Any]) -> Callable[..., Any]:
    """Import the optional modules of a builtin, so that the timeout of its first call does not include the imports.

    Raises BadInput if a module is not installed, or if no call with `params` can succeed.
    """
    for module in builtin.modules:
        if importlib.util.find_spec(module) is None:
            raise refused(purpose, path, f"needs the package {module}; run `make setup-{builtin.extra}`")
        importlib.import_module(module)
    try:
        if builtin.check is not None:
            builtin.check(params)
    except (re.error, KeyError, TypeError) as error:
        raise refused(purpose, path, f"params {params!r:.100} cannot work ({type(error).__name__}: {error})") from None
    return builtin.call


class Wanted(msgspec.Struct):
    """One function: topology key, kind (`reward`, `workflow` or a key of `ARGUMENTS`), import path and arguments."""

    key: str
    kind: str
    path: str
    params: dict[str, Any]


def problem(wanted: Wanted) -> str:
    """Import the function. Return the one-line reason why a run could not use it, or an empty string if it could."""
    try:
        if wanted.kind in tuple(Purpose):
            load(Purpose(wanted.kind), wanted.path, wanted.params)
        else:
            find_function(wanted.path, wanted.key, ARGUMENTS[wanted.kind], wanted.params)
    except (RpcError, ValueError) as error:
        return str(error).removeprefix(f"{wanted.key}: ")
    return ""


def main(descriptor: int) -> None:
    link = confine(descriptor)
    if link is None:
        return
    with link, link.makefile("rb") as asked:
        for wanted in msgspec.json.decode(asked.read(), type=list[Wanted]):
            link.sendall(msgspec.json.encode(problem(wanted)) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
