"""Finds the reward functions a topology names. Must fail at the start of a run, in one line, and never later."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proto.messages import ErrorCode
from services.rollout.rewards.builtin import BUILTINS
from shared.rpc.errors import RpcError

GROUP_PARAMETER = "samples"


class Term(Protocol):
    """One line of the topology's `reward`: `shared.topology` has such a class."""

    @property
    def function(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def params(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RewardFunction:
    """A function ready to call. `group`: takes all samples of a task at once; `is_async`: returns a coroutine."""

    name: str
    call: Callable[..., Any]
    weight: float
    params: dict[str, Any]
    group: bool
    is_async: bool


def load_rewards(terms: Sequence[Term]) -> list[RewardFunction]:
    """The functions of `terms`. A module is looked for on Python's path, then in the current directory.

    A function whose first parameter is named `samples` scores a group at once. Raises RpcError(bad_request) for what
    cannot be imported, is no function, or does not take its `params`.
    """
    return [_load(term) for term in terms]


def _load(term: Term) -> RewardFunction:
    call = _find(term.function)
    try:
        signature = inspect.signature(call)
        signature.bind(None, **term.params)
    except (TypeError, ValueError) as error:
        raise _refused(
            term.function, f"cannot be called as fn(sample, **params) with params {sorted(term.params)} ({error})"
        ) from None
    first = next(iter(signature.parameters), "")
    return RewardFunction(
        name=term.function,
        call=call,
        weight=term.weight,
        params=dict(term.params),
        group=first == GROUP_PARAMETER,
        is_async=inspect.iscoroutinefunction(call),
    )


def _find(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if module_name == "builtin":
        if name not in BUILTINS:
            near = difflib.get_close_matches(name, BUILTINS, n=1) or sorted(BUILTINS)
            raise _refused(path, f"names no builtin; use builtin:{near[0]}")
        return BUILTINS[name]
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's folder must not hide our packages
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise _refused(path, f"cannot be imported from {folder} ({type(error).__name__}: {error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise _refused(path, f"{module.__file__} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def _refused(path: str, why: str) -> RpcError:
    return RpcError(ErrorCode.BAD_REQUEST, f"reward function {path!r}: {why}"[:600].replace("\n", " "))
