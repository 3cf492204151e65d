"""Finds the reward functions a topology names. Must fail at the start of a run, in one line, and never later."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.rollout.rewards.builtin import BUILTINS
from services.rollout.user_code import builtin_name, find_function, refused, require
from services.rollout.user_trace import Home, home_of

GROUP_PARAMETER = "samples"
WHAT = "reward function"


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
    params: dict[str, Any]
    group: bool
    is_async: bool
    home: Home = Home()  # noqa: RUF009  # frozen


def is_inline(function: str) -> bool:
    """Whether the function at this import path may run in the service itself: some builtins, never a user's."""
    name = builtin_name(function, BUILTINS, WHAT)
    return name is not None and BUILTINS[name].inline


def load_reward(function: str, params: dict[str, Any]) -> RewardFunction:
    """The function at the import path `function`.

    One whose first parameter is named `samples` scores a group at once. Raises RpcError(bad_request) for what cannot
    be imported, is no function, or does not take its `params`.
    """
    call = _find(function, params)
    try:
        signature = inspect.signature(call)
        signature.bind(None, **params)
    except (TypeError, ValueError) as error:
        raise refused(
            WHAT, function, f"cannot be called as fn(sample, **params) with params {sorted(params)} ({error})"
        ) from None
    first = next(iter(signature.parameters), "")
    return RewardFunction(
        name=function,
        call=call,
        params=dict(params),
        group=first == GROUP_PARAMETER,
        is_async=inspect.iscoroutinefunction(call),
        home=home_of(call),
    )


def _find(path: str, params: dict[str, Any]) -> Callable[..., Any]:
    name = builtin_name(path, BUILTINS, WHAT)
    if name is None:
        return find_function(path, WHAT)
    builtin = BUILTINS[name]
    require(builtin.modules, builtin.extra, path, WHAT)
    for module in builtin.modules:
        importlib.import_module(module)  # now, not in the first call's time
    if builtin.check is not None:
        try:
            builtin.check(params)
        except (re.error, KeyError, TypeError) as error:
            raise refused(WHAT, path, f"params {params!r:.100} cannot work ({type(error).__name__}: {error})") from None
    return builtin.call
